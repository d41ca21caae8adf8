"""Jobs for processes that import next to nothing: `python -m` of a module of ours, one per core.

Neither a fork (TensorFlow's threads do not survive it) nor Python's spawn (it imports the main
program again, with TensorFlow: ten seconds and a gigabyte each).
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
NO_MORE = object()


def run_jobs(module: str, jobs: Iterable[Any], done: Callable[[Any], None], at_most: int) -> None:
    """Hands jobs to processes; none of them is left when this returns or raises.

    A process whose parent is killed ends after its job.

    Args:
        module: what the processes run; it calls `serve`.
        jobs: what can be pickled; each is taken when a process is free.
        done: is called here with each answer, in the order in which they come.
        at_most: how many processes at most; there are no more than cores.

    Raises:
        DataError, OSError: A job raised it.
        RuntimeError: A process ended; the message has what it wrote to its standard error.
    """
    waiting, lock = iter(jobs), threading.Lock()
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def feed(worker: _Worker) -> None:
        try:
            while True:
                with lock:
                    job = next(waiting, NO_MORE)
                if job is NO_MORE:
                    break
                answers.put((worker.ask(job), None))
            answers.put((NO_MORE, None))
        except BaseException as error:
            answers.put((None, error))

    workers: list[_Worker] = []
    threads: list[threading.Thread] = []
    try:
        for _ in range(min(at_most, len(os.sched_getaffinity(0)))):
            workers.append(_Worker(module))
            threads.append(threading.Thread(target=feed, args=(workers[-1],), daemon=True))
            threads[-1].start()
        busy = len(workers)
        while busy:
            answer, error = answers.get()
            if error is not None:
                raise error
            if answer is NO_MORE:
                busy -= 1
            else:
                done(answer)
    finally:
        for worker in workers:
            worker.process.kill()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()


def serve(work: Callable[[Any], Any]) -> None:
    """What the module of a worker does: answers the jobs on its standard input.

    Args:
        work: gets a job and returns its answer, which can be pickled. A `DataError` or `OSError` of
            it is raised in the parent; any other error ends the process.
    """
    # Standard output is for answers alone: whatever is printed goes to the errors.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs = os.fdopen(0, "rb")
    while jobs.peek(1):
        try:
            answer = work(pickle.load(jobs))
        except (DataError, OSError) as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


class _Worker:
    """A process, and the pipes to it."""

    def __init__(self, module: str):
        self.module = module
        self.stderr = tempfile.TemporaryFile()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            # -P: what lies in the current folder is not imported.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            # Ctrl-C goes to all processes of a terminal: here it is for the parent alone.
            start_new_session=True,
        )

    def ask(self, job: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(job, self.process.stdin, pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.stderr.seek(0)
            said = self.stderr.read()[-3000:].decode(errors="replace").strip()
            status = self.process.returncode
            raise RuntimeError(
                f"a process of {self.module} ended with status {status}: {said or 'no word'}"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.wait()
        with contextlib.suppress(OSError):  # what was not sent any more
            self.process.stdin.close()
        self.process.stdout.close()
        self.stderr.close()
