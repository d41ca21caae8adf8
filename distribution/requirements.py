"""Prints what pip has to install where the installed TensorFlow is kept, as in Colab.

    python -m distribution.requirements

Prints a requirement a line, nothing where all is there. It imports neither TensorFlow nor Keras.
"""

import pathlib
import shutil
import tomllib
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PYPROJECT = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
# A TensorFlow that stays where it is installed already. KerasNLP 0.32 needs 2.20 or later.
FITS = SpecifierSet(">=2.20,<2.22")
# They belong to a TensorFlow, and have its first two numbers.
OF_TENSORFLOW = ("tensorflow-text", "tensorboard")


def dependencies() -> list[str]:
    """Returns the dependencies in `pyproject.toml`."""
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]


def installed_versions(wanted: list[str]) -> dict[str, str]:
    """Returns the installed versions of what is wanted, by package, without what is missing."""
    found = {}
    for line in wanted:
        name = Requirement(line).name
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def missing(wanted: list[str], installed: Mapping[str, str], gpu: bool = False) -> list[str]:
    """Returns what pip has to install, without another TensorFlow where the installed one fits.

    Args:
        wanted: requirements, as `pyproject.toml` writes them.
        installed: versions by package.
        gpu: whether another TensorFlow has to bring the libraries of a GPU.

    Returns:
        Requirements, in their order and each once; empty where nothing is missing.
    """
    stays = "tensorflow" in installed and Version(installed["tensorflow"]) in FITS
    found = []
    for line in dict.fromkeys(wanted):
        requirement = Requirement(line)
        if stays and requirement.name == "tensorflow":
            continue
        if stays and requirement.name in OF_TENSORFLOW:
            stayed = Version(installed["tensorflow"])
            requirement = Requirement(f"{requirement.name}=={stayed.major}.{stayed.minor}.*")
        if gpu and requirement.name == "tensorflow":
            requirement.extras.add("and-cuda")
        version = installed.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(str(requirement))
    return found


if __name__ == "__main__":
    gpu = shutil.which("nvidia-smi") is not None
    for line in missing(dependencies(), installed_versions(dependencies()), gpu):
        print(line)
