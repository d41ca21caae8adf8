"""Runs a function of a test in fresh processes, alone or as the workers of a cluster.

Each process is a fork of one that has imported TensorFlow and touched no device
(`tests.support.processes`).
"""

import inspect
import json
import multiprocessing.connection
import os
import runpy
import socket
import tempfile
import time
import traceback
from collections.abc import Callable

from tests.support.processes import FORKS


class KerasFails(AssertionError):
    """Reports that Keras raised or computed a wrong number (tests/upstream)."""


def run(function: Callable, *arguments, workers: int = 1, cpus: int = 2, seconds: float = 120):
    """Calls a function of a test file in each of several fresh processes.

    Args:
        function: a top-level function, looked up by file and name, and called without its
            decorators.
        arguments: its arguments.
        workers: number of processes. TF_CONFIG makes several of them workers of a cluster.
        cpus: logical CPUs of each process.
        seconds: time after which the processes are stopped.

    Returns:
        The function's result; with several workers a list of their results.

    Raises:
        AssertionError: the function raised one (or a subclass); with its text.
        RuntimeError: it raised another error, ended without a result, or hung.
    """
    name = inspect.unwrap(function).__name__
    file = inspect.unwrap(function).__code__.co_filename
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        processes, ours = [], []
        try:
            for index, environ in enumerate(environments(workers)):
                pipe, theirs = FORKS.Pipe()
                output = os.path.join(folder, f"{index}.txt")
                process = FORKS.Process(
                    target=_child,
                    args=(file, name, arguments, environ, cpus, output, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                ours.append(pipe)
            results = _collect(ours, time.monotonic() + seconds, folder)
            for pipe in ours:
                pipe.send("leave")  # the first to leave would disconnect the others
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results[0] if workers == 1 else results


def _collect(pipes: list, end: float, folder: str) -> list:
    """Returns the result of each process; raises as soon as one of them fails."""
    results = {}
    while len(results) < len(pipes):
        waiting = [pipe for index, pipe in enumerate(pipes) if index not in results]
        ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise RuntimeError("no end within the time" + _outputs(folder))
        for pipe in ready:
            try:
                error, value = pipe.recv()
            except EOFError:
                raise RuntimeError("a process ended without a word" + _outputs(folder)) from None
            if isinstance(error, AssertionError):
                raise error
            if error is not None:
                raise RuntimeError(value + _outputs(folder)) from error
            results[pipes.index(pipe)] = value
    return [results[index] for index in range(len(pipes))]


def _outputs(folder: str) -> str:
    texts = []
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            texts.append(f"\n--- {name}\n{file.read()[-2000:]}")
    return "".join(texts)


def environments(workers: int) -> list[dict[str, str]]:
    """Returns the TF_CONFIG of each worker of a cluster on this machine; of one worker none."""
    if workers == 1:
        return [{}]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    cluster = {"worker": [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]}
    for held in sockets:
        held.close()
    tasks = [{"type": "worker", "index": index} for index in range(workers)]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def _child(file, name, arguments, environ, cpus, output, pipe) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(environ)
    try:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * cpus
        tf.config.set_logical_device_configuration(cpu, parts)
        function = inspect.unwrap(runpy.run_path(file)[name])
        report = (None, function(*arguments))
    except AssertionError as error:
        report = (error, None)
    except Exception as error:
        report = (RuntimeError(repr(error)), traceback.format_exc())
    pipe.send(report)
    pipe.poll(20)
