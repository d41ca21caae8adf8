"""Reads and writes the states of metrics, replica by replica."""

import weakref

import keras
import numpy as np
import tensorflow as tf

from distribution import kinds


class MetricStates:
    """Reads and writes the variables of a model's metrics.

    Each replica adds up its own numbers, which are summed when a metric is read. To resume bit for
    bit, each replica must get its own numbers back. All workers call together.

    Args:
        model: a built and compiled model.
    """

    _known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: keras.Model) -> "MetricStates":
        """Returns the instance of this model: its functions are traced once for its metrics."""
        known = cls._known.get(model)
        if known is None or list(map(id, known.variables)) != list(
            map(id, model.metrics_variables)
        ):
            known = cls._known[model] = cls(model)
        return known

    def __init__(self, model: keras.Model):
        self.strategy = model.distribute_strategy
        self.variables = list(model.metrics_variables)
        self.replicas = self.strategy.num_replicas_in_sync
        shares_weights = kinds.name_of(self.strategy) in kinds.SHARED_WEIGHTS
        self.one_copy = self.replicas == 1 or shares_weights
        self.sizes = [int(np.prod(v.shape, dtype=int)) for v in self.variables]
        self._read = tf.function(self._read_all)
        self._write = tf.function(self._write_all)

    def read(self) -> list[list[float]]:
        """Returns one row per replica, or a single row if all share one copy."""
        if self.one_copy:
            parts = [keras.ops.convert_to_numpy(v).reshape(-1) for v in self.variables]
            return [np.concatenate(parts).astype(np.float64).tolist() if parts else []]
        return self._read().numpy().tolist()

    def fit(self, rows: list[list[float]]) -> bool:
        """Returns whether rows have a number for each value of these metrics."""
        return all(len(row) == sum(self.sizes) for row in rows)

    def write(self, rows: list[list[float]]) -> None:
        """Restores rows; those of another number of replicas as equal parts of their sum."""
        values = np.asarray(rows, np.float64)
        if not self.variables:  # a model may list no metrics
            return
        if self.one_copy:
            total = np.split(values.sum(0), np.cumsum(self.sizes)[:-1])
            for variable, value in zip(self.variables, total, strict=True):
                variable.assign(value.reshape(variable.shape).astype(variable.dtype))
            return
        if len(values) != self.replicas:
            values = self._equal_parts(values.sum(0))
        self._write(tf.constant(values))

    def _equal_parts(self, sums: np.ndarray) -> np.ndarray:
        """Divides sums among the replicas, the mean of whose results is shown after a step.

        Args:
            sums: float64 of shape (values,).

        Returns:
            float64 of shape (replicas, values); of a variable of integers whole numbers, which
            differ by one at most and add up to the sum (Hermite's identity).
        """
        parts = np.split(sums, np.cumsum(self.sizes)[:-1])
        numbers = np.arange(self.replicas)[:, None]
        for place, variable in enumerate(self.variables):
            if np.issubdtype(variable.dtype, np.integer):
                parts[place] = (parts[place] + numbers) // self.replicas
            else:
                parts[place] = np.repeat(parts[place][None] / self.replicas, self.replicas, 0)
        return np.concatenate(parts, axis=1)

    def _read_all(self):
        def read():
            parts = [
                tf.cast(tf.reshape(tf.convert_to_tensor(v.value), [-1]), tf.float64)
                for v in self.variables
            ]
            return tf.concat(parts, 0)[None]

        return self.strategy.gather(self.strategy.run(read), axis=0)

    def _write_all(self, values):
        def write():
            row = values[tf.distribute.get_replica_context().replica_id_in_sync_group]
            for variable, value in zip(self.variables, tf.split(row, self.sizes), strict=True):
                local = tf.cast(tf.reshape(value, variable.shape), variable.dtype)
                variable.value.assign(local)

        self.strategy.run(write)
