"""Reports installed versions, and the requirements to install beside an existing TensorFlow.

    python -m machine.requirements     # in Colab: one requirement per line, or nothing

It imports neither TensorFlow nor Keras.
"""

import pathlib
import platform
import shutil
import tomllib
from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from machine.output import silent_broken_pipe

NAME = "keras-recipes"  # of this package
# An installed TensorFlow in this range is kept. KerasNLP 0.32 needs 2.20 or later.
FITS = SpecifierSet(">=2.20,<2.22")
# These must match TensorFlow's first two version numbers.
OF_TENSORFLOW = ("tensorflow-text", "tensorboard")


def project() -> dict:
    """Returns name, version and dependencies of this package.

    From `pyproject.toml`, as the metadata of `pip install -e` may be outdated; from the metadata
    where the package was installed without `-e`.
    """
    path = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
    version = installed(NAME)
    if version is not None and not path.exists():
        lines = [line for line in metadata.requires(NAME) or () if "extra ==" not in line]
        return {"name": NAME, "version": version, "dependencies": lines}
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def installed(name: str) -> str | None:
    """Returns the installed version of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def version_line() -> str:
    """Returns the versions of this checkout and of the packages that determine its results."""
    used = f"keras {installed('keras')}, tensorflow {installed('tensorflow')}"
    ours = project()
    return f"{ours['name']} {ours['version']} ({used}, Python {platform.python_version()})"


def missing(version_of: Callable[[str], str | None] = installed, *, gpu: bool = False) -> list[str]:
    """Returns the requirements to install; keeps an installed TensorFlow that fits.

    Args:
        version_of: returns the installed version of a package.
        gpu: whether another TensorFlow needs the libraries of a GPU.

    Returns:
        Requirements; empty if none is missing.
    """
    tensorflow = Version(version_of("tensorflow") or "0")
    stays, chosen = tensorflow in FITS, []
    for line in project()["dependencies"]:
        requirement = Requirement(line)
        if stays and requirement.name == "tensorflow":
            continue
        if stays and requirement.name in OF_TENSORFLOW:
            requirement = Requirement(
                f"{requirement.name}=={tensorflow.major}.{tensorflow.minor}.*"
            )
        if gpu and requirement.name == "tensorflow":
            requirement.extras.add("and-cuda")
        version = version_of(requirement.name)
        if version is None or version not in requirement.specifier:
            chosen.append(str(requirement))
    return chosen


if __name__ == "__main__":
    with silent_broken_pipe():
        for line in missing(gpu=shutil.which("nvidia-smi") is not None):
            print(line)
