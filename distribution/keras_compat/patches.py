"""Patches the whole process while a run is open: `patch_keras_for` enters what a strategy needs.

Patches of one theme are in its module; here are those of names, files and devices.
"""

import collections
import contextlib
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.saving import saving_lib
from keras.src.utils import naming
from tensorflow.python.distribute import collective_all_reduce_strategy

from distribution import kinds
from distribution.keras_compat import (
    compiled_losses,
    custom_gradients,
    fitting,
    optimizers,
    randomness,
    replica_states,
)
from distribution.keras_compat.replacing import replaced


@contextlib.contextmanager
def patch_keras_for(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes `fit()` and `evaluate()` work under this strategy within it; restores Keras afterwards.

    Create the model within it too. It may be entered again, also for another strategy.
    """
    name = kinds.name_of(strategy)
    shares_weights = name in kinds.SHARED_WEIGHTS
    patches = [
        fitting.use_what_is_built,
        fitting.remember_jit_compile,
        fitting.count_from_mid_epoch,
        write_weights_at_once,
        custom_gradients.free_custom_gradients,
        compiled_losses.leave_losses_unscaled,
        compiled_losses.weigh_each_value,
        optimizers.leave_gradients_reduced,
        randomness.drop_out_by_place,
        randomness.draw_by_place,
        replica_states.normalise_unmasked_together,
        compiled_losses.keep_penalties_apart,
    ]
    if name in ("mirrored", "multi_worker", "parameter_server"):
        patches += [fitting.distribute_data]
    elif not shares_weights:
        patches += [fitting.copy_batches_ahead]
    if shares_weights:
        patches += [replica_states.share_states, replica_states.add_in_place]
    else:
        patches += [optimizers.update_together]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


# The counters of automatic names when `name_metrics_as_in_first_run` was first entered.
_first_counts: dict[str, int] | None = None


@contextlib.contextmanager
def name_metrics_as_in_first_run() -> Iterator[None]:
    """Gives the metrics that are created within it the names that they have in a first run.

    Breaks: Keras counts its automatic names in the whole process (`auc`, then `auc_1`), so in a
    notebook a resumed run has other metrics than its history, and `--keep-best val_auc` fails.
    Does: starts from the counts of the first time. Those of layers go on: a model may have layers
    of an earlier run, and cannot have two of one name.
    """
    global _first_counts
    before = _name_counts()
    if _first_counts is None:
        _first_counts = before
    names = set(map(naming.to_snake_case, _names_of_subclasses(keras.metrics.Metric)))
    kept = {name: count for name, count in before.items() if name not in names}
    first = {name: count for name, count in _first_counts.items() if name in names}
    _set_name_counts(kept | first)
    try:
        yield
    finally:
        within = _name_counts()
        _set_name_counts(
            {name: max(before.get(name, 0), within.get(name, 0)) for name in before | within}
        )


def _names_of_subclasses(kind: type) -> Iterator[str]:
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield each.__name__
        yield from _names_of_subclasses(each)


def _name_counts() -> dict[str, int]:
    return dict(global_state.get_global_attribute("object_name_uids") or {})


def _set_name_counts(counts: dict[str, int]) -> None:
    made = collections.defaultdict(int, counts)
    global_state.set_global_attribute("object_name_uids", made)


def write_weights_at_once() -> contextlib.AbstractContextManager:
    """Makes writing a weights file to a full disk fail like other files.

    Breaks: HDF5 keeps unwritten data and tries again whenever an object of the file is deleted: a
    hundred lines of "Exception ignored", and at the end of the process a segmentation fault.
    Does: makes Keras build the file in memory, as for an archive, and write it at once.
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

    return replaced(saving_lib.H5IOStore, "__init__", make)


def several_cpus_per_worker(count: int) -> contextlib.AbstractContextManager:
    """Makes MultiWorkerMirroredStrategy train on several logical CPUs in each worker.

    Breaks: TensorFlow uses all logical GPUs of a worker, but only one CPU, even if there are more.
    Does: names them all. It is needed while the strategy is constructed, not later.

    Args:
        count: number of logical CPUs of this process; ignored with GPUs.
    """

    def make(stock):
        def initialize_local_devices(self, cluster_resolver, worker_device):
            devices, kind = stock(self, cluster_resolver, worker_device)
            if kind == "CPU":
                devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(count))
            return devices, kind

        return initialize_local_devices

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    return replaced(extended, "_initialize_local_devices", make)
