"""Training recipes, one per file, and programs that use their runs; Keras runs on TensorFlow."""

import importlib.util
import os
import sys

# The packages that every recipe imports, also one that is stored elsewhere.
NEEDED = ("callbacks", "data", "distribution", "machine", "training")


def _require_packages() -> None:
    """Raises an ImportError where a file beside the program, such as data.py, hides a package."""
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is not None:
            continue
        problem = f"{spec.origin} hides the package {name} that recipes need: rename the file"
        if sys.argv[0] == "-m":  # `python -m recipes.X`
            print(f"error: {problem}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(problem)


_require_packages()

from machine.late_modules import import_late  # noqa: E402
from machine.output import prepare_streams  # noqa: E402
from machine.quiet_start import start_quietly  # noqa: E402
from training.command_line import answer_early  # noqa: E402

os.environ["KERAS_BACKEND"] = "tensorflow"
prepare_streams()
start_quietly()
import_late()
answer_early()
