"""Adds what Keras lacks for tf.distribute: the only file that touches private names of Keras.

Each piece says what breaks, names the upstream thread where there is one, and what it does. What
has to be patched for the whole process is a context manager, and `patch_keras_for` enters those
that a strategy needs. `make check-upstream` tells which pieces the installed Keras no longer needs.
Tested with Keras 3.15.1 and TensorFlow 2.21.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.saving import saving_lib
from keras.src.trainers import epoch_iterator
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.framework.config import is_op_determinism_enabled


@contextlib.contextmanager
def patch_keras_for(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within it `fit()` and `evaluate()` run under this strategy; afterwards Keras is stock again.

    The model is created within it too. It may be entered again, also for another strategy.
    """
    parameter_server = tf.distribute.ParameterServerStrategy
    shared_weights = (tf.distribute.experimental.CentralStorageStrategy, parameter_server)
    patches = [use_what_is_built, count_from_mid_epoch, write_weights_at_once, share_losses]
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        patches += [average_logs, distribute_data]
    if isinstance(strategy, parameter_server):
        patches += [distribute_data]
    if isinstance(strategy, shared_weights):
        patches += [share_dropout_seeds, add_in_place]
    else:
        patches += [update_together]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


@contextlib.contextmanager
def _replaced(owner, name: str, make: Callable) -> Iterator[None]:
    """Replaces a function of a class or module by `make(stock)`, and puts it back."""
    stock = getattr(owner, name)
    is_own = name in vars(owner)  # else it is inherited
    setattr(owner, name, functools.wraps(stock)(make(stock)))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)


def write_weights_at_once() -> contextlib.AbstractContextManager:
    """Lets a weights file fail as other files do where the disk is full.

    Breaks: HDF5 keeps what it could not write and tries again whenever an object of the file goes:
    a hundred lines of "Exception ignored", and at the end of the process a segmentation fault.
    Does: lets Keras make the file in memory, as it does for an archive, and write it at once.
    """

    class Disk:
        """Stands for the archive."""

        @staticmethod
        def writestr(path, content):
            Path(path).write_bytes(content)

    def make(stock):
        def init(self, path_or_io, archive=None, mode="r"):
            is_plain = type(self) is saving_lib.H5IOStore and archive is None
            if mode == "w" and is_plain and isinstance(path_or_io, str | Path):
                archive = Disk
            stock(self, path_or_io, archive, mode)

        return init

    return _replaced(saving_lib.H5IOStore, "__init__", make)


def share_losses() -> contextlib.AbstractContextManager:
    """Counts the losses of a model's layers, as of an L2 penalty, once over all replicas.

    Breaks: Keras multiplies them by 1 / replicas, which TensorFlow takes through float32: the
    gradient under three replicas differs by 1e-8. Does: divides by the replicas.
    """

    def make(stock):
        def scale_loss_for_distribution(value):
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            return keras.ops.divide(value, keras.ops.cast(replicas, value.dtype))

        return scale_loss_for_distribution

    return _replaced(loss_module, "scale_loss_for_distribution", make)


def average_logs() -> contextlib.AbstractContextManager:
    """Lets `fit()` return its logs under MultiWorkerMirroredStrategy.

    Breaks: `reduce_per_replica("auto")` takes the mean over axis 0 of scalars
    (keras-team/keras#20585, open). Does: takes the mean over all replicas, as Keras does under
    MirroredStrategy, in one all-reduce; so each worker logs the same numbers.
    """

    def make(stock):
        def reduce_per_replica(values, strategy, reduction):
            if reduction == "auto":
                return _mean_over_replicas(strategy, values)
            return stock(values, strategy, reduction)

        return reduce_per_replica

    return _replaced(tf_trainer, "reduce_per_replica", make)


def _mean_over_replicas(strategy, values):
    stacked = strategy.run(
        lambda logs: tf.stack(
            [tf.cast(v, keras.config.floatx()) for v in keras.tree.flatten(logs)]
        ),
        args=(values,),
    )
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, stacked, axis=None)
    return keras.tree.pack_sequence_as(values, tf.unstack(mean))


def add_in_place() -> contextlib.AbstractContextManager:
    """Lets metrics and counters add up under CentralStorage- and ParameterServerStrategy.

    Breaks: Keras's `variable.assign_add(x)` assigns `variable + x`. Where all replicas share one
    copy, the sum over n replicas counts the old value n times, and workers that do not wait for
    each other lose updates. Does: adds in place.
    """

    def make(stock):
        def assign_add(self, value):
            if self._value is None:
                return stock(self, value)
            self._value.assign_add(tf.cast(value, self._value.dtype))
            return None

        return assign_add

    return _replaced(Variable, "assign_add", make)


def distribute_data() -> contextlib.AbstractContextManager:
    """Lets each of several workers compute its own part of a global batch, and nothing else.

    Breaks: `TFEpochIterator` hands the dataset to `experimental_distribute_dataset`, which computes
    each global batch on every worker, and which ParameterServerStrategy refuses
    (keras-team/keras#18624). Does: where a dataset has `part_of_worker(index, workers)`, which
    returns the part of one worker, this worker takes that; beside parameter servers the coordinator
    iterates over the dataset itself.
    """

    def make(stock):
        def init(self, distribute_strategy=None, *args, **kwargs):
            stock(self, _OwnPart(distribute_strategy), *args, **kwargs)

        return init

    return _replaced(tf_trainer.TFEpochIterator, "__init__", make)


class _OwnPart:
    """Stands for the strategy while the iterator is made."""

    def __init__(self, strategy):
        self.strategy = strategy

    def experimental_distribute_dataset(self, dataset):
        if isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            return dataset
        if not hasattr(dataset, "part_of_worker"):
            return self.strategy.experimental_distribute_dataset(dataset)

        def make(context):
            workers = context.num_input_pipelines
            part = dataset.part_of_worker(context.input_pipeline_id, workers)
            replicas = context.num_replicas_in_sync // workers
            batch_size = keras.tree.flatten(part.element_spec)[0].shape[0]
            return part.rebatch(batch_size // replicas) if replicas > 1 else part

        return self.strategy.distribute_datasets_from_function(make)


def share_dropout_seeds() -> contextlib.AbstractContextManager:
    """Lets dropout run under CentralStorageStrategy and ParameterServerStrategy.

    Breaks: the seed variable has `aggregation="none"`, which these strategies refuse to assign
    in a replica. Does: creates it with `aggregation="only_first_replica"`.
    """

    def make(stock):
        def init(self, *args, **kwargs):
            if kwargs.get("name") == "seed_generator_state":
                kwargs["aggregation"] = "only_first_replica"
            stock(self, *args, **kwargs)

        return init

    return _replaced(Variable, "__init__", make)


_batches_done = 0  # of the epoch that begins next


@contextlib.contextmanager
def count_from_mid_epoch() -> Iterator[None]:
    """Lets `start_in_mid_epoch` set the batch from which an epoch of `fit()` counts.

    Breaks: `fit(initial_epoch=...)` starts at an epoch's first batch only, and so
    `BackupAndRestore` repeats the epoch that it was killed in. Does: drops the first counts of the
    epoch; the dataset must begin at that batch.
    """

    def make(stock):
        def enumerate_iterator(self):
            global _batches_done
            done, _batches_done = _batches_done, 0
            for begin, end, iterator in stock(self):
                if begin >= done:
                    yield begin, end, iterator

        return enumerate_iterator

    start_in_mid_epoch(0)
    try:
        with _replaced(epoch_iterator.EpochIterator, "_enumerate_iterator", make):
            yield
    finally:
        start_in_mid_epoch(0)


def start_in_mid_epoch(batch: int) -> None:
    """Makes the next epoch of `fit()` count from a batch other than 0.

    To be called within `patch_keras_for`, in a callback's `on_epoch_begin`.

    Args:
        batch: how many batches of the epoch are done. The dataset must begin at the next one.
    """
    global _batches_done
    _batches_done = batch


# What `build` has built, by model: its optimizer and its metrics.
_built: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def build(model: keras.Model, data: tf.data.Dataset) -> None:
    """Builds the optimizer and the metrics of a compiled model before `fit()`.

    Breaks: without a strategy Keras builds them while it traces the first step, which is too late
    to put a checkpoint's numbers into them, and the step is then traced twice. Does: builds them
    from the dataset's specification.

    Args:
        model: a compiled model. Compiled again, it needs this again.
        data: what `fit()` will get.
    """
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=data.element_spec)
    _built[model] = (model.optimizer, model._compile_metrics)


def use_what_is_built() -> contextlib.AbstractContextManager:
    """Lets `fit()` and `evaluate()` take the optimizer and the metrics that `build` has built.

    Breaks: under a strategy each `fit()` and `evaluate()` sets its data up on all replicas once
    more, only to read a batch's shapes; with several workers it cannot use that batch
    (keras-team/keras#20585, open). Does: leaves that out for a model that is built.
    """

    def make(stock):
        def maybe_symbolic_build(self, iterator=None, data_batch=None):
            if _built.get(self) != (self.optimizer, self._compile_metrics):
                stock(self, iterator, data_batch)

        return maybe_symbolic_build

    return _replaced(tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build", make)


def several_cpus_per_worker(count: int) -> contextlib.AbstractContextManager:
    """Lets MultiWorkerMirroredStrategy train on several logical CPUs in each worker.

    Breaks: TensorFlow takes all logical GPUs of a worker, but one CPU only, also where there are
    more. Does: names them all. It is needed while the strategy is constructed, not later.

    Args:
        count: how many logical CPUs this process has; with GPUs it does not count.
    """

    def make(stock):
        def initialize_local_devices(self, cluster_resolver, worker_device):
            devices, kind = stock(self, cluster_resolver, worker_device)
            if kind == "CPU":
                devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(count))
            return devices, kind

        return initialize_local_devices

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    return _replaced(extended, "_initialize_local_devices", make)


@contextlib.contextmanager
def update_together() -> Iterator[None]:
    """Decays and updates all weights of a replica in one call.

    Breaks: Keras makes a call for each weight and traces the schedule again for each decay, which
    takes up to two seconds with two replicas; and unless XLA compiles the whole step, each op of an
    update is a kernel of its own. Does: makes one call, which XLA compiles where the optimizer's
    `jit_compile` is set.
    """

    def leave_decay(stock):
        def apply_weight_decay(self, variables):
            # Not called for an optimizer that decays in a way of its own, such as Muon.
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
                    self.update_step(gradient, variable, rate)

            def on_replica(_, gradients, rate):
                jit_compile = getattr(self, "jit_compile", False)
                function = tf.function(update, jit_compile=True) if jit_compile else update
                function(gradients, tf.convert_to_tensor(rate))

            # TensorFlow takes the devices from one variable; the others are on the same ones.
            strategy.extended.update(variables[0], on_replica, (list(gradients), rate), group=False)

        return update_all

    with (
        _replaced(TFOptimizer, "_apply_weight_decay", leave_decay),
        _replaced(TFOptimizer, "_distributed_tf_update_step", make_update),
    ):
        yield


def scale_learning_rates(optimizer: keras.optimizers.Optimizer, factors: dict[str, float]) -> None:
    """Multiplies the learning rate and the weight decay of some variables.

    Breaks: a Keras optimizer has one rate for all variables (keras-team/keras#21741, open). Does:
    scales it in `update_step()`. The weight decay is that of this rate, so it moves there too.

    Args:
        optimizer: not yet built; changed in place. Its `weight_decay` is None afterwards.
        factors: by the path of the variable; any other keeps the rate.
    """
    base, weight_decay = type(optimizer), optimizer.weight_decay
    by_index: list[float] = []

    class ScaledRates(base):  # type: ignore[misc,valid-type]
        def build(self, variables):
            super().build(variables)
            by_index[:] = [factors.get(variable.path, 1.0) for variable in variables]

        def update_step(self, gradient, variable, learning_rate):
            factor = by_index[self._get_variable_index(variable)]
            rate = tf.cast(learning_rate, variable.dtype) * factor
            if weight_decay is not None and self._use_weight_decay(variable):
                variable.assign_sub(variable * tf.cast(weight_decay, variable.dtype) * rate)
            super().update_step(gradient, variable, rate)

    # The names under which Keras saves and loads an optimizer.
    ScaledRates.__name__, ScaledRates.__qualname__ = base.__name__, base.__qualname__
    ScaledRates.__module__ = base.__module__
    optimizer.__class__ = ScaledRates
    optimizer.weight_decay = None


class WithoutReduction:
    """An optimizer that takes its gradients as already summed over the replicas; a mixin.

    Breaks: Keras sums them in the innermost part of `apply()`, after clipping and after the look
    for an overflow, and has no public way to leave that out (keras-team/keras#19308, open). Does:
    leaves it out.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def logs_of_replicas(strategy: tf.distribute.Strategy, values):
    """Reduces what `strategy.run` returned to one value a name, as `fit()` does."""
    return tf_trainer.reduce_per_replica(values, strategy, "auto")


def learning_rate_of(optimizer: keras.optimizers.Optimizer):
    """Returns the optimizer's schedule, or its rate where it has none.

    Lacks: `optimizer.learning_rate` answers with the rate of the next step; there is no public name
    for the schedule itself.
    """
    return optimizer._learning_rate


def has_unweighted_metrics(model: keras.Model) -> bool:
    """Tells whether a model was compiled with `metrics=`, which ignore the examples' weights.

    Lacks: there is no public name for what `compile()` was given.
    """
    compiled = model._compile_metrics
    return bool(compiled is not None and keras.tree.flatten(compiled._user_metrics or []))


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers of a model, also those within other layers.

    Lacks: `model.layers` has the outermost ones alone.
    """
    return list(model._flatten_layers())


def not_for_xla(model: keras.Model) -> list[str]:
    """Returns the names of a model's layers that XLA cannot compile on a replica.

    Those that sum over replicas (synchronized batch normalization), and max pooling where
    operations are deterministic. Lacks: that they are has no public name.
    """
    return [
        layer.name
        for layer in layers_of(model)
        if getattr(layer, "synchronized", False)
        or (is_op_determinism_enabled() and "MaxPooling" in type(layer).__name__)
    ]


def metric_direction(model: keras.Model, name: str) -> str | None:
    """Returns which way a compiled metric improves; None where Keras does not mark it.

    Lacks: the mark by which Keras's own `EarlyStopping` decides has no public name.
    """
    metrics = [m for group in model.metrics for m in getattr(group, "metrics", [group])]
    for metric in sorted(metrics, key=lambda metric: len(metric.name), reverse=True):
        if f"_{name}".endswith(f"_{metric.name}"):  # the name of an output may stand before it
            marks = {"up": "max", "down": "min"}
            return marks.get(getattr(metric, "_direction", ""))
    return None


def transform_of(head) -> list[keras.layers.Layer]:
    """Returns the layers of a `keras_nlp.layers.MaskedLMHead` before its logits.

    Lacks: the head has no public name for them.
    """
    return [head._intermediate_dense, head._intermediate_layer_norm]


def output_bias_of(head) -> keras.Variable:
    """Returns the bias of a `keras_nlp.layers.MaskedLMHead`, of shape (vocabulary size,).

    Lacks: the head has no public name for it.
    """
    return head._bias
