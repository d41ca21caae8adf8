"""What Keras lacks for tf.distribute: the only file that touches private names of Keras.

Each piece says what breaks, names the upstream thread where there is one, and what it does.
`make check-upstream` tells which pieces the installed Keras no longer needs. Tested with Keras
3.15.1 and TensorFlow 2.21.
"""

import functools
import threading

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.random import seed_generator
from keras.src.trainers import epoch_iterator


def fit_keras_to(strategy: tf.distribute.Strategy) -> None:
    """Installs what `fit()` and `evaluate()` need under this strategy, besides `build()`."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        average_logs()
    if isinstance(
        strategy,
        (
            tf.distribute.experimental.CentralStorageStrategy,
            tf.distribute.ParameterServerStrategy,
        ),
    ):
        share_dropout_seeds()
        add_in_place()


def average_logs() -> None:
    """Lets `fit()` return its logs under MultiWorkerMirroredStrategy.

    Breaks: `reduce_per_replica("auto")` takes the mean over axis 0 of scalars
    (keras-team/keras#20585, open). Does: takes the mean over all replicas, as Keras does under
    MirroredStrategy, in one all-reduce; so each worker logs the same numbers.
    """
    stock = tf_trainer.reduce_per_replica
    if getattr(stock, "is_ours", False):
        return

    @functools.wraps(stock)
    def reduce_per_replica(values, strategy, reduction):
        if reduction == "auto" and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return _mean_over_replicas(strategy, values)
        return stock(values, strategy, reduction)

    reduce_per_replica.is_ours = True
    tf_trainer.reduce_per_replica = reduce_per_replica


def _mean_over_replicas(strategy, values):
    stacked = strategy.run(
        lambda logs: tf.stack(
            [tf.cast(v, keras.config.floatx()) for v in keras.tree.flatten(logs)]
        ),
        args=(values,),
    )
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, stacked, axis=None)
    return keras.tree.pack_sequence_as(values, tf.unstack(mean))


def add_in_place() -> None:
    """Lets metrics and counters add up under CentralStorage- and ParameterServerStrategy.

    Breaks: Keras's `variable.assign_add(x)` assigns `variable + x`. Where all replicas share one
    copy, the sum over n replicas counts the old value n times, and workers that do not wait for
    each other lose updates. Does: adds in place.
    """
    variable_class = type_of_variables()
    if getattr(variable_class.assign_add, "is_ours", False):
        return
    stock = variable_class.assign_add

    @functools.wraps(stock)
    def assign_add(self, value):
        if self._value is None:
            return stock(self, value)
        self._value.assign_add(tf.cast(value, self._value.dtype))
        return None

    assign_add.is_ours = True
    variable_class.assign_add = assign_add


def type_of_variables() -> type:
    """Keras's class of variables on TensorFlow."""
    from keras.src.backend.tensorflow.core import Variable

    return Variable


def leave_data_on_coordinator() -> None:
    """Lets `fit()` iterate over a data set under ParameterServerStrategy.

    Breaks: `TFEpochIterator` hands the data set to `experimental_distribute_dataset`, which that
    strategy refuses (keras-team/keras#18624). Does: iterates on the coordinator.
    """
    stock = tf_trainer.TFEpochIterator.__init__
    if getattr(stock, "is_ours", False):
        return

    class Local:
        """Stands for the strategy while the iterator is made."""

        @staticmethod
        def experimental_distribute_dataset(dataset):
            return dataset

    @functools.wraps(stock)
    def init(self, distribute_strategy=None, *args, **kwargs):
        if isinstance(distribute_strategy, tf.distribute.ParameterServerStrategy):
            distribute_strategy = Local
        stock(self, distribute_strategy, *args, **kwargs)

    init.is_ours = True
    tf_trainer.TFEpochIterator.__init__ = init


def share_dropout_seeds() -> None:
    """Lets dropout run under CentralStorageStrategy and ParameterServerStrategy.

    Breaks: the seed variable has `aggregation="none"`, which these strategies refuse to assign
    in a replica. Does: creates it with `aggregation="only_first_replica"`.
    """
    stock = seed_generator.SeedGenerator.__init__
    if getattr(stock, "is_ours", False):
        return

    @functools.wraps(stock)
    def init(self, *args, **kwargs):
        backend = kwargs.pop("backend", None) or keras.src.backend
        shim = _Backend(backend)
        stock(self, *args, backend=shim, **kwargs)
        self.backend = backend

    init.is_ours = True
    seed_generator.SeedGenerator.__init__ = init


class _Backend:
    """Keras's backend module with variables that follow the first replica."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def Variable(self, *args, **kwargs):  # noqa: N802 (Keras's name)
        kwargs["aggregation"] = "only_first_replica"
        return self._backend.Variable(*args, **kwargs)


def reduce_before_all_else(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Orders a step as: reduce over replicas, finite?, unscale, clip, apply.

    Breaks: Keras reduces last. So `global_clipnorm` clips each replica's own gradient (step norm
    0.1 on one replica, 0.17 on two), and `LossScaleOptimizer` looks for an overflow on replica 0
    only: one on another replica goes into the weights. And it never adds up the gradients of a row
    that a batch looks up several times in an embedding (`tf.IndexedSlices`): Adam then adds up
    their squares, where it should square their sum, and a clipped norm is wrong in the same way.
    Does: sums all of that at the outermost `apply()`, and leaves out the sum at the innermost.

    Args:
        optimizer: an optimizer, or a `LossScaleOptimizer` around one; changed in place.

    Returns:
        The same optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reduce = inner._all_reduce_sum_gradients
    inner._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
    apply = optimizer.apply

    def reduced_apply(grads, trainable_variables=None):
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        places = (
            list(trainable_variables) if trainable_variables is not None else [None] * len(grads)
        )
        reduced = [gradient for gradient, _ in reduce(list(zip(dense, places, strict=True)))]
        return apply(reduced, trainable_variables)

    optimizer.apply = reduced_apply
    return optimizer


_first_epoch = threading.local()


def start_in_mid_epoch(batch: int) -> None:
    """Makes the next epoch of `fit()` count from a batch other than 0.

    Breaks: `fit(initial_epoch=...)` starts at an epoch's first batch only, and so
    `BackupAndRestore` repeats the epoch that it was killed in. Does: drops the first counts of the
    epoch; the data set must begin at that batch. Called in a callback's `on_epoch_begin`.

    Args:
        batch: how many batches of the epoch are done.
    """
    stock = epoch_iterator.EpochIterator._enumerate_iterator
    if not getattr(stock, "is_ours", False):

        @functools.wraps(stock)
        def enumerate_iterator(self):
            done = getattr(_first_epoch, "done", 0)
            _first_epoch.done = 0
            for begin, end, iterator in stock(self):
                if begin >= done:
                    yield begin, end, iterator

        enumerate_iterator.is_ours = True
        epoch_iterator.EpochIterator._enumerate_iterator = enumerate_iterator
    _first_epoch.done = batch


def build(model: keras.Model, data: tf.data.Dataset) -> None:
    """Builds the optimizer and the metrics of a compiled model before `fit()`.

    Breaks: without a strategy Keras builds them while it traces the first step, which is too late
    to put a checkpoint's numbers into them, and the step is then traced twice. Under a strategy
    each `fit()` and `evaluate()` sets its data up on all replicas once more, only to read a batch's
    shapes; with several workers it cannot use that batch (keras-team/keras#20585, open). Does:
    builds them from the data set's specification, once.

    Args:
        model: a compiled model. Compiled anew, it is to be built anew.
        data: what `fit()` will get.
    """
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=data.element_spec)
    model._maybe_symbolic_build = lambda iterator=None, data_batch=None: None


def logs_of_replicas(strategy: tf.distribute.Strategy, values):
    """What `strategy.run` returned, as one value a name, as `fit()` does it."""
    return tf_trainer.reduce_per_replica(values, strategy, "auto")


def learning_rate_of(optimizer: keras.optimizers.Optimizer):
    """The optimizer's schedule, or its rate where it has none.

    Lacks: `optimizer.learning_rate` answers with the rate of the next step; there is no public name
    for the schedule itself.
    """
    return optimizer._learning_rate
