"""The processes of a run: started, watched, their output passed on."""

import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from distribution.launch.cluster import assign_cores, assign_gpus
from distribution.launch.plan import SAVED_AND_STOPPED, WRONG_OPTIONS, LaunchPlan, foreign

# How many threads TensorFlow and the libraries below it take; what the user has set stays.
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
TAIL_LINES = 20
POLL_SECONDS = 0.1
WATCH_SECONDS = 5  # between two looks at the parameter servers, from another host
GONE_SECONDS = 60  # without an answer from the parameter servers: their run is over


def say(text: str, speaker: str = "launch: ") -> None:
    """Prints a line of the launcher's own. A terminal that is gone must not end a run."""
    try:
        print(f"{speaker}{text}", file=sys.stderr, flush=True)
    except OSError:
        pass


@dataclasses.dataclass
class Child:
    """A process of the run."""

    task: str
    index: int
    process: subprocess.Popen
    log: pathlib.Path
    log_start: int  # where this process's part of the log begins, in bytes
    swept: bool = False  # nothing of its session is left
    noticed: bool = False  # its end has been dealt with

    @property
    def name(self) -> str:
        """Its rank, for messages."""
        return "chief" if self.task == "chief" else f"{self.task} {self.index}"

    @property
    def alive(self) -> bool:
        """Whether it still runs. Sweeps up what a process that has ended left in its session."""
        if self.process.poll() is None:
            return True
        if not self.swept:
            self.swept = True
            self.kill()
        return False

    @property
    def status(self) -> int:
        """Exit status as a shell gives it: 128 + n after signal n. Only once it has ended."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def describe_end(self) -> str:
        """How it ended, for messages."""
        code = self.process.returncode
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit status {code}"

    def kill(self) -> None:
        """SIGKILL to the whole session of the process."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def last_lines(self) -> list[str]:
        """The end of what it wrote."""
        try:
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_start, size - 65536))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return [f"(not readable: {error.strerror})"]
        return text.splitlines()[-TAIL_LINES:]


def likely_cause(child: Child) -> tuple[bool, bool]:
    """Order of processes that ended at the same time: who failed first?

    A signal from outside follows nobody's failure, and neither do wrong options and a request to
    stop. Any other failure may be a lost connection to one of those.
    """
    code = child.process.returncode
    return code >= 0, code not in (WRONG_OPTIONS, SAVED_AND_STOPPED)


def check_logs(plan: LaunchPlan) -> list[str]:
    """Makes the folder of the logs. Returns a line for each log that could not be written."""
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        # A module that is no recipe may have there what it likes.
        if plan.log_dir == plan.run_dir and plan.module.startswith("recipes."):
            problem = foreign(plan.run_dir)
            if problem:
                return [problem]
    except OSError as error:
        return [f"cannot make the folder of the logs, {plan.log_dir}: {error.strerror}"]
    problems = []
    for path in (plan.log_of(*task) for task in plan.tasks()):
        try:
            new = not path.exists()
            if not new and not path.is_file():
                problems.append(f"cannot write the log {path}: it is there and is no file")
                continue
            open(path, "ab").close()
            if new:
                path.unlink()
        except OSError as error:
            problems.append(f"cannot write the log {path}: {error.strerror}")
    return problems


def prepare_child(cores: list[int] | None) -> Callable[[], None]:
    """What a child does between fork and exec.

    It asks the system to end it when the launcher is killed (Linux), and keeps to its cores.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        if prctl:
            prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
        if cores:
            try:
                os.sched_setaffinity(0, cores)
            except OSError:  # a core was taken away meanwhile; only speed is lost
                pass

    return prepare


def start(plan: LaunchPlan, cluster: dict[str, list[str]], task: str, index: int) -> Child:
    """Starts a process of the run; it writes into its own log, after what stands there."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    environment = os.environ | {
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
        "KERAS_RECIPES_LAUNCHED": "1",
    }
    if plan.planned_workers:
        environment["KERAS_RECIPES_PLANNED_WORKERS"] = str(plan.planned_workers)
    gpus = assign_gpus(plan, task, index)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    cores = assign_cores(plan, task, index)
    if cores:
        for name in THREADS:
            environment.setdefault(name, str(len(cores)))
        if plan.parameter_servers and "TF_NUM_INTEROP_THREADS" not in os.environ:
            # A function that waits for the parameter servers holds such a thread: with only one a
            # worker waits for ever (TensorFlow's guide to ParameterServerStrategy takes 4).
            environment["TF_NUM_INTEROP_THREADS"] = str(max(4, len(cores)))
    log = plan.log_of(task, index)
    with open(log, "ab") as file:
        log_start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", plan.module, *plan.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches the launcher only
            preexec_fn=prepare_child(cores),
        )
    return Child(task, index, process, log, log_start)


class Relay(threading.Thread):
    """Copies a log to the terminal as it grows, whole lines at a time.

    The process writes into its log and never waits for the terminal; this thread may.
    """

    def __init__(self, child: Child):
        super().__init__(daemon=True)
        self.log, self.position = child.log, child.log_start
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Copies until `finish`."""
        last = False
        while not last:
            last = self.ended.wait(POLL_SECONDS)
            try:
                self.copy(last)
            except OSError:  # nobody reads any more; the log has it all
                return

    def copy(self, last: bool) -> None:
        """Copies what is new, up to the end of its last line, or all of it."""
        with open(self.log, "rb") as file:
            file.seek(self.position)
            text = file.read()
        if not last:  # progress bars end their lines with a carriage return
            text = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        self.position += len(text)
        while text:
            text = text[os.write(1, text) :]

    def finish(self) -> None:
        """Copies the rest, and ends."""
        self.ended.set()
        self.join(timeout=5)


class Peers(threading.Thread):
    """Looks whether the tasks on other hosts answer, by connecting to them and hanging up.

    Args:
        addresses: HOST:PORT of every server on another host.
        watched: One of them that is asked again and again, or None.
    """

    def __init__(self, addresses: Iterable[str], watched: str | None):
        super().__init__(daemon=True)
        self.silent = dict.fromkeys(addresses, "not asked yet")
        self.watched = watched
        self.started = time.monotonic()
        self.last_answer: float | None = None  # of the one that is watched
        self.closed = threading.Event()
        self.start()

    def run(self) -> None:
        """Asks until all have answered, or for ever if one is watched."""
        while (self.silent or self.watched) and not self.closed.wait(0.5):
            dead_hosts = set()  # one look at each per round: a filtered port costs two seconds
            for address in list(self.silent):
                host = address.rpartition(":")[0]
                if host in dead_hosts:
                    continue
                reason = self.ask(address)
                if reason is None:
                    del self.silent[address]
                else:
                    self.silent[address] = reason
                    dead_hosts.add(host)
            if self.watched and self.watched not in self.silent and not self.ask(self.watched):
                self.last_answer = time.monotonic()
            if not self.silent:
                self.closed.wait(WATCH_SECONDS)

    @staticmethod
    def ask(address: str) -> str | None:
        """Why nobody answers there; None if somebody does."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def late(self, timeout: float) -> str | None:
        """Who has not answered after so many seconds; None if all have, or there is time left."""
        if not self.silent or time.monotonic() - self.started < timeout:
            return None
        return self.describe()

    def describe(self) -> str:
        """Those who have not answered, and why."""
        return ", ".join(f"{address} ({reason})" for address, reason in self.silent.copy().items())

    def gone(self) -> bool:
        """Whether the one that is watched has answered once, and then not for a long time."""
        return self.last_answer is not None and (time.monotonic() - self.last_answer > GONE_SECONDS)
