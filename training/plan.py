"""Plans batches, learning rate and steps for a number of replicas; plain numbers."""

import dataclasses
import math
from typing import TypedDict

import numpy as np

from training.errors import OptionsError

FEW_STEPS = 50


class Batches(TypedDict):
    """Tells a training pipeline its batches and where to begin."""

    batch_size: int
    batches_per_epoch: int
    first_batch: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds what a run of this many replicas does.

    Attributes:
        replicas: replicas in all workers together.
        batch_size_per_replica: examples that one replica works on in one batch.
        global_batch_size: examples of one batch over all replicas.
        accumulate_steps: batches that one update of the weights (one step) accumulates.
        learning_rate: peak learning rate, scaled by the replicas. It is a float64, which schedules
            keep: they would round a plain float to float32, also in float64 runs.
        steps_per_epoch: updates of the weights in one epoch; the incomplete last batch is dropped.
        total_steps: updates of the weights in the whole run, where the schedule ends.
        epochs: epochs that the run touches; the last one may be cut short by `--max-steps`.
        steps_done: updates of the weights that an earlier part of the run has done.
    """

    replicas: int
    batch_size_per_replica: int
    global_batch_size: int
    accumulate_steps: int
    learning_rate: np.float64
    steps_per_epoch: int
    total_steps: int
    epochs: int
    steps_done: int = 0

    @property
    def batches(self) -> Batches:
        """Returns batch size, batches of an epoch, and the first one, for a training pipeline.

        With accumulation a step takes several batches; a resumed run begins at its next one.
        """
        return {
            "batch_size": self.global_batch_size,
            "batches_per_epoch": self.steps_per_epoch * self.accumulate_steps,
            "first_batch": self.steps_done * self.accumulate_steps,
        }

    def warmup_steps(self, wanted: int) -> int:
        """Returns the steps of a warm-up: as many as wanted, at most a tenth of the run."""
        return min(wanted, self.total_steps // 10)

    def lines(self) -> dict[str, str]:
        """Returns the plan as lines, by title."""
        several = f" x {self.accumulate_steps} accumulated" if self.accumulate_steps > 1 else ""
        steps = f"{self.total_steps:,} in {self.epochs} epoch(s) of {self.steps_per_epoch:,}"
        if self.total_steps < FEW_STEPS:
            steps += ": so few teach a model little, take more --epochs or more data"
        return {
            "global batch": f"{self.global_batch_size}{several} "
            f"({self.batch_size_per_replica} per replica)",
            "learning rate": f"{self.learning_rate:g} at the peak",
            "steps": steps,
        }

    def fixed(self) -> dict:
        """Returns what must stay the same when a run resumes, on any number of replicas."""
        names = ("global_batch_size", "learning_rate", "steps_per_epoch", "total_steps", "epochs")
        return {name: getattr(self, name) for name in names}


def global_batch_size(
    replicas: int, batch_size_per_replica: int | None, global_batch: int | None
) -> int:
    """Computes the examples of one batch over all replicas.

    Args:
        replicas: replicas in all workers together.
        batch_size_per_replica: examples a replica, multiplied by the replicas; or None.
        global_batch: examples over all replicas, which must divide it; or None.

    Raises:
        OptionsError: both or none are given, or the replicas cannot share the global batch.
    """
    if global_batch is None and batch_size_per_replica is not None:
        return batch_size_per_replica * replicas
    if global_batch is None or batch_size_per_replica is not None:
        raise OptionsError("give one of --batch-size-per-replica and --global-batch-size, not both")
    if global_batch % replicas:
        lower = global_batch // replicas * replicas
        fits = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
        raise OptionsError(
            f"--global-batch-size {global_batch} cannot be shared by {replicas} replicas: "
            f"it must be a multiple of {replicas}, for instance {fits}"
        )
    return global_batch


def scaled_learning_rate(base_learning_rate: float, replicas: int, lr_scaling: str) -> float:
    """Scales the peak learning rate to this many replicas.

    `linear` is the rule of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677);
    `sqrt` the one that is usual with Adam (Krizhevsky, arXiv 1404.5997, gives the argument).
    """
    factor = {"linear": replicas, "sqrt": math.sqrt(replicas), "none": 1}[lr_scaling]
    return base_learning_rate * factor


def make_plan(
    options,
    *,
    replicas: int,
    examples: int,
    batch_size_per_replica: int,
    base_learning_rate: float,
    planned_replicas: int | None = None,
    steps_done: int = 0,
    resumed: dict | None = None,
) -> Plan:
    """Makes the plan that follows from the replicas, the options and the number of examples.

    A run that resumes, perhaps on another number of replicas, keeps the global batch and the
    learning rate that it began with: `resumed` then holds the `fixed()` of its first plan.

    Args:
        options: a `SharedOptions`.
        replicas: replicas in all workers together.
        examples: examples of the training split.
        batch_size_per_replica: examples a replica where the options name no batch.
        base_learning_rate: peak rate for one replica where the options name none.
        planned_replicas: replicas that batch and rate follow, where some of them may be away; or
            None: those that are there.
        steps_done: updates of the weights that an earlier part of the run has done.
        resumed: what must stay as it was, or None.

    Raises:
        OptionsError: the batch cannot be shared, or the training split holds fewer examples than
            one step takes.
    """
    if resumed:
        batch = global_batch_size(replicas, None, resumed["global_batch_size"])
        learning_rate = resumed["learning_rate"]
    else:
        per_replica = options.batch_size_per_replica
        if per_replica is None and options.global_batch_size is None:
            per_replica = batch_size_per_replica
        planned = planned_replicas or replicas
        batch = global_batch_size(planned, per_replica, options.global_batch_size)
        batch = global_batch_size(replicas, None, batch)
        base = options.base_learning_rate
        learning_rate = scaled_learning_rate(
            base if base is not None else base_learning_rate, planned, options.lr_scaling
        )
    per_step = batch * options.accumulate_steps
    if examples < per_step:
        batches = (
            f" x {options.accumulate_steps} accumulated batches"
            if options.accumulate_steps > 1
            else ""
        )
        raise OptionsError(
            f"one step takes {per_step} examples (global batch {batch}{batches}) and the training "
            f"split has {examples}: take a smaller batch or more data"
        )
    steps_per_epoch = examples // per_step
    total_steps = steps_per_epoch * options.epochs
    if options.max_steps is not None:
        total_steps = min(total_steps, options.max_steps)
    return Plan(
        replicas=replicas,
        batch_size_per_replica=batch // replicas,
        global_batch_size=batch,
        accumulate_steps=options.accumulate_steps,
        learning_rate=np.float64(learning_rate),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=math.ceil(total_steps / steps_per_epoch),
        steps_done=steps_done,
    )
