"""Batch size and learning rate for a number of replicas: plain numbers, no TensorFlow."""

import dataclasses
import math

from distribution.errors import DistributionError

LR_SCALING = ("linear", "sqrt", "none")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run of this many replicas does.

    Attributes:
        replicas: replicas in all workers together.
        batch_size_per_replica: examples that one replica works on in one batch.
        global_batch_size: examples of one batch over all replicas.
        accumulate_steps: batches that one update of the weights (one step) takes in.
        learning_rate: peak learning rate, scaled by the replicas.
        steps_per_epoch: updates of the weights in one epoch; the incomplete last batch is dropped.
        total_steps: updates of the weights in the whole run, where the schedule ends.
        epochs: epochs that the run touches; the last one may be cut short by `--max-steps`.
    """

    replicas: int
    batch_size_per_replica: int
    global_batch_size: int
    accumulate_steps: int
    learning_rate: float
    steps_per_epoch: int
    total_steps: int
    epochs: int

    def trajectory(self) -> dict:
        """What must stay the same when a run goes on, on however many replicas."""
        names = ("global_batch_size", "learning_rate", "steps_per_epoch", "total_steps", "epochs")
        return {"replicas": self.replicas} | {name: getattr(self, name) for name in names}

    def summary(self) -> dict:
        """What `results.json` holds of the plan."""
        return {
            "global_batch_size": self.global_batch_size,
            "learning_rate": self.learning_rate,
            "steps": self.total_steps,
            "epochs": self.epochs,
        }


def global_batch_size(
    replicas: int, batch_size_per_replica: int | None, global_batch: int | None
) -> int:
    """The examples of one batch over all replicas.

    Args:
        replicas: replicas in all workers together.
        batch_size_per_replica: examples a replica, multiplied by the replicas; or None.
        global_batch: examples over all replicas, which must divide it; or None.

    Raises:
        DistributionError: both or none are given, or the replicas cannot share the global batch.
    """
    if (batch_size_per_replica is None) == (global_batch is None):
        raise DistributionError(
            "give one of --batch-size-per-replica and --global-batch-size, not both"
        )
    if global_batch is None:
        return batch_size_per_replica * replicas
    if global_batch % replicas:
        lower = global_batch // replicas * replicas
        fits = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
        raise DistributionError(
            f"--global-batch-size {global_batch} cannot be shared by {replicas} replicas: "
            f"it must be a multiple of {replicas}, for instance {fits}"
        )
    return global_batch


def scaled_learning_rate(base_learning_rate: float, replicas: int, lr_scaling: str) -> float:
    """The peak learning rate for this many replicas.

    `linear` is the rule of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677);
    `sqrt` the one that is usual with Adam (Krizhevsky, arXiv 1404.5997, gives the argument).
    """
    factor = {"linear": replicas, "sqrt": math.sqrt(replicas), "none": 1}[lr_scaling]
    return base_learning_rate * factor


def make_plan(
    *,
    replicas: int,
    examples: int,
    batch_size_per_replica: int | None,
    global_batch: int | None,
    accumulate_steps: int,
    base_learning_rate: float,
    lr_scaling: str,
    epochs: int,
    max_steps: int | None,
    resumed: dict | None = None,
) -> Plan:
    """Everything that follows from the replicas, the options and the number of examples.

    A run that goes on, perhaps on another number of replicas, keeps the global batch and the
    learning rate that it began with: `resumed` is then the `trajectory()` of its first plan.

    Raises:
        DistributionError: the batch cannot be shared, or the training split holds fewer examples
            than one step takes.
    """
    if resumed:
        batch = global_batch_size(replicas, None, resumed["global_batch_size"])
        learning_rate = resumed["learning_rate"]
    else:
        batch = global_batch_size(replicas, batch_size_per_replica, global_batch)
        learning_rate = scaled_learning_rate(base_learning_rate, replicas, lr_scaling)
    per_step = batch * accumulate_steps
    if examples < per_step:
        batches = f" x {accumulate_steps} accumulated batches" if accumulate_steps > 1 else ""
        raise DistributionError(
            f"one step takes {per_step} examples (global batch {batch}{batches}) and the training "
            f"split has {examples}: take a smaller batch or more data"
        )
    steps_per_epoch = examples // per_step
    total_steps = steps_per_epoch * epochs
    if max_steps is not None:
        total_steps = min(total_steps, max_steps)
    return Plan(
        replicas=replicas,
        batch_size_per_replica=batch // replicas,
        global_batch_size=batch,
        accumulate_steps=accumulate_steps,
        learning_rate=learning_rate,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=math.ceil(total_steps / steps_per_epoch),
    )
