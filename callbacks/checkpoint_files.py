"""Checkpoints on disk: written whole or not at all, checked against their sums, set aside if bad.

A checkpoint is a folder `step-00000500` with `model.weights.h5` (weights and optimizer, as Keras
writes them), `state.json` (step, dropout seeds, running metrics, history) and `SHA256SUMS`. It is
written under another name, synced, and renamed.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from callbacks.errors import CannotSave
from data import files

log = logging.getLogger("recipes")

WEIGHTS, STATE = "model.weights.h5", "state.json"


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk whose checksums were right.

    Attributes:
        folder: where it lies.
        step: updates of the weights that are done.
        epochs_done: epochs that are done, validation included.
        steps_into_epoch: updates of the weights of the epoch that is not done.
        state: everything of `state.json`.
    """

    folder: Path
    step: int
    epochs_done: int
    steps_into_epoch: int
    state: dict


def newest(folder: str | Path, set_aside: bool = True) -> CheckpointInfo | None:
    """The newest checkpoint that is whole; damaged ones are named and set aside.

    Args:
        folder: a run's `checkpoints` folder, which need not exist.
        set_aside: renames the damaged ones to `damaged-...`, so that they never count again. Only
            one process of a run may.
    """
    if set_aside:
        _put_back(Path(folder))
    for candidate in sorted(all_checkpoints(folder), reverse=True):
        try:
            error = damage(candidate)
            if error is None:
                return read(candidate)
        except (ValueError, KeyError, TypeError, OSError) as unreadable:
            error = repr(unreadable)
        where = _set_aside(candidate) if set_aside else None
        log.warning(
            "checkpoint %s is damaged (%s): %sthe one before it is used",
            *(candidate, error, f"it is now {where.name}, and " if where else ""),
        )
    return None


def _put_back(folder: Path) -> None:
    # A kill between the two renames that replace a checkpoint leaves the old one under its own
    # name; with `keep=1` it is the only one.
    for old in folder.glob(".step-*.old"):
        target = folder / old.name[1:].split(".")[0]
        if not target.exists():
            with contextlib.suppress(OSError):
                old.rename(target)


def _set_aside(folder: Path) -> Path | None:
    for number in range(1, 1000):
        target = folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number > 1 else ""))
        if not target.exists():
            with contextlib.suppress(OSError):
                return folder.rename(target)
            return None
    return None


def read(folder: Path) -> CheckpointInfo:
    """What a checkpoint says of itself, without its weights."""
    state = json.loads((folder / STATE).read_text())
    step, epochs_done, into = (state[n] for n in ("step", "epochs_done", "steps_into_epoch"))
    return CheckpointInfo(folder, step, epochs_done, into, state)


def reopened(info: CheckpointInfo, steps_per_epoch: int) -> CheckpointInfo:
    """The last checkpoint of a finished run, for one that trains on to more steps.

    The run may have ended within an epoch, which then continues, and is logged when it is whole.
    """
    epochs_done, into = divmod(info.step, steps_per_epoch)
    if into:
        records = info.state["callbacks"]["records"]
        records["history"] = {name: v[:epochs_done] for name, v in records["history"].items()}
    return dataclasses.replace(info, epochs_done=epochs_done, steps_into_epoch=into)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    return files.damage(folder, (WEIGHTS, STATE))


def write(folder: Path, state: dict, save_weights: Callable[[Path], None]) -> Path:
    """Writes a checkpoint, which is then whole on the disk.

    Args:
        folder: the run's `checkpoints` folder; the run's own folder must exist.
        state: JSON values, `step` among them.
        save_weights: writes the weights to a path.

    Raises:
        CannotSave: the disk is full, or the folder is gone or not writable. The checkpoints before
            it are as they were.
    """
    target = folder / name_of(state["step"])
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a run's folder that is gone stays gone
        for left in folder.glob(".step-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with files.atomic(target) as temporary:
            temporary.mkdir()
            save_weights(temporary / WEIGHTS)
            (temporary / STATE).write_text(json.dumps(state))
            files.write_checksums(temporary)
    except OSError as error:
        raise CannotSave(
            f"the checkpoint of step {state['step']} cannot be written to {folder}: "
            f"{_reason(error)}; "
            f"the last good one is {newest_name(folder) or 'not there'}"
        ) from error
    return target


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for old in sorted(all_checkpoints(folder))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def copy_as(source: Path, target: Path) -> None:
    """Copies a checkpoint to a name of its own, for instance `best`; whole or not at all.

    Raises:
        CannotSave: it cannot be written; the source is as it was.
    """
    try:
        with files.atomic(target) as temporary:
            shutil.copytree(source, temporary)
    except OSError as error:
        raise CannotSave(
            f"the best checkpoint cannot be copied to {target}: {_reason(error)}; it is still "
            f"{source}"
        ) from error


def is_copy_of(folder: Path, step: int) -> bool:
    """Whether a whole checkpoint of this step lies there."""
    try:
        return damage(folder) is None and read(folder).step == step
    except (OSError, ValueError, KeyError, TypeError):
        return False


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def newest_name(folder: Path) -> str | None:
    """The path of the newest checkpoint, or None."""
    found = sorted(all_checkpoints(folder))
    return str(found[-1]) if found else None


def all_checkpoints(folder: str | Path) -> list[Path]:
    """The folders of the checkpoints that count, in no order."""
    return [path for path in Path(folder).glob("step-*") if path.is_dir()]


def _reason(error: OSError) -> str:
    # HDF5 and shutil tell several lines.
    return os.strerror(error.errno) if error.errno else str(error).splitlines()[0][:200]
