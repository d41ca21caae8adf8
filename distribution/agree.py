"""Agrees on small integers among workers: the chief's value, whether any worker wants to stop."""

from collections.abc import Callable

import tensorflow as tf


class Agreement:
    """Small integers agreed on by all workers; every worker must call at the same point.

    With one worker nothing is sent.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int, is_chief: bool):
        self.strategy = strategy
        self.alone = workers == 1 or not isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        )
        self.workers = 1 if self.alone else workers
        self.is_chief = is_chief
        self._add_up: Callable[[tf.Tensor], tf.Tensor] | None = None

    def total(self, value: int) -> int:
        """Sums a value over all workers."""
        if self.alone:
            return value
        if self._add_up is None:
            strategy = self.strategy

            @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
            def add_up(number):
                per_replica = strategy.run(lambda: tf.identity(number))
                return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

            self._add_up = add_up
        total = self._add_up(tf.constant(value, tf.int64)).numpy()
        return int(total) // len(self.strategy.extended.worker_devices)

    def any_worker(self, wish: bool) -> bool:
        """Tells whether at least one worker wishes it."""
        return self.total(int(wish)) > 0

    def broadcast_from_chief(self, value: int) -> int:
        """Returns the chief's value, on every worker."""
        return self.total(value if self.is_chief else 0)

    def everyone_has(self, value: int) -> bool:
        """Tells whether all workers hold the same non-negative value (below 2^40)."""
        mean, rest = divmod(self.total(value), self.workers)
        same = rest == 0 and mean == value
        return self.total(int(same)) == self.workers

    def barrier(self) -> None:
        """Waits until every worker is here."""
        self.total(0)
