"""A recipe as a command: each end has its status and its line, and never a traceback."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from callbacks.errors import BadLoss, CannotSave, Stopped
from data.errors import DataError
from distribution.errors import DistributionError
from machine.quiet_start import exit_on_interrupt
from recipes import compare
from tests.support import processes
from training.errors import OptionsError, RunError
from training.signals import StopRequested

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error, status, said",
    [
        (OptionsError("--a: one\n--b: two"), 2, "tiny_recipe: --a: one\n  --b: two\n"),
        (DataError("no such file"), 2, "tiny_recipe: no such file\n"),
        (DistributionError("no such worker"), 2, "tiny_recipe: no such worker\n"),
        (RunError("--run-dir x: in use"), 2, "tiny_recipe: --run-dir x: in use\n"),
        (RunError("bytes \udcff"), 2, "tiny_recipe: bytes \\udcff\n"),
        (RunError(""), 2, "tiny_recipe: RunError\n"),
        (BadLoss("the loss is nan"), 1, "tiny_recipe: the loss is nan\n"),
        (CannotSave("disk full"), 1, "tiny_recipe: disk full\n"),
        (Stopped("stopped and saved."), 75, "stopped and saved.\n"),
        (StopRequested(), 75, "stopped before training began: the same command starts again\n"),
        (KeyboardInterrupt(), 75, "stopped: the same command starts again\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (FULL, 1, "tiny_recipe: No space left on device\n"),
        (FileExistsError(17, "File exists", "a/file"), 2, "tiny_recipe: a/file: File exists\n"),
        (SystemExit("no such thing"), 1, "tiny_recipe: no such thing\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (None, 0, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_status_and_line_of_each_end(as_command, error, status, said):
    def main(options):
        if error is not None:
            raise error

    assert as_command(main=main) == (status, "", said)


@pytest.mark.parametrize("error", [Stopped("stopped and saved."), StopRequested()])
def test_the_status_is_the_same_on_a_closed_terminal(as_command, error, monkeypatch):
    master, terminal = os.openpty()

    def main(options):
        raise error

    with open(terminal, "w") as stream:
        os.close(master)
        monkeypatch.setattr(sys, "stderr", stream)
        status, _, _ = as_command(main=main)
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # for the rest of the buffer
    assert status == 75


@pytest.mark.parametrize("name", ["data", "training"])
def test_a_file_that_hides_a_package_is_named(name, tmp_path):
    """For a program of the package in one line; a folder of data is none."""
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-m", "recipes.mnist", "--help"]
    settings = dict(cwd=tmp_path, capture_output=True, text=True)
    settings["env"] = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert subprocess.run(command, **settings).returncode == 0
    path = tmp_path / f"{name}.py"
    path.touch()
    ended = subprocess.run(command, **settings)
    assert ended.returncode == 2 and ended.stderr == (
        f"error: {path} hides the package {name} that recipes need: rename the file\n"
    )
    ended = subprocess.run([sys.executable, "-c", "import recipes"], **settings)
    assert f"ImportError: {path} hides the package {name}" in ended.stderr


def test_out_of_memory_names_what_to_change(as_command):
    def main(options):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating\nmore")

    status, _, errors = as_command(main=main)
    assert status == 1
    assert errors.startswith("tiny_recipe: out of memory: OOM when allocating\n  pass a smaller")


def test_out_of_memory_for_the_data(as_command):
    def main(options):
        np.empty((2**30, 2**20))

    status, _, errors = as_command(main=main)
    assert status == 1
    assert errors.startswith("tiny_recipe: out of memory: Unable to allocate 8.00 PiB")
    assert errors.endswith(
        "  the data or the model are too large; --max-examples takes fewer examples\n"
    )


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("x")])
def test_a_bug_keeps_its_traceback(as_command, error):
    def main(options):
        raise error

    with pytest.raises(type(error)):
        as_command(main=main)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--keep-best", "\udcff"], "--keep-best \\udcff: is not UTF-8"),
        (["--epochs", "-9"], "--epochs -9: must be in [1, 1e9]"),
    ],
)
def test_values_that_cannot_be(as_command, tmp_path, words, said):
    status, _, errors = as_command("--run-dir", tmp_path / "run", *words)
    assert status == 2 and errors.startswith(f"tiny_recipe: {said}")
    assert errors.count("\n") == 1 and len(errors) < 300
    assert not (tmp_path / "run").exists()


def test_a_conflict_with_the_file_of_options_names_the_file(as_command, tmp_path):
    file = tmp_path / "options.json"
    values = {"batch_size_per_replica": 16, "global_batch_size": None, "quiet": False}
    file.write_text(json.dumps(values))
    for line in (["--global-batch-size", "32"], ["--global-batch-size=32", "--epochs", "3"]):
        status, _, errors = as_command("--options", file, *line)
        assert status == 2
        assert errors.splitlines() == [
            "tiny_recipe: --batch-size-per-replica 16 and --global-batch-size 32: pass only one of "
            "them",
            f"  --batch-size-per-replica is from --options {file}; --batch-size-per-replica none "
            "unsets it",
        ]
    _, _, errors = as_command("--options", file, "--batch-size", "8", "--global-batch-size", "32")
    assert errors.count("pass only one of them\n") == 1 and str(file) not in errors


class TestInterruptedImport:
    """Ctrl-C in the first seconds, while TensorFlow (here: a fake) is imported."""

    FAKE = (
        "import os, pathlib, time\n"
        "os.write(2, b'noise of the import\\n')\n"
        "pathlib.Path(os.environ['IMPORTS']).touch()\n"
        "for _ in range(6000):\n"  # a signal just before a system call sleeps does not wake it
        "    time.sleep(0.01)\n"
    )

    @pytest.fixture
    def interrupted(self, tmp_path):
        """Starts a command, interrupts its import; returns its exit status and its output."""
        (tmp_path / "tensorflow.py").write_text(self.FAKE)
        started = []

        def call(*words, number=signal.SIGINT, handler=signal.SIG_DFL, seconds=60, **environ):
            path, imports = f"{tmp_path}:{processes.ROOT}", tmp_path / "imports"
            process = subprocess.Popen(
                [sys.executable, *words],
                env={"PYTHONPATH": path, "IMPORTS": str(imports), "PATH": ""} | environ,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=lambda: signal.signal(number, handler),
            )
            started.append(process)
            deadline = time.monotonic() + 60
            while not imports.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(number)
            return process.communicate(timeout=seconds)[0], process.returncode

        yield call
        for process in started:
            process.kill()
            process.wait()

    @pytest.mark.parametrize(
        "words, line",
        [
            ("recipes.mnist", "stopped before training began: the same command starts again"),
            ("recipes.evaluate runs/first", "stopped: the same command starts again"),
        ],
    )
    @pytest.mark.parametrize("environ", [{}, {"TF_CPP_MIN_LOG_LEVEL": "0"}])
    def test_is_one_line(self, interrupted, words, line, environ):
        noise = "noise of the import\n" if environ else ""
        found = interrupted("-m", *words.split(), **environ)
        assert found == (f"{noise}{line}\n", 75)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_other_signals_are_one_line_too(self, interrupted, number):
        """A scheduler that takes the machine away; as process 1 of a container it was lost."""
        found = interrupted("-m", "recipes.mnist", number=number)
        assert found == ("stopped before training began: the same command starts again\n", 75)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_not_where_it_is_ignored(self, interrupted, number):
        with pytest.raises(subprocess.TimeoutExpired):  # as after nohup, or in the background
            interrupted("-m", "recipes.mnist", number=number, handler=signal.SIG_IGN, seconds=1)

    def test_a_library_keeps_pythons_answer(self, interrupted):
        said, status = interrupted("-c", "import recipes.mnist")
        assert said.rstrip().endswith("KeyboardInterrupt") and status == -signal.SIGINT

    def test_the_recipe_itself_is_not_interrupted_like_that(self, as_command):
        stock = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        before, within = {number: signal.getsignal(number) for number in stock}, {}
        for number, handler in stock.items():
            signal.signal(number, handler)
        try:
            exit_on_interrupt("a line", 3)
            assert all(signal.getsignal(number) != handler for number, handler in stock.items())
            as_command(main=lambda _: within.update({n: signal.getsignal(n) for n in stock}))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert within == stock


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_does_not_train_is_interrupted(command_line, number, tmp_path):
    """As by Ctrl-C; `timeout` signals the process and its group, which is one request."""
    cleaned = []

    def main(options):
        assert signal.getsignal(number) != signal.SIG_DFL
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), number)
            cleaned.append(True)

    ended = command_line(compare, tmp_path, main=main)
    assert ended == (75, "", "stopped: the same command starts again\n") and cleaned
    assert signal.getsignal(number) == signal.SIG_DFL


class TestFolder:
    def test_a_file_where_a_folder_is_expected(self, as_command, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for path, words in (
            ("file", "is a file, not a folder"),
            ("link", "is a link to nothing"),
            ("file/run", "Not a directory"),
        ):
            status, _, errors = as_command("--run-dir", tmp_path / path)
            assert status == 2 and f"--run-dir {tmp_path / path}: {words}" in errors
            assert errors.count("\n") == 1

    @pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
    def test_a_file_or_folder_in_the_place_of_another(self, as_command, copied, name):
        """A run's output path that another file or folder occupies."""
        if (copied / name).is_dir():
            shutil.rmtree(copied / name)
            (copied / name).touch()
        else:
            (copied / name).unlink()
            (copied / name).mkdir()
        (copied / "results.json").unlink()
        line = ["--run-dir", copied, "--validate-every", "3", "--test-every", "4"]
        status, _, errors = as_command(*line)
        assert status in (1, 2), errors
        assert str(copied / name) in errors and errors.count("\n") == 1


@pytest.mark.parametrize("words", ["recipes", "recipes.mnist --help", "launch --help"])
def test_a_reader_that_has_left_is_no_error(words, tmp_path):
    read, write = os.pipe()
    os.close(read)
    # Buffered, as for a person: what is left is written when the program ends.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=processes.ROOT,
        env=environ | {"PYTHONPATH": str(processes.ROOT)},
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=100,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_reader_that_leaves_and_a_full_output(tmp_path):
    recipe = f"{sys.executable} -m recipes.mnist"
    for line in ("RECIPE --help | head -1; exit ${PIPESTATUS[0]}", "RECIPE --help > /dev/full"):
        ended = subprocess.run(
            ["bash", "-c", line.replace("RECIPE", recipe)],
            cwd=tmp_path,
            env=os.environ | processes.ENVIRONMENT,
            capture_output=True,
            timeout=300,
        )
        assert b"Traceback" not in ended.stderr and b"Exception ignored" not in ended.stderr
        assert ended.returncode in (0, 1)
