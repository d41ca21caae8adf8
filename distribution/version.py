"""Tells what `--version` prints; imports nothing for it."""

import pathlib
import platform
import tomllib
from importlib import metadata

PACKAGES = ("keras", "tensorflow")


def version_line() -> str:
    """Returns the version of this checkout, and of what its numbers depend on."""
    # Not from the installed package's metadata: an editable install keeps those of its first day.
    checkout = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
    project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
    used = [f"{name} {_installed(name)}" for name in PACKAGES]
    used.append(f"Python {platform.python_version()}")
    return f"{project['name']} {project['version']} ({', '.join(used)})"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
