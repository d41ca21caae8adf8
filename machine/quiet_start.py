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
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Iterator

from machine import xla_cache

# Warnings that mean nothing here.
HARMLESS = (
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
    for text in HARMLESS:
        warnings.filterwarnings("ignore", message=".*" + text)
    logging.getLogger("tensorflow").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not any(re.search(text, record.getMessage()) for text in HARMLESS)


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


@contextlib.contextmanager
def _standard_error_caught() -> Iterator[None]:
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    stderr = os.dup(2)
    # Nothing but fatal errors; read once, by the import. Python reports the others, and XLA finds
    # tuning hints that it put into a program itself missing on this processor, in long lines.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except BaseException:
            caught.seek(0)
            os.write(stderr, caught.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
