import hashlib
import re
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from machine import lock
from tests.support.launched import ROOT


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-ray.lock"])
def test_a_lock_file_has_versions_and_checksums_and_no_address(name):
    content = (ROOT / name).read_text(encoding="utf-8")
    package = r"[\w.-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(f"({package})+", content)
    assert "://" not in content


def test_the_lock_file_satisfies_the_project():
    content = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(line.split("==") for line in lock.read_lock(content))
    locked = {canonicalize_name(package): version for package, version in locked.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        wanted = Requirement(line)
        assert locked[canonicalize_name(wanted.name)] in wanted.specifier, line


def test_what_is_written_is_read_again():
    checksums = {"a==1": {"f" * 64, "0" * 64}, "B_c==2.0": {"1" * 64}}
    content = lock.format_lock(checksums, checksums)
    assert content == (
        f"a==1 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'f' * 64}\n"
        f"B_c==2.0 \\\n    --hash=sha256:{'1' * 64}\n"
    )
    assert lock.read_lock(content) == ["a==1", "B_c==2.0"]
    with pytest.raises(ValueError, match="d==3: no wheel found"):
        lock.format_lock(["a==1", "d==3"], checksums)


@pytest.mark.long
def test_pip_is_asked_for_the_wheels_of_another_machine(tmp_path, monkeypatch):
    """A folder of wheels stands for the registry."""
    for name in ("one_two-1.0-py3-none-any", "three-2.0-cp312-cp312-macosx_11_0_arm64"):
        package, version, *_ = name.split("-")
        about = f"{package}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            wheel.writestr(f"{about}/METADATA", metadata)
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wanted = ["One.two==1.0", "three==2.0"]
    found = lock.wheels(wanted, ["macosx_14_0_arm64"], "3.12")
    sums = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.glob("*.whl"))
    ]
    assert found == dict(zip(wanted, sums, strict=True))
    assert lock.wheels(wanted, ["manylinux_2_28_x86_64"], "3.12").keys() == {"One.two==1.0"}
