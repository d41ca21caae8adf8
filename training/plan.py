"""Plans batches, learning rate and steps for a number of replicas, as plain numbers."""

import dataclasses
import math
from typing import Any

import numpy as np

from training.errors import OptionsError
from training.run_files import FIXED


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds the batches, learning rate and steps of a run.

    Attributes:
        replicas: replicas in all workers together.
        batch_size_per_replica: examples that one replica works on in one batch.
        global_batch_size: examples of one batch over all replicas.
        accumulate_steps: batches that one update of the weights (one step) accumulates.
        learning_rate: peak learning rate, scaled by the replicas. A float64: schedules round a
            plain float to float32, even in float64 runs.
        end_learning_rate: learning rate at the end of the run; `--min-lr-ratio` times the peak.
        steps_per_epoch: updates of the weights in one epoch; the incomplete last batch is dropped.
        total_steps: updates of the weights in the whole run, where the schedule ends.
        epochs: epochs that the run touches; the last one may be cut short by `--max-steps`.
        steps_done: updates of the weights that an earlier part of the run has done.
        warmup_steps: first updates, in which the learning rate rises to its peak.
        lr_decay_steps: last updates, in which `--lr-schedule wsd` lowers it.
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
    warmup_steps: int = 0
    lr_decay_steps: int = 0
    end_learning_rate: np.float64 = np.float64(0.0)

    @property
    def decay_steps(self) -> int:
        """Returns the updates after the warm-up, at least one: Keras has no schedule of none."""
        return max(self.total_steps - self.warmup_steps, 1)

    @property
    def batches(self) -> dict[str, Any]:
        """Returns batch size, batches per epoch, and the first batch, for a training pipeline.

        With accumulation a step takes several batches; a resumed run starts at its next batch.
        """
        return {
            "batch_size": self.global_batch_size,
            "batches_per_epoch": self.steps_per_epoch * self.accumulate_steps,
            "first_batch": self.steps_done * self.accumulate_steps,
        }

    def lines(self) -> dict[str, str]:
        """Returns the plan as lines, by title."""
        several = f" x {self.accumulate_steps} accumulated" if self.accumulate_steps > 1 else ""
        return {
            "global batch": f"{self.global_batch_size}{several} "
            f"({self.batch_size_per_replica} per replica)",
            "learning rate": f"{self.learning_rate:g} at the peak",
            "steps": f"{self.total_steps:,} in {self.epochs} epoch(s) of {self.steps_per_epoch:,}",
        }

    def fixed(self) -> dict:
        """Returns the values that a resumed run keeps, on any number of replicas."""
        return {name: getattr(self, name) for name in FIXED}


class RecipePlan(Plan):
    """Remembers whether the recipe has read the learning rate.

    Attributes:
        rate_was_read: whether it has.
    """

    rate_was_read = False

    def __getattribute__(self, name: str):
        if name == "learning_rate":
            object.__setattr__(self, "rate_was_read", True)
        return super().__getattribute__(name)


def require_shared_equally(global_batch_size: int, replicas: int) -> None:
    """Rejects a global batch that the replicas cannot share equally.

    Raises:
        OptionsError: names the nearest sizes that they can share.
    """
    rest = global_batch_size % replicas
    if rest:
        larger = global_batch_size - rest + replicas
        nearest = [size for size in (larger - replicas, larger) if size > 0]
        raise OptionsError(
            f"--global-batch-size {global_batch_size} cannot be shared by {replicas} replicas: it "
            f"must be a multiple of {replicas}, for instance {' or '.join(map(str, nearest))}"
        )


def make_plan(
    options,
    *,
    replicas: int,
    examples: int,
    batch_size_per_replica: int,
    base_learning_rate: float,
    warmup_steps: int | None = None,
    planned_replicas: int | None = None,
    steps_done: int = 0,
    resumed: dict | None = None,
) -> Plan:
    """Computes the plan from the replicas, the options and the number of examples.

    A run that resumes, perhaps on another number of replicas, keeps the global batch and the
    learning rate of its start: `resumed` then holds the `fixed()` of its first plan.

    Args:
        options: a `SharedOptions`.
        replicas: replicas in all workers together.
        examples: examples of the training split.
        batch_size_per_replica: examples per batch on one replica, unless the options set a batch.
        base_learning_rate: peak rate for one replica, unless the options set one.
        warmup_steps: steps of the warm-up, at most a tenth of the run, unless the options set a
            number; None for a recipe without warm-up.
        planned_replicas: number of replicas that determines batch and rate, where some may be
            missing; None for `replicas`.
        steps_done: updates of the weights that an earlier part of the run has done.
        resumed: values that must not change, or None.

    Raises:
        OptionsError: the batch cannot be shared, the training split holds fewer examples than one
            step takes, or the options' warm-up and decay do not fit into the run.
    """
    if resumed:
        batch = resumed["global_batch_size"]
        learning_rate = resumed["learning_rate"]
    else:
        planned = planned_replicas or replicas
        batch = options.global_batch_size
        if batch is None:
            batch = planned * (options.batch_size_per_replica or batch_size_per_replica)
        base = options.base_learning_rate
        if base is None:
            base = base_learning_rate
        # "linear" is the rule of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677);
        # "sqrt" is usual with Adam (Krizhevsky, arXiv 1404.5997, gives the argument).
        factors = {"linear": planned, "sqrt": math.sqrt(planned), "none": 1}
        learning_rate = base * factors[options.lr_scaling]
    require_shared_equally(batch, replicas)
    per_step = batch * options.accumulate_steps
    if examples < per_step:
        raise OptionsError(
            f"one step takes {per_step} examples and the training split has {examples}: use a "
            "smaller batch or more data"
        )
    steps_per_epoch = examples // per_step
    total_steps = steps_per_epoch * options.epochs
    if options.max_steps is not None:
        total_steps = min(total_steps, options.max_steps)
    warmup = _warmup_steps(options, warmup_steps, total_steps)
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
        warmup_steps=warmup,
        lr_decay_steps=_lr_decay_steps(options, warmup, total_steps),
        end_learning_rate=np.float64(learning_rate * getattr(options, "min_lr_ratio", 0.0)),
    )


def _warmup_steps(options, default: int | None, total_steps: int) -> int:
    """Returns the steps of the warm-up, see `make_plan`."""
    if default is None or total_steps == 0:
        return 0
    wanted = getattr(options, "warmup_steps", None)
    if wanted is None:
        return min(default, total_steps // 10)
    if wanted >= total_steps and options.evaluation is None:  # that trains nothing
        raise OptionsError(
            f"--warmup-steps {wanted}: must be less than the {total_steps} steps of the run"
        )
    return min(wanted, total_steps - 1)


def _lr_decay_steps(options, warmup_steps: int, total_steps: int) -> int:
    """Returns the last steps, in which `--lr-schedule wsd` lowers the rate.

    By default they are a fifth of the run (Hägele et al., arXiv 2405.18392).
    """
    longest = total_steps - warmup_steps
    wanted = getattr(options, "lr_decay_steps", None)
    if wanted is None or total_steps == 0:
        return max(min(math.ceil(total_steps / 5), longest), 1)
    if wanted > longest and options.evaluation is None:
        raise OptionsError(
            f"--lr-decay-steps {wanted}: must be at most the {longest} steps after the warm-up"
        )
    return min(wanted, longest)
