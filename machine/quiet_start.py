"""Imports TensorFlow without its irrelevant messages on the terminal.

Its native code writes some before any Python setting applies, so the file descriptor itself is
redirected during the import, unless TF_CPP_MIN_LOG_LEVEL is set. The variable is removed from the
environment afterwards: a child process would mistake it for the user's.
"""

import contextlib
import gc
import importlib.machinery
import logging
import os
import re
import signal
import subprocess
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator

from machine import memory, xla_cache

# Warnings that are irrelevant in recipes.
WARNING_FILTERS = (
    # A checkpoint is loaded into an untrained model, which needs only the weights.
    "Skipping variable loading for optimizer",
    "Reduce to .* then broadcast",  # how TensorFlow sums over replicas
    r"\(of type T5MultiHeadAttention\) was passed an input with a mask",  # it gets it otherwise
    r"triggered tf\.function retracing",  # a second shape, or a second run in one process
    "IProgress not found",  # tqdm's advice for notebooks
)


def start_quietly() -> None:
    """Hides messages of TensorFlow's import and irrelevant warnings; imports nothing.

    The messages are shown if the import fails. It may be called again.
    """
    if "tensorflow" not in sys.modules and _QuietFinder not in sys.meta_path:
        sys.meta_path.insert(0, _QuietFinder)
    for text in WARNING_FILTERS:
        warnings.filterwarnings("ignore", message=".*" + text)
    logging.getLogger("tensorflow").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not any(re.search(text, record.getMessage()) for text in WARNING_FILTERS)


class _QuietFinder:
    """Finds TensorFlow like Python, and silences its import."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: typing.Any = spec.loader  # replaces a method of this instance
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            memory.keep_freed_memory()
            xla_cache.use_own_folder()
            with _standard_error_caught(), _objects_kept():
                execute(module)
                module.config.list_physical_devices("GPU")  # the drivers report problems now

        loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _objects_kept() -> Iterator[None]:
    """Keeps garbage collection away from the objects made within it: 300,000 that stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


# Buffers its input, and prints it unless the last line reports success: TensorFlow may end this
# process in native code, where no Python code runs any more.
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


_is_caught = False  # whether the shell reads standard error


@contextlib.contextmanager
def _standard_error_caught() -> Iterator[None]:
    shell = None
    if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError):  # no shell: nothing is buffered
            shell = subprocess.Popen(
                ["/bin/sh", "-c", HOLD_BACK, ALL_IS_WELL],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends this process; its messages are still shown
            )
    if shell is None or shell.stdin is None:
        yield
        return
    global _is_caught
    stderr = os.dup(2)
    # Only fatal errors; the import reads it once. Python reports other errors, and XLA reports, in
    # long lines, tuning hints of its own programs that this processor lacks.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.dup2(shell.stdin.fileno(), 2)
    shell.stdin.close()
    _is_caught = True
    try:
        yield
        os.write(2, b"\n" + ALL_IS_WELL + b"\n")
    finally:
        _is_caught = False
        os.dup2(stderr, 2)  # the shell has read everything
        os.close(stderr)
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
        shell.wait()


STOCK_HANDLERS: dict[int, typing.Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
_release: Callable[[], None] | None = None  # undoes exit_on_interrupt()


def exit_on_interrupt(line: str, status: int) -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP end this process with one line.

    Ctrl-C would print a traceback through the imports; a container's first process would not notice
    SIGTERM. The process ends at once: native code that imports Python modules may swallow an
    exception. A signal that is ignored, as in the background, or handled already stays so.

    Args:
        line: printed to standard error.
        status: exit status of the process.
    """
    global _release
    taken = [n for n, handler in STOCK_HANDLERS.items() if signal.getsignal(n) == handler]
    if not taken:
        return
    stderr = os.dup(2)  # the one of the import is caught

    def leave(number, frame):
        with contextlib.suppress(OSError):
            if _is_caught:  # its messages are not about this end
                os.write(2, b"\n" + ALL_IS_WELL + b"\n")
            os.write(stderr, f"{line}\n".encode())
        os._exit(status)

    def release():
        for number in taken:
            if signal.getsignal(number) is leave:
                signal.signal(number, STOCK_HANDLERS[number])
        os.close(stderr)

    for number in taken:
        signal.signal(number, leave)
    _release = release


def release_interrupt() -> None:
    """Restores Python's answer to these signals if `exit_on_interrupt()` has replaced it."""
    global _release
    if _release is not None:
        _release()
        _release = None
