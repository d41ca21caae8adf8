"""Adds the checksums of wheels for each supported machine to a lock file.

    python -m machine.lock requirements.lock

Reads `name==version` lines, asks pip for the wheel of each on Linux (x86-64, 64-bit ARM) and macOS
(Apple silicon) with Python 3.11 to 3.13, and rewrites the file for `pip install --require-hashes`.
Downloads some gigabytes. Names a package without a wheel for a machine; one without any wheel is an
error.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
MANYLINUX = ("2_28", "2_27", "2_26", "2_24", "2_17", "2014", "2_12", "2010", "2_5", "1")
PLATFORMS = {
    "Linux x86-64": [f"manylinux{'_' if '_' in v else ''}{v}_x86_64" for v in MANYLINUX],
    "Linux ARM": [f"manylinux{'_' if '_' in v else ''}{v}_aarch64" for v in MANYLINUX],
    "macOS ARM": ["macosx_14_0_arm64"],  # and all older ones
}


def read_lock(content: str) -> list[str]:
    """Returns the `name==version` of each package in a lock file."""
    return re.findall(r"^([^\s#-]\S*==\S+)", content, re.MULTILINE)


def format_lock(requirements: Iterable[str], checksums: dict[str, set[str]]) -> str:
    """Returns a lock file's content.

    Args:
        requirements: `name==version` of each package.
        checksums: SHA-256 of wheels, hex, by requirement.

    Raises:
        ValueError: a package has no checksum.
    """
    lines = []
    for requirement in requirements:
        if not checksums.get(requirement):
            raise ValueError(f"{requirement}: no wheel found")
        hashes = (f"--hash=sha256:{checksum}" for checksum in sorted(checksums[requirement]))
        lines.append(" \\\n    ".join([requirement, *hashes]))
    return "\n".join(lines) + "\n"


def wheels(requirements: list[str], platforms: list[str], python: str) -> dict[str, str]:
    """Asks pip for the wheel of each package on another machine.

    Args:
        requirements: `name==version` of each package.
        platforms: Tags of that machine, the best one first.
        python: The Python version of that machine.

    Returns:
        SHA-256, hex, by requirement, without those that have no wheel.
    """
    wanted = list(requirements)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--target", folder, "--report", str(report), "--python-version", python]
        command += [word for platform in platforms for word in ("--platform", platform)]
        while wanted:
            done = subprocess.run([*command, *wanted], capture_output=True, text=True)
            if done.returncode == 0:
                break
            lacking = re.findall(r"No matching distribution found for (\S+)", done.stderr)
            if not lacking:
                raise RuntimeError(done.stderr.strip())
            wanted = [requirement for requirement in wanted if requirement not in lacking]
        installed = json.loads(report.read_text())["install"] if wanted else []
    checksums = {}
    for item in installed:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        checksum = item["download_info"]["archive_info"]["hashes"]["sha256"]
        checksums[normalized(f"{name}=={version}")] = checksum
    return {one: checksums[normalized(one)] for one in wanted}


def normalized(requirement: str) -> str:
    """Returns `name==version` with the name normalised as by package indexes."""
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def main(path: Path) -> None:
    """Rewrites a lock file."""
    requirements = read_lock(path.read_text(encoding="utf-8"))
    checksums: dict[str, set[str]] = {requirement: set() for requirement in requirements}
    for machine, platforms in PLATFORMS.items():
        for python in PYTHONS:
            checksum_of = wheels(requirements, platforms, python)
            for requirement, checksum in checksum_of.items():
                checksums[requirement].add(checksum)
            without = sorted(set(requirements) - checksum_of.keys())
            print(f"{machine}, Python {python}: no wheel of {', '.join(without) or 'nothing'}")
    path.write_text(format_lock(requirements, checksums), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
