import functools
import shutil
import subprocess

import pytest


@pytest.fixture
def as_command(command_line):
    """Runs the tiny recipe as its command line does, in this process: (status, stdout, stderr)."""
    from tests.support import tiny_recipe

    return functools.partial(command_line, tiny_recipe)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of the tiny recipe, done once; its folder must not be changed."""
    from tests.support import tiny_recipe

    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny_recipe.main(tiny_recipe.Options(run_dir=folder, validate_every=3, test_every=4))
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to be spoiled."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def stopped_at_four(tmp_path):
    """A run that was stopped after four steps: its folder and its options."""
    from tests.support import tiny_recipe

    options = tiny_recipe.Options(run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(4)])
    return tmp_path / "run", options


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB of its own, mounted; only root may."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NOT TESTED: what a full disk does; mounting a small one needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
