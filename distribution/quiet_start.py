"""Imports TensorFlow without the lines that its native code writes to the terminal.

They come before any setting of Python's is read, so the file descriptor itself is redirected for as
long as the import takes. Whoever sets TF_CPP_MIN_LOG_LEVEL sees all that it lets through. It is
not left in the environment: a process that is started from here would take it for the user's.
"""

import os
import sys
import tempfile
import warnings


def import_tensorflow() -> None:
    """Imports TensorFlow and looks for GPUs, which is when its drivers complain.

    What was written is shown if the import fails.
    """
    if "tensorflow" in sys.modules or "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    try:
        stderr = os.dup(2)
    except OSError:  # closed: nobody sees anything
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors only; read once, by the import
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices("GPU")
        except BaseException:
            caught.seek(0)
            os.write(stderr, caught.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]


def import_tqdm() -> None:
    """Imports what the download clients draw their bars with, without its advice for notebooks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # ipywidgets are not needed
        import tqdm.auto  # noqa: F401
