"""Imports TensorFlow without the lines that mean nothing to whoever reads the terminal.

Its native code writes some before any setting of Python's is read, so the file descriptor itself is
redirected for as long as the import takes. With TF_CPP_MIN_LOG_LEVEL set, it is not. The variable
is not left in the environment: a process that is started from here would take it for the user's.
"""

import contextlib
import importlib.machinery
import logging
import os
import re
import subprocess
import sys
import types
import typing
import warnings
from collections.abc import Iterator

from machine import xla_cache

# Warnings that mean nothing here.
WARNING_FILTERS = (
    # A checkpoint is loaded into a model that has not been trained: the weights are all it needs.
    "Skipping variable loading for optimizer",
    "Reduce to .* then broadcast",  # how TensorFlow sums over replicas
    r"triggered tf\.function retracing",  # a second shape, or a second run in one process
    "IProgress not found",  # tqdm's advice for notebooks
)


def start_quietly() -> None:
    """Keeps TensorFlow's import and harmless warnings from the terminal; imports nothing.

    What was written is shown if the import fails. It may be called again.
    """
    if "tensorflow" not in sys.modules and _QuietFinder not in sys.meta_path:
        sys.meta_path.insert(0, _QuietFinder)
    for text in WARNING_FILTERS:
        warnings.filterwarnings("ignore", message=".*" + text)
    logging.getLogger("tensorflow").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not any(re.search(text, record.getMessage()) for text in WARNING_FILTERS)


class _QuietFinder:
    """Finds TensorFlow as Python does, and keeps it quiet while it is imported."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: typing.Any = spec.loader  # a method of the one instance is replaced
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            xla_cache.use_own_folder()
            with _standard_error_caught():
                execute(module)
                module.config.list_physical_devices("GPU")  # this is when the drivers complain

        loader.exec_module = exec_module
        return spec


# Holds back what it reads, and writes it if the last line is not the one that says all is well:
# TensorFlow may end this process in native code, where nothing of Python's is called any more.
HOLD_BACK = """
held=
while IFS= read -r line; do
  [ "$line" = "$0" ] && exit
  held="$held$line
"
done
printf %s "$held$line" >&2
"""
ALL_IS_WELL = b"keras-recipes: imported"


@contextlib.contextmanager
def _standard_error_caught() -> Iterator[None]:
    shell = None
    if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError):  # no shell: nothing is held back
            shell = subprocess.Popen(
                ["/bin/sh", "-c", HOLD_BACK, ALL_IS_WELL],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends this process; what it wrote is still shown
            )
    if shell is None or shell.stdin is None:
        yield
        return
    stderr = os.dup(2)
    # Nothing but fatal errors; read once, by the import. Python reports the others, and XLA finds
    # tuning hints that it put into a program itself missing on this processor, in long lines.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.dup2(shell.stdin.fileno(), 2)
    shell.stdin.close()
    try:
        yield
        os.write(2, b"\n" + ALL_IS_WELL + b"\n")
    finally:
        os.dup2(stderr, 2)  # the shell has read everything
        os.close(stderr)
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
        shell.wait()
