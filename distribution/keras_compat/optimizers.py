"""Changes optimizers: one update of all weights, rates by variable, Muon for attention."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from distribution.keras_compat.replacing import replaced


def leave_gradients_reduced() -> contextlib.AbstractContextManager:
    """Makes an optimizer treat its gradients as already summed over the replicas.

    Breaks: Keras sums them in the innermost part of `apply()`, after clipping and after the check
    for an overflow, and has no public way to skip it (keras-team/keras#19308, open). Does:
    leaves it out.
    """

    def make(stock):
        return lambda self, grads_and_vars: grads_and_vars

    return replaced(TFOptimizer, "_all_reduce_sum_gradients", make)


@contextlib.contextmanager
def update_together() -> Iterator[None]:
    """Decays and updates all weights of a replica in one call.

    Breaks: Keras makes a call for each weight and traces the schedule again for each decay, which
    takes up to two seconds with two replicas; and unless XLA compiles the whole step, each op of an
    update is a separate kernel. Does: makes one call, which XLA compiles where the optimizer's
    `jit_compile` is set.
    """

    def leave_decay(stock):
        def apply_weight_decay(self, variables):
            # Not called for an optimizer with a different decay, such as Muon.
            self.decays = self.weight_decay is not None

        return apply_weight_decay

    def make_update(stock):
        def update_all(self, strategy, gradients_and_variables, rate):
            gradients, variables = zip(*gradients_and_variables, strict=True)

            def update(gradients, rate):
                for gradient, variable in zip(gradients, variables, strict=True):
                    if getattr(self, "decays", False) and self._use_weight_decay(variable):
                        decay = variable * tf.cast(self.weight_decay, variable.dtype)
                        variable.assign_sub(decay * tf.cast(rate, variable.dtype))
                    # Muon does not cast a schedule's rate, which is float32, to float64.
                    self.update_step(gradient, variable, tf.cast(rate, variable.dtype))

            def on_replica(_, gradients, rate):
                jit_compile = getattr(self, "jit_compile", False)
                function = tf.function(update, jit_compile=True) if jit_compile else update
                function(gradients, tf.convert_to_tensor(rate))

            # TensorFlow takes the devices from one variable; the others are on the same ones.
            strategy.extended.update(variables[0], on_replica, (list(gradients), rate), group=False)

        return update_all

    with (
        replaced(TFOptimizer, "_apply_weight_decay", leave_decay),
        replaced(TFOptimizer, "_distributed_tf_update_step", make_update),
    ):
        yield


def scale_learning_rates(optimizer: keras.optimizers.Optimizer, factors: dict[int, float]) -> None:
    """Multiplies the learning rate and the weight decay of some variables.

    Breaks: a Keras optimizer has one rate for all variables (keras-team/keras#21741, open). Does:
    scales it in `update_step()`. The weight decay follows this rate, so it moves there too.

    Args:
        optimizer: not yet built; changed in place. Its `weight_decay` is None afterwards.
        factors: by the `id()` of the variable; any other keeps the rate.
    """
    base, weight_decay = type(optimizer), optimizer.weight_decay
    by_index: list[float] = []

    class ScaledRates(base):  # type: ignore[misc,valid-type]
        def get_config(self):
            return super().get_config() | {"weight_decay": weight_decay}

        def build(self, variables):
            super().build(variables)
            by_index[:] = [factors.get(id(variable), 1.0) for variable in variables]

        def update_step(self, gradient, variable, learning_rate):
            factor = by_index[self._get_variable_index(variable)]
            rate = tf.cast(learning_rate, variable.dtype) * factor
            if weight_decay is not None and self._use_weight_decay(variable):
                variable.assign_sub(variable * tf.cast(weight_decay, variable.dtype) * rate)
            super().update_step(gradient, variable, rate)

    change_class(optimizer, ScaledRates)
    optimizer.weight_decay = None


def orthogonalize_heads(optimizer: keras.optimizers.Muon, width: int | None = None) -> None:
    """Makes Muon update the kernels of attention layers, each head's matrix on its own.

    Breaks: `keras.optimizers.Muon` updates whatever has two dimensions, so AdamW updates the
    kernels of attention layers, whose shape is (width, heads, width of a head), in Gemma (heads,
    width, width of a head), or (heads, width of a head, width) after it, and Muon their biases;
    and it assigns weights to decay them, which TensorFlow refuses in a replica where all replicas
    share one copy. Does: orthogonalizes such a kernel as a stack of matrices, one of each head,
    leaves the biases to AdamW, and decays weights as Keras's other optimizers do.

    Args:
        optimizer: not yet built; changed in place. Both of its weight decays are equal.
        width: of the model, to tell Gemma's kernels from the others'; None if it has none of them.
    """
    base = type(optimizer)
    orders: dict[int, tuple] = {}  # by index of the variable: its axes, heads first

    class MuonOfHeads(base):  # type: ignore[misc,valid-type]
        def build(self, variables):
            super().build(variables)
            # At an update a variable is TensorFlow's, without its path.
            for index, variable in enumerate(variables):
                if _is_of_heads(variable):
                    heads_first = variable.shape[1] == width != variable.shape[0]
                    is_output = "output" in variable.path or "o_proj" in variable.path
                    orders[index] = (0, 1, 2) if is_output or heads_first else (1, 0, 2)

        def _apply_weight_decay(self, variables):
            super(keras.optimizers.Muon, self)._apply_weight_decay(variables)

        def _should_use_adamw(self, variable):
            if _is_of_heads(variable):
                return False
            return "bias" in variable.name or super()._should_use_adamw(variable)

        def _muon_update_step(self, gradient, variable, lr, m):
            order = orders.get(self._get_variable_index(variable))
            if order is None:
                return super()._muon_update_step(gradient, variable, lr, m)
            self.assign_add(m, gradient + m * (self.momentum - 1))
            update = gradient + self.momentum * m if self.nesterov else m
            update = tf.transpose(update, order)
            rows, columns = update.shape[1:]
            update = self.zeropower_via_newtonschulz5(update, self.ns_steps)
            if self.rms_rate is not None:
                update *= self.rms_rate * max(rows, columns) ** 0.5
            self.assign_sub(variable, lr * tf.transpose(update, order))

    change_class(optimizer, MuonOfHeads)


def _is_of_heads(variable) -> bool:
    # The path of SmolLM3's output projection is o_proj/kernel.
    is_of_attention = "attention" in variable.path or "o_proj" in variable.path
    return len(variable.shape) == 3 and variable.name == "kernel" and is_of_attention


def change_class(optimizer: keras.optimizers.Optimizer, changed: type) -> None:
    """Gives an optimizer a subclass of its class, under the name by which Keras saves it."""
    base = type(optimizer)
    changed.__name__, changed.__qualname__ = base.__name__, base.__qualname__
    changed.__module__ = base.__module__
    optimizer.__class__ = changed
