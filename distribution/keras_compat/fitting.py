"""Builds and calls models as `fit()` does, and repairs how it gets batches and counts them."""

import contextlib
import inspect
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.trainers import data_adapters, epoch_iterator, trainer

from distribution import kinds
from distribution.keras_compat.replacing import replaced

# Batches on a GPU before their steps begin: that of the next step, and one that is being copied.
BATCHES_AHEAD = 2


def distribute_data() -> contextlib.AbstractContextManager:
    """Makes each of several workers compute only its part of a global batch.

    Breaks: `TFEpochIterator` hands the dataset to `experimental_distribute_dataset`, which computes
    each global batch on every worker, copies the arrays and the mapped files that the pipeline
    reads into memory, on one worker too, and which ParameterServerStrategy refuses
    (keras-team/keras#18624). Does: where a dataset has `part_of_worker(index, workers, replicas)`,
    which returns the part of one worker, this worker uses it (and its attribute `batch_size` where
    TensorFlow does not know the size); beside parameter servers the coordinator iterates over the
    dataset itself.
    """

    def make(stock):
        def init(self, distribute_strategy=None, *args, **kwargs):
            stock(self, _OwnPart(distribute_strategy), *args, **kwargs)

        return init

    return replaced(tf_trainer.TFEpochIterator, "__init__", make)


class _OwnPart:
    """Stands for the strategy while the iterator is made."""

    def __init__(self, strategy):
        self.strategy = strategy

    def experimental_distribute_dataset(self, dataset):
        if kinds.name_of(self.strategy) == "parameter_server":
            return dataset
        if not hasattr(dataset, "part_of_worker"):
            policies = tf.data.experimental.AutoShardPolicy
            if dataset.options().experimental_distribute.auto_shard_policy == policies.AUTO:
                # Each worker would read other files, and so other batches than one device.
                options = tf.data.Options()
                options.experimental_distribute.auto_shard_policy = policies.DATA
                dataset = dataset.with_options(options)
            return self.strategy.experimental_distribute_dataset(dataset)

        def make(context):
            workers = context.num_input_pipelines
            replicas = context.num_replicas_in_sync // workers
            part = dataset.part_of_worker(context.input_pipeline_id, workers, replicas)
            batch_size = keras.tree.flatten(part.element_spec)[0].shape[0] or part.batch_size
            return part.rebatch(batch_size // replicas) if replicas > 1 else part

        return self.strategy.distribute_datasets_from_function(make)


def copy_batches_ahead() -> contextlib.AbstractContextManager:
    """Makes a run on one GPU copy its batches there while the steps before them are computed.

    Breaks: without a strategy a step begins by copying its batch. TensorFlow starts a copy to a GPU
    when all computing that it was given before has ended, and the step when the copy has: between
    two steps the GPU waits for the process. (Under a strategy, TensorFlow copies ahead.) Does:
    where a dataset has `copied_ahead`, the name of a device, prefetches it to that device.
    """

    def make(stock):
        def init(self, *args, **kwargs):
            stock(self, *args, **kwargs)
            device = getattr(kwargs.get("x"), "copied_ahead", None)
            if device and not hasattr(self, "copied_to"):  # by this patch, applied twice
                self.copied_to = device
                self._distributed_dataset = self._distributed_dataset.apply(
                    tf.data.experimental.prefetch_to_device(device, BATCHES_AHEAD)
                )

        return init

    return replaced(tf_trainer.TFEpochIterator, "__init__", make)


_batches_done = 0  # of the next epoch


@contextlib.contextmanager
def count_from_mid_epoch() -> Iterator[None]:
    """Makes `start_in_mid_epoch` set the first batch of an epoch of `fit()`.

    Breaks: `fit(initial_epoch=...)` starts at an epoch's first batch only, and so
    `BackupAndRestore` repeats the interrupted epoch. Does: drops the first counts of the
    epoch, and shortens an execution of several steps that are partly done; the dataset must begin
    at that batch.
    """

    def make_init(stock):
        def init(self, *args, **kwargs):
            stock(self, *args, **kwargs)
            # `fit()` makes its iterator before the epoch begins; one that is made while the first
            # batch is waiting belongs to an evaluation in a callback.
            self.counts_from_zero = _batches_done > 0

        return init

    def make(stock):
        def enumerate_iterator(self):
            global _batches_done
            done = 0
            if not self.counts_from_zero:
                done, _batches_done = _batches_done, 0
            for begin, end, iterator in stock(self):
                # The last execution of an epoch may be shorter than its count.
                last = min(end, self.steps_per_epoch - 1) if self.steps_per_epoch else end
                if last >= done:
                    yield max(begin, done), end, iterator
                else:  # Keras ends data of a known length by the batches that it has counted
                    self._steps_seen -= self.steps_per_execution

        return enumerate_iterator

    iterators = epoch_iterator.EpochIterator
    start_in_mid_epoch(0)
    try:
        with (
            replaced(iterators, "__init__", make_init),
            replaced(iterators, "_enumerate_iterator", make),
        ):
            yield
    finally:
        start_in_mid_epoch(0)


def start_in_mid_epoch(batch: int) -> None:
    """Makes the next epoch of `fit()` count from a batch other than 0.

    Call it within `patches.patch_keras_for`, in a callback's `on_epoch_begin`.

    Args:
        batch: number of finished batches of the epoch. The dataset must begin at the next one.
    """
    global _batches_done
    _batches_done = batch


def batches_of(split) -> tf.data.Dataset:
    """Returns the batches that `evaluate()` makes of a split; arrays become one example each.

    Lacks: no public name makes batches of arrays or of a `PyDataset`.

    Args:
        split: what `evaluate()` takes; a dataset is returned as it is.
    """
    if isinstance(split, tf.data.Dataset):
        return split
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(split)
    return data_adapters.get_data_adapter(x, y, sample_weight, batch_size=1).get_tf_dataset()


# The optimizer and metrics that `build` has built, by model.
_built: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def build(model: keras.Model, data: tf.data.Dataset) -> None:
    """Builds the optimizer and the metrics of a compiled model before `fit()`.

    Breaks: without a strategy Keras builds them while it traces the first step, which is too late
    to restore a checkpoint, and traces the step twice. Does: builds them
    from the dataset's specification.

    Args:
        model: a compiled model. Compiled again, it needs this again.
        data: the dataset for `fit()`.
    """
    spec = tf.nest.map_structure(
        lambda part: None if isinstance(part, tf.NoneTensorSpec) else part, data.element_spec
    )
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=spec)
    _built[model] = (model.optimizer, model._compile_metrics)


def use_what_is_built() -> contextlib.AbstractContextManager:
    """Makes `fit()` and `evaluate()` use the optimizer and the metrics that `build` has built.

    Breaks: under a strategy each `fit()` and `evaluate()` sets its data up on all replicas once
    more, only to read a batch's shapes; with several workers it cannot use that batch
    (keras-team/keras#20585, open). Does: leaves that out for a model that is built.
    """

    def make(stock):
        def maybe_symbolic_build(self, iterator=None, data_batch=None):
            if _built.get(self) != (self.optimizer, self._compile_metrics):
                stock(self, iterator, data_batch)

        return maybe_symbolic_build

    return replaced(tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build", make)


# What `compile(jit_compile=...)` got, by model, where it got something.
_jit_compile: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def remember_jit_compile() -> contextlib.AbstractContextManager:
    """Makes `compiled_jit` return what `compile(jit_compile=...)` got.

    Lacks: Keras keeps True or False for "auto" too, so nothing tells what a program has chosen.
    Does: remembers the argument.
    """

    def make(stock):
        signature = inspect.signature(stock)

        def compile_model(self, *args, **kwargs):
            stock(self, *args, **kwargs)
            _jit_compile[self] = signature.bind(self, *args, **kwargs).arguments.get("jit_compile")

        return compile_model

    return replaced(trainer.Trainer, "compile", make)


def compiled_jit(model: keras.Model) -> bool | None:
    """Returns whether `compile(jit_compile=...)` got True or False; None if it got neither."""
    chosen = _jit_compile.get(model)
    return chosen if isinstance(chosen, bool) else None


def call(model: keras.Model, x, training: bool):
    """Calls a model like `train_step`: passes `training` if it is an argument.

    Lacks: no public name tells whether it is.
    """
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(model: keras.Model, x, y, y_pred, sample_weight, training: bool):
    """Calls `compute_loss()`, also an older one without `training`.

    Lacks: no public name tells whether it has.
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )
