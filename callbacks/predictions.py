"""What the callbacks share that show in TensorBoard how a model answers: it answers each epoch."""

import keras
import numpy as np
import tensorflow as tf

from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard


class Predictions(StepCallback):
    """Asks the model about the same examples after each epoch; a base.

    Subclasses implement `show(outputs)`, which is called where the summaries are written, on the
    chief. The other workers ask nothing, unless `everywhere` is set.

    Args:
        tensorboard: where the summaries go, at the step of the run.
        inputs: what the model takes, an array or a dict of arrays, the examples first.
        batch_size: examples of one call of the model.
        split: TensorBoard's run.
        asked: the model that answers; the one that `fit()` trains by default.
    """

    everywhere = False

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs,
        batch_size: int = 250,
        split: str = "test",
        asked: keras.Model | None = None,
    ):
        super().__init__()
        self.tensorboard = tensorboard
        self.inputs = inputs
        self.batch_size = batch_size
        self.split = split
        self.asked = asked

    def on_epoch_end(self, epoch, logs=None):
        """Asks and shows."""
        if self.tensorboard.folder is None and not self.everywhere:
            return
        outputs = self.outputs()
        with self.tensorboard.writing(self.split, self.step):
            self.show(outputs)

    def show(self, outputs: np.ndarray) -> None:
        """Writes summaries with `tf.summary`.

        Args:
            outputs: what the model says of all examples, float, the examples first.
        """
        raise NotImplementedError

    def outputs(self) -> np.ndarray:
        """What the model says of all examples with the weights of this moment."""
        # `predict()` hands each worker its part of the examples and then asks for all of them. A
        # plain call of the model reads this worker's own copy of the weights, under any strategy,
        # and nothing is traced.
        model = ask = self.asked or self.model
        if model.compute_dtype != model.variable_dtype:
            # KerasHub's head adds its float32 bias to half precision, which only a graph takes.
            ask = tf.function(model)
        count = len(keras.tree.flatten(self.inputs)[0])
        found = []
        for start in range(0, count, self.batch_size):
            batch = keras.tree.map_structure(
                lambda array, start=start: keras.ops.convert_to_tensor(
                    array[start : start + self.batch_size]
                ),
                self.inputs,
            )
            found.append(keras.ops.convert_to_numpy(ask(batch, training=False)))
        return np.concatenate(found)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
