"""Sets the precision of a run and checks its model's; decides whether XLA compiles the step."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from data.errors import listed
from distribution import kinds, strategies
from distribution.keras_compat import inspection, randomness
from training.errors import RunError
from training.options import SharedOptions

# Steps from which compiling pays on a GPU: on an H200 it took 9 s (BERT-tiny) and 29 s (BERT-base),
# and saved 0.012 s and 0.089 s of a step (docs/performance.md).
GPU_JIT_MIN_STEPS = 750


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Sets dtype policy and float type, and restores them at the end."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    set_precision(name)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def set_precision(name: str) -> None:
    """Sets dtype policy and float type."""
    keras.config.set_floatx("float64" if name == "float64" else "float32")
    keras.config.set_dtype_policy(name)


def require_precision(model: keras.Model, name: str) -> None:
    """Rejects a model whose layers were created under another dtype policy than the run's.

    Args:
        model: built.
        name: `--precision`.

    Raises:
        RunError: Keras's session was cleared, the policy is not the run's any more, or no layer
            computes in its dtype.
    """
    if randomness.random_seed() is None:
        raise RunError(
            "keras.utils.clear_session() was called after run.plan(), and has reset the seed and "
            "the dtype policy of the run: call it before"
        )
    now = keras.config.dtype_policy().name
    if now != name:
        raise RunError(
            f"--precision {name}: Keras's dtype policy was changed to {now}: choose it by "
            "--precision alone"
        )
    dtype = keras.DTypePolicy(name).compute_dtype
    parts = [e for e in inspection.layers_of(model) if not isinstance(e, keras.Model)]
    found = {each.compute_dtype for each in parts if each.weights}
    if found and dtype not in found:
        raise RunError(
            f"--precision {name}: no layer of the model {model.name} computes in {dtype} (but in "
            f"{listed(sorted(found))}): create the layers after run.plan() and without a dtype, or "
            "pass their own precision as --precision"
        )


def jit_compile(options: SharedOptions, strategy: tf.distribute.Strategy, steps: int) -> bool | str:
    """Decides whether XLA compiles the step: `--jit auto`.

    On CPUs it compiles from `JIT_MIN_STEPS` steps, measured per recipe: two replicas on two cores
    trained at 36,000 instead of 29,000 tokens/s (BERT-tiny) and started 6 seconds later. On GPUs it
    compiles from `GPU_JIT_MIN_STEPS` steps for each shape of a batch: on an H100, BERT-base trained
    at 414,000 instead of 99,000 tokens/s (bfloat16), and on an H100 split in two, 6 layers of 768
    at 485,000 instead of 173,000. With `--deterministic` it compiles only on one GPU, and only
    recipes whose compiled steps were found to be identical (`GPU_JIT_IS_DETERMINISTIC`): XLA
    refuses some operations then, such as the gradient of max pooling. How much faster such a run is
    was not measured.

    Args:
        options: `--jit`, and the options that XLA does not support or would change.
        strategy: XLA cannot compile where all replicas share one copy of the weights.
        steps: steps of the run.

    Returns:
        True or False, or "auto" to leave it to Keras, which compiles on one GPU if XLA can.
    """
    if options.jit != "auto":
        return options.jit == "on"
    name, replicas = kinds.name_of(strategy), strategies.replicas(strategy)
    if options.precision == "float64" or name in kinds.SHARED_WEIGHTS:
        return "auto"
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    min_steps = GPU_JIT_MIN_STEPS * options.batch_shapes if on_gpu else options.JIT_MIN_STEPS
    is_long = min_steps is not None and steps >= min_steps
    is_plain = on_gpu and replicas == 1 and options.accumulate_steps == 1
    if options.deterministic:  # Keras compiles nothing then
        return (is_long and is_plain and options.GPU_JIT_IS_DETERMINISTIC) or "auto"
    if is_plain:
        return "auto" if is_long else False
    return is_long or "auto"
