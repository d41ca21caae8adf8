"""Computes the head over word pieces in chunks of predictions, without a matrix of all logits.

On a small machine the logits dominate a BERT's step. A batch of 32 sequences has 608 masked
positions; with a vocabulary of 30,522 their logits take 74 MB, which the loss, its gradient and two
metrics write and read repeatedly. This head computes logits, cross-entropy, accuracy and both
gradients of one chunk of predictions before the next, as cut-cross-entropy (Wijmans et al., arXiv
2411.09009) and Liger Kernel (Hsu et al., arXiv 2410.10989) do on GPUs. Predictions of weight zero
(empty slots of masked positions, prompts) come last, and chunks of nothing else are left out. The
results are those of the stock head: nothing is sampled.
"""

import keras
import keras_nlp
import numpy as np
import tensorflow as tf

from distribution import attention
from distribution.keras_compat import hub_models

# Most logits of a chunk: 80 MB in float32, 800 on large GPUs. Larger products are faster.
LOGITS_AT_ONCE = 20_000_000
LOGITS_AT_ONCE_ON_LARGE_GPUS = 200_000_000
# Elsewhere a quarter of the predictions is a chunk, so that some can be left out, but not fewer
# than these.
FEWEST_ROWS = 400
# The metrics computed from the chunks, by their column of the scores.
COLUMNS = {
    keras.metrics.SparseCategoricalCrossentropy: 0,
    keras.metrics.SparseCategoricalAccuracy: 1,
}
# Half precision has no number below 6e-8; probabilities in a large vocabulary come close.
HALF_PRECISION_SCALE = 1024.0
HALF_PRECISION_LIMIT = 32_768.0  # half of its largest number


class ChunkedHead(keras.Model):
    """Trains and evaluates a model of word pieces without all its logits; shares its weights.

    Its output is the hidden states, not the logits: predict with the model itself.

    Example:
        >>> learner = chunked_masked_lm(model)
        >>> learner.compile(
        ...     optimizer,
        ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ...     weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        ... )
        >>> learner.fit(data)      # trains `model`

    Args:
        model: the model, whose logits are `hidden @ embeddings^T + bias`.
        hidden: maps the model's inputs to the states before the logits, of shape (batch,
            predictions, width), with the model's layers.
        embeddings: variable of shape (vocabulary size, width).
        bias: variable of shape (vocabulary size,), or None for none.
        transposed: whether `embeddings` has the shape (width, vocabulary size).
    """

    leaves_padding_out = True  # for distribution.step: predictions of weight zero have no effect

    def __init__(
        self,
        model: keras.Model,
        hidden: keras.Model,
        embeddings,
        bias=None,
        transposed: bool = False,
    ):
        super().__init__(name=f"{model.name}_in_chunks")
        self.whole = model
        self.hidden = hidden
        # In a function: as attributes they would come first among the optimizer's variables.
        self.output_weights = lambda: (embeddings, bias)
        self.transposed = transposed

    def compile(self, *args, loss=None, weighted_metrics=None, **kwargs) -> None:
        """Compiles like `keras.Model.compile()`, for the supported loss and metrics.

        Raises:
            ValueError: the loss is not `SparseCategoricalCrossentropy` of logits, or a metric
                neither `SparseCategoricalCrossentropy` nor `SparseCategoricalAccuracy`.
        """
        metrics = weighted_metrics or []
        if (
            not isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
            or not loss.get_config()["from_logits"]
            or any(type(metric) not in COLUMNS for metric in metrics)
        ):
            raise ValueError(
                "a head in chunks has the loss keras.losses.SparseCategoricalCrossentropy("
                "from_logits=True) and the weighted_metrics SparseCategoricalCrossentropy and "
                "SparseCategoricalAccuracy; any other needs the stock head"
            )
        metrics = [
            keras.metrics.MeanMetricWrapper(_column, metric.name, column=COLUMNS[type(metric)])
            for metric in metrics
        ]
        super().compile(*args, loss=loss, weighted_metrics=metrics, **kwargs)
        self.whole.optimizer = self.optimizer  # Keras saves it beside the weights

    def call(self, inputs, training=None):
        """Computes the states before the logits: {"hidden": (batch, predictions, width)}.

        `compute_loss` adds the scores for `compute_metrics`, so that the logits are computed once.
        """
        return {"hidden": self.hidden(inputs, training=training)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns the mean of the weighted cross-entropies of this replica; scalar.

        As Keras's own: the sum of weight x cross-entropy over the number of predictions.
        `distribution.step` hands over weights whose mean over the global batch is one.
        """
        weights = tf.ones_like(y) if sample_weight is None else sample_weight
        weights = tf.cast(weights, keras.config.floatx())
        # Relative to the largest weight: half precision cannot represent small ones.
        relative = tf.math.divide_no_nan(weights, tf.reduce_max(weights))
        total, y_pred["scores"] = self._scores(y, y_pred, relative, gradients=training)
        mean = tf.math.divide_no_nan(total, tf.cast(tf.reduce_sum(relative), total.dtype))
        share = tf.reduce_mean(weights)
        # On one replica it is one, up to a rounding that would reach every gradient.
        rounding = 32 * weights.dtype.as_numpy_dtype(np.finfo(weights.dtype.as_numpy_dtype).eps)
        share = tf.where(tf.abs(share - 1) < rounding, tf.ones_like(share), share)
        return mean * tf.cast(share, mean.dtype)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Updates the metrics; returns all of them by name."""
        scores = y_pred.get("scores")
        if scores is None:  # Keras builds the metrics before it has a loss
            _, scores = self._scores(y, y_pred, sample_weight, gradients=False)
        return super().compute_metrics(x, y, scores, sample_weight)

    def _scores(self, y, y_pred, sample_weight, gradients: bool):
        hidden = y_pred["hidden"]
        embeddings, bias = self.output_weights()
        kernel = tf.convert_to_tensor(embeddings)
        kernel = tf.transpose(kernel) if self.transposed else kernel
        bias = tf.zeros(kernel.shape[:1], kernel.dtype) if bias is None else bias
        bias = tf.convert_to_tensor(bias)
        weights = tf.ones_like(y) if sample_weight is None else sample_weight
        total, cross_entropy, hit = weighted_cross_entropy(
            tf.reshape(hidden, [-1, kernel.shape[1]]),
            kernel,
            bias,
            tf.reshape(tf.cast(y, tf.int32), [-1]),
            tf.reshape(tf.cast(weights, bias.dtype), [-1]),
            gradients=gradients,
            kernel_trains=getattr(embeddings, "trainable", True),
        )
        scores = tf.stack([cross_entropy, hit], axis=-1)
        return total, tf.reshape(scores, tf.concat([tf.shape(y), [2]], axis=0))

    def save(self, *args, **kwargs) -> None:
        """Saves the model itself, which `keras.saving.load_model` returns."""
        self.whole.save(*args, **kwargs)

    def save_weights(self, *args, **kwargs) -> None:
        """Saves the model's weights and the optimizer; the file is the same with any head."""
        self.whole.save_weights(*args, **kwargs)

    def load_weights(self, *args, **kwargs) -> None:
        """Loads the model's weights and the optimizer."""
        self.whole.load_weights(*args, **kwargs)


def has_tied_logits(masked_lm: keras_nlp.models.MaskedLM) -> bool:
    """Tells whether a model's logits are hidden states times its embeddings plus a bias."""
    head = getattr(masked_lm, "masked_lm_head", None)
    if not isinstance(head, keras_nlp.layers.MaskedLMHead) or head.token_embedding is None:
        return False
    embedding = head.token_embedding.get_config()
    ties = embedding.get("tie_weights", False) and embedding.get("logit_soft_cap") is None
    return ties and head.activation in (None, keras.activations.linear)


def chunked_masked_lm(masked_lm: keras_nlp.models.MaskedLM) -> ChunkedHead:
    """Returns a `ChunkedHead` that trains and evaluates a `MaskedLM`.

    Args:
        masked_lm: of any family, with `has_tied_logits()`.
    """
    head, inputs = masked_lm.masked_lm_head, masked_lm.input
    encoded = masked_lm.backbone({name: inputs[name] for name in masked_lm.backbone.input})
    if isinstance(encoded, dict):  # next to the input of a classifier
        encoded = encoded["sequence_output"]
    positions = keras.ops.expand_dims(inputs["mask_positions"], axis=-1)
    hidden = keras.ops.take_along_axis(encoded, positions, axis=1)
    for layer in hub_models.transform_of(head):
        hidden = layer(hidden)
    bias = hub_models.output_bias_of(head)
    embeddings = head.token_embedding.embeddings
    return ChunkedHead(masked_lm, keras.Model(inputs, hidden), embeddings, bias)


def _column(labels, scores, column: int):
    return scores[..., column]


def weighted_cross_entropy(
    hidden: tf.Tensor,
    kernel: tf.Tensor,
    bias: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    gradients: bool = True,
    kernel_trains: bool = True,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes the sum of weight x cross-entropy over all predictions, chunk by chunk.

    The logits are `hidden @ kernel^T + bias`. The gradient of their softmax's cross-entropy is
    (softmax - one-hot); with e = exp(logits - max) and s = the sum of e, the gradient of `hidden`
    is w (e @ kernel / s - kernel[label]), and that of `kernel` is e^T @ (hidden w / s) with
    w hidden subtracted from each label's row. So e is computed once and read by two matrix
    products.

    Args:
        hidden: of shape (predictions, width), in the precision of the matrix products.
        kernel: the word pieces' vectors, of shape (vocabulary size, width).
        bias: of shape (vocabulary size,); its dtype is that of all sums.
        labels: int32 of shape (predictions,).
        weights: of shape (predictions,), in the bias's dtype.
        gradients: whether the sum will be differentiated; if not, half of the work is skipped.
        kernel_trains: whether the kernel needs a gradient, a third of the work and as large as the
            kernel; under frozen embeddings (adapters) it does not.

    Returns:
        The sum, scalar, with gradients to `hidden`, `kernel` if it trains, and `bias`; and, without
        gradients, each prediction's cross-entropy in nats and whether the label is the first word
        piece with the largest logit (1 or 0), of shape (predictions,), where its weight is not
        zero. All in the bias's dtype.
    """

    @tf.custom_gradient
    def summed(hidden, kernel, bias):
        cross_entropy, hit, *parts = _all_chunks(
            hidden, kernel, bias, labels, weights, gradients, kernel_trains
        )

        def gradient(d_sum, *_):
            return [
                None if part is None else tf.cast(tf.cast(d_sum, part.dtype) * part, of.dtype)
                for part, of in zip(parts, (hidden, kernel, bias), strict=True)
            ]

        return (tf.reduce_sum(weights * cross_entropy), cross_entropy, hit), gradient

    return summed(hidden, kernel, bias)


def _all_chunks(hidden, kernel, bias, labels, weights, grads: bool, kernel_trains: bool) -> list:
    """Computes cross-entropies and hits, and with `grads` the gradients of the sum."""
    vocabulary_size, width = kernel.shape
    kernel = tf.cast(kernel, hidden.dtype)
    count = tf.shape(hidden)[0]
    if attention.has_hopper_gpus():
        most = tf.constant(max(1, LOGITS_AT_ONCE_ON_LARGE_GPUS // vocabulary_size))
    else:
        most = tf.minimum(
            max(1, LOGITS_AT_ONCE // vocabulary_size), tf.maximum(FEWEST_ROWS, -(-count // 4))
        )
    chunks = -(-count // most)
    rows = -(-count // tf.maximum(chunks, 1))  # of about the same size
    # One at least, since what no chunk has written has no shape.
    needed = tf.maximum(1, tf.math.count_nonzero(weights, dtype=tf.int32))
    order = tf.argsort(tf.cast(weights == 0, tf.int32), stable=True)

    def cut(values):
        values = tf.gather(values, order)
        padding = [[0, chunks * rows - count]] + [[0, 0]] * (len(values.shape) - 1)
        return tf.reshape(tf.pad(values, padding), [chunks, rows, *values.shape[1:]])

    hidden, labels, weights = cut(hidden), cut(labels), cut(weights)

    def one_chunk(index, per_chunk, to_kernel, to_bias):
        h, label, weight = hidden[index], labels[index], weights[index]
        logits = tf.cast(tf.matmul(h, kernel, transpose_b=True), bias.dtype) + bias
        largest = tf.reduce_max(logits, axis=1)
        of_label = tf.gather(logits, label, batch_dims=1)
        e = tf.exp(logits - largest[:, None])
        s = tf.reduce_sum(e, axis=1)
        losses = tf.math.log(s) + largest - of_label
        hits = (
            tf.argmax(logits, axis=1, output_type=label.dtype) == label
        )  # of equal ones the first
        per_prediction = [losses, tf.cast(hits, bias.dtype)]
        if grads:
            low = tf.cast(e, h.dtype)
            share = weight / s
            forward = tf.cast(tf.matmul(low, kernel), bias.dtype) * share[:, None]
            one_hot = tf.cast(tf.gather(kernel, label), bias.dtype) * weight[:, None]
            per_prediction.append(forward - one_hot)
            of_pieces = tf.linalg.matvec(e, share, transpose_a=True)
            if kernel_trains:
                wide = tf.cast(h, bias.dtype)
                scale = tf.constant(1.0, bias.dtype)
                if h.dtype == tf.float16:  # no sum over the chunk is larger than this
                    most_of_it = tf.reduce_max(tf.abs(wide)) * tf.reduce_max(of_pieces)
                    fits = tf.math.divide_no_nan(HALF_PRECISION_LIMIT, most_of_it)
                    scale = tf.where(most_of_it > 0, tf.minimum(HALF_PRECISION_SCALE, fits), scale)
                scaled = wide * (share * scale)[:, None]
                part = tf.matmul(low, tf.cast(scaled, h.dtype), transpose_a=True)
                to_kernel += tf.cast(part, bias.dtype) / scale
            to_bias += of_pieces
        per_chunk = [
            array.write(index, values)
            for array, values in zip(per_chunk, per_prediction, strict=True)
        ]
        return index + 1, per_chunk, to_kernel, to_bias

    shapes = [[], [], [width]] if grads else [[], []]
    arrays = [
        tf.TensorArray(bias.dtype, size=chunks, element_shape=[None, *shape]) for shape in shapes
    ]
    size = vocabulary_size if grads else 0
    rows_to_kernel = size if kernel_trains else 0
    _, arrays, to_kernel, to_bias = tf.while_loop(
        lambda index, *_: (index < chunks) & (index * rows < needed),
        one_chunk,
        (0, arrays, tf.zeros([rows_to_kernel, width], bias.dtype), tf.zeros([size], bias.dtype)),
        parallel_iterations=1,
    )
    places = tf.math.invert_permutation(order)
    gradients = [
        tf.gather(tf.reshape(array.stack(), [-1, *shape]), places)
        for array, shape in zip(arrays, shapes, strict=True)
    ]
    if not grads:
        return gradients
    # The labels' part of the gradient, for all chunks at once. Negative numbers are added: what XLA
    # compiles for a GPU adds in one instruction and subtracts by trying again and again, which took
    # up to two fifths of a causal model's step (docs/performance.md).
    label, weight = tf.reshape(labels, [-1]), tf.reshape(weights, [-1])
    if kernel_trains:
        weighted = tf.cast(tf.reshape(hidden, [-1, width]), bias.dtype) * weight[:, None]
        to_kernel = tf.tensor_scatter_nd_add(to_kernel, label[:, None], -weighted)
    to_bias = tf.tensor_scatter_nd_add(to_bias, label[:, None], -weight)
    return [*gradients, to_kernel if kernel_trains else None, to_bias]
