"""Locks a run's folder, compares it with the options, and writes it atomically."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from callbacks import checkpoint as checkpoints
from callbacks import tensorboard
from callbacks.errors import CannotSave, saving
from data import files
from distribution.cluster import RESTARTED
from training.errors import RunError
from training.folder_check import TOKEN, missing_folders, not_a_run, remove_empty
from training.options import SharedOptions, common, flag, metadata, shown, to_json
from training.run_files import FIXED, read_options, read_results

log = logging.getLogger("recipes")

TOKEN_BITS = 31
TOKEN_SECONDS = 30  # NFS may show other hosts an old state of a folder for that long


class RunFolder:
    """Represents the folder of one run, with the results of an earlier part of it.

    Args:
        path: the folder, which need not exist.
        recipe: the recipe's name.
        options: the options of this start.
        is_chief: whether this process locks the folder and writes the shared files.
        made: folders that were just made for this run, innermost first.

    Attributes:
        checkpoint: the checkpoint that this run resumes from, or None.
        results: the results of a finished run, or None.
        facts: resolved values of the earlier part (dataset, global batch ...), or empty.
        ignored: a line for each changed option of a finished run, in which it has no effect.
    """

    def __init__(
        self,
        path: Path,
        recipe: str,
        options: SharedOptions,
        is_chief: bool,
        made: Sequence[Path] = (),
    ):
        self.path = path
        self.recipe = recipe
        self.options = options
        self.is_chief = is_chief
        self.checkpoint: checkpoints.CheckpointInfo | None = None
        self.results: dict | None = None
        self.facts: dict = {}
        self.notes: list[str] = []
        self.ignored: list[str] = []
        self._finished_at: int | None = None  # steps of the results that are there
        self._extends = options.resume == "extend"
        self._lock: TextIO | None = None
        self._made = made
        self._options_before: str | None = None  # the options.json that keep_facts() replaced

    def open(self) -> None:
        """Creates the folder, locks it, and finds an earlier part of the run.

        Raises:
            RunError: the folder is not writable, is used by another process, contains a run of
                other options or other files, no run to extend, or a finished one without the
                checkpoint that is needed to extend it or to write its model again.
        """
        try:
            self._require_run_to_extend()
            self._made = self._made or missing_folders(self.path)
            for problem in not_a_run(self.path):
                raise RunError(problem)
            self.path.mkdir(parents=True, exist_ok=True)
            if self.is_chief:
                self._lock = open(self.path / ".lock", "a")  # noqa: SIM115 (held until close())
        except OSError as error:
            raise RunError(f"--run-dir {self.path}: {error.strerror or error}") from error
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._made = ()  # the other run made it
                raise RunError(
                    f"--run-dir {self.path}: another run is using this folder"
                ) from error
            except OSError as error:
                raise RunError(
                    f"--run-dir {self.path}: cannot be locked ({error.strerror}); pass a folder on "
                    "a file system with locks (flock)"
                ) from error
        self._find_run()

    def write_token(self) -> int:
        """Writes a random number, by which the other workers know the folder; returns it.

        Raises:
            CannotSave: it cannot be written.
        """
        number = secrets.randbits(TOKEN_BITS)
        with saving(self.path / TOKEN):
            (self.path / TOKEN).write_text(str(number))
        return number

    def has_token(self, number: int) -> bool:
        """Waits some seconds for the number of `write_token()`; returns whether it is there."""
        end = time.monotonic() + TOKEN_SECONDS
        while True:
            with contextlib.suppress(OSError, ValueError):
                if int((self.path / TOKEN).read_text()) == number:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(TOKEN_SECONDS / 100)

    def remove_token(self) -> None:
        """Removes the number, on the chief."""
        if self.is_chief:
            with contextlib.suppress(OSError):  # the next start replaces it
                (self.path / TOKEN).unlink()

    def _require_run_to_extend(self) -> None:
        """Refuses `--resume extend` before anything is created where nothing was trained."""
        is_run = (self.path / "options.json").exists() and self._was_trained()
        if self._extends and not is_run:
            raise RunError(
                f"--resume extend: no run to extend in {self.path}; pass its folder as --run-dir, "
                "or leave out --resume to train a new run"
            )

    def _find_run(self) -> None:
        path = self.path / "options.json"
        if not path.exists():
            return
        if self.options.resume == "never" and not os.environ.get(RESTARTED):
            raise RunError(
                f"--run-dir {self.path}: already contains a run; --resume never requires an empty "
                "folder"
            )
        if not self._was_trained():  # failed or stopped before training: starts again
            self._remove_logs()
            return
        saved = read_options(self.path, "recipe", "options", "resolved", resolved=FIXED)
        if saved["recipe"] != self.recipe:
            raise RunError(
                f"--run-dir {self.path}: contains a run of {saved['recipe']}, not {self.recipe}"
            )
        is_same = not self._refuse_differences(saved["options"])
        self.checkpoint = checkpoints.newest(self.path / "checkpoints", set_aside=self.is_chief)
        if self.checkpoint is not None:
            self.facts = saved["resolved"]
            self.notes = list(saved.get("notes", []))
        path = self.path / "results.json"
        if path.exists():
            results = read_results(self.path, "recipe", "test", "weights_sha256", "steps")
            self._finished_at = results["steps"]
            # The results of a run that was stopped while it was extended are those from before.
            self._extends = self._extends or saved.get("extends") == self._finished_at
            # The same command again finds a finished extension, also one that ended early.
            if is_same and self._finished_at > saved.get("extends", self._finished_at):
                self._extends = False
            problem = files.damage(self.path / "model", ())
            if self._extends:
                if self.checkpoint is None:
                    reason = "no undamaged checkpoint is left"
                    if self._finished_at == 0:
                        reason = "it trained nothing (--epochs 0); train in another folder"
                    raise RunError(
                        f"--run-dir {self.path}: cannot extend the run: {reason}; its model/ and "
                        "results.json are unchanged"
                    )
            elif problem is None:
                self.results = results
                self.ignored = self._changes(saved["options"])
            elif self.checkpoint is None:
                raise RunError(
                    f"--run-dir {self.path}: the run is finished, but its model/ is damaged "
                    f"({problem}), and no undamaged checkpoint is left to write it from; pass "
                    "another folder to train again"
                )
            else:
                log.warning(
                    "%s: the run is finished but its model/ is damaged (%s); rewriting it",
                    self.path,
                    problem,
                )
        if self.checkpoint is None and self.results is None:
            self._begin_again()

    def _was_trained(self) -> bool:
        """Returns whether the folder holds a checkpoint or results."""
        if (self.path / "results.json").exists():
            return True
        folder = self.path / "checkpoints"
        if not folder.is_dir():
            return folder.exists()  # a file of that name is reported when it is used
        # A checkpoint that was only partly written is hidden, as is one that was being replaced.
        return any(
            not path.name.startswith(".") or path.suffix == files.REPLACED
            for path in folder.iterdir()
        )

    def _remove_logs(self) -> None:
        """Removes the logs from before the first checkpoint, which will be written again."""
        if self.is_chief:
            for path in (self.path / "metrics.jsonl", *self.path.glob(tensorboard.FILES)):
                path.unlink(missing_ok=True)

    def _begin_again(self) -> None:
        """Begins a run at step 0 all of whose checkpoints are damaged; keeps its metrics."""
        metrics, kept = self.path / "metrics.jsonl", self.path / "old-metrics.jsonl"
        log.warning("%s: no checkpoint is left, training begins again at step 0", self.path)
        if self.is_chief and metrics.exists() and not kept.exists():
            metrics.rename(kept)
            log.warning("the metrics from before are in %s", kept)
        self._remove_logs()

    def _changes(self, saved: dict) -> list[str]:
        """Returns a line for each option that differs from the saved one, but paths and the like.

        Once `_refuse_differences()` has returned, only options that a resumed run may change can
        differ.
        """
        now = json.loads(json.dumps(common(self.options)))
        return [
            f"{flag(name)}: was {saved[name]}, is now {now[name]}"
            for name in now
            if name in saved and name != "resume" and saved[name] != now[name]
        ]

    def _refuse_differences(self, saved: dict) -> list[str]:
        """Refuses options that must not change; returns those that an extension changes."""
        now = json.loads(json.dumps(to_json(self.options)))
        may_change = {name: metadata(type(self.options), name)["resume"] for name in now}
        different = [
            name for name in now if may_change[name] != "free" and now[name] != saved.get(name)
        ]
        unknown = [name for name in saved if name not in now]
        can_extend = all(may_change[name] == "extend" for name in different)
        if unknown or (different and not (can_extend and self.options.resume == "extend")):
            if self.options.resume == "extend":  # the others are free
                different = [name for name in different if may_change[name] != "extend"]
            lines = [
                f"{flag(n)}: was {saved[n]}, is now {now[n]}"
                if n in saved
                else f"{flag(n)}: did not exist, is now {now[n]}"
                for n in different
            ]
            lines += [f"{flag(n)}: was {saved[n]}, does not exist here" for n in unknown]
            if unknown or not saved.keys() >= set(different):
                raise RunError(
                    f"--run-dir {self.path}: cannot resume: the version that began this run has "
                    "other options; finish it with that version (options.json has its commit), or "
                    "use another --run-dir\n" + "\n".join(lines)
                )
            hint = (
                " (--resume extend trains it for more --epochs or --max-steps)"
                if can_extend
                else ""
            )
            is_finished = (self.path / "results.json").exists()
            if "dataset" in different and hasattr(self.options, "preset") and is_finished:
                hint += (
                    "; to train its model on other data, pass "
                    f"--preset {self.path}/model and another --run-dir"
                )
            raise RunError(
                f"--run-dir {self.path}: cannot resume, these options changed; the same command "
                f"resumes it, another folder starts a new run{hint}\n" + "\n".join(lines)
            )
        return different

    def keep_facts(
        self,
        facts: dict,
        replicas_per_worker: int = 1,
        notes: Sequence[str] = (),
        described: dict | None = None,
    ) -> None:
        """Writes `options.json`: the options, their resolved values, replicas per worker.

        Args:
            facts: resolved values, JSON; `total_steps` and `steps_per_epoch` among them.
            replicas_per_worker: for the launcher, which may start another number of workers.
            notes: lines about the data and fallbacks, for a run that resumes.
            described: further resolved values of options, to show.

        Raises:
            RunError: the values of the run in the folder differ, or it has no steps left.
        """
        facts = json.loads(json.dumps(facts, default=files.json_value))
        if self.checkpoint is not None:
            free = {"total_steps", "epochs"} if self._extends else set()
            different = [
                f"{name}: was {self.facts.get(name)}, is now {value}"
                for name, value in facts.items()
                if name not in free and self.facts.get(name) != value
            ]
            if different:
                raise RunError(
                    f"--run-dir {self.path}: cannot resume, these values changed\n"
                    + "\n".join(different)
                )
            done, total = self.checkpoint.step, facts["total_steps"]
            if total < done or (self._extends and total == done == self._finished_at):
                limit = f"--epochs {self.options.epochs}"
                if self.options.max_steps == total:
                    limit = f"--max-steps {total}"
                raise RunError(
                    f"--run-dir {self.path}: the run has done {done} steps, and {limit} ends it at "
                    f"step {total}: pass a larger number"
                )
            longer = self.facts.get("total_steps") != total
            # Not one that a longer run has reached, and was killed before it wrote its results.
            if self._extends and self.checkpoint.state["finished"]:
                if longer or done == self._finished_at:
                    self.checkpoint = checkpoints.reopened(
                        self.checkpoint, facts["steps_per_epoch"]
                    )
            if longer:
                log.warning(
                    "the schedule is recomputed over %s steps instead of %s",
                    total,
                    self.facts.get("total_steps"),
                )
        self.facts = facts
        if self.is_chief:
            content = {
                "recipe": self.recipe,
                "options": to_json(self.options),
                "resolved": facts,
                "shown": shown(self.options, facts | (described or {})),
                "notes": list(notes),
                "git": git_state(),
                "replicas_per_worker": replicas_per_worker,
            }
            if self._extends and self._finished_at is not None:
                content["extends"] = self._finished_at
            if self.checkpoint is not None:
                self._options_before = (self.path / "options.json").read_text(encoding="utf-8")
            self.write_json("options.json", content)

    def write_json(self, name: str, content: dict) -> None:
        """Writes a JSON file atomically.

        Raises:
            CannotSave: it cannot be written.
        """
        # JSON has no NaN and no infinity: such numbers become text.
        content = json.loads(json.dumps(content, default=files.json_value), parse_constant=str)
        with saving(self.path / name), files.atomic(self.path / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def discard(self) -> None:
        """Removes what this process created of the folder and its parents if nothing was trained.

        Only the chief removes files.
        In an earlier run's folder, restores its `options.json` if nothing was trained since.
        """
        if not self.is_chief:
            remove_empty(self._made)
            return
        folder = self.path / "checkpoints"
        if self._made and not folder.exists():
            shutil.rmtree(self.path, ignore_errors=True)
            remove_empty(self._made[1:])
        elif self._options_before is not None and self.checkpoint is not None:
            if checkpoints.newest_path(folder) == str(self.checkpoint.folder):
                with contextlib.suppress(CannotSave):  # of a full disk: reported already
                    self.write_json("options.json", json.loads(self._options_before))

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def git_state() -> dict | None:
    """Returns the commit of this checkout, and whether tracked files differ; None without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    words += ["--abbrev=40", "--exclude=*"]  # the commit, not a tag
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    name = ended.stdout.strip()
    return {"commit": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")}
