"""The run's log on a terminal, with --quiet, and in worker-0.log."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import warnings

import pytest

from callbacks.terminal_log import RESULT, SHOWN_BY_BAR
from tests.support.launched import ROOT
from training.harmless import kept_from_terminal
from training.log import RunLogging

log = logging.getLogger("recipes")
# Nobody who trains asked for these.
TENSORFLOW = re.compile(r"oneDNN|cuInit|absl|cuda|cpu_feature|INFO:|WARNING|[IWE]0000 ", re.I)


def write_a_line_of_each_kind():
    log.info("of a step", extra=SHOWN_BY_BAR)
    log.info("of an epoch")
    log.log(RESULT, "a result")
    log.warning("a warning")


@pytest.mark.parametrize(
    ("quiet", "shown"),
    [
        (False, ["of a step", "of an epoch", "a result", "a warning"]),
        (True, ["a result", "a warning"]),
    ],
)
def test_file_gets_all_and_the_terminal_what_is_asked_for(quiet, shown, tmp_path, capsys):
    run = RunLogging(quiet)
    run.to_file(tmp_path / "worker-0.log")
    write_a_line_of_each_kind()
    run.close()
    assert capsys.readouterr().out.splitlines() == shown
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        *("of a step", "of an epoch", "a result", "a warning")
    ]


def test_bar_takes_the_place_of_the_lines_of_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run = RunLogging(quiet=False)
    write_a_line_of_each_kind()
    run.close()
    assert capsys.readouterr().out.splitlines() == ["of an epoch", "a result", "a warning"]


def test_closed_log_is_as_it_was(tmp_path):
    tensorflow = logging.getLogger("tensorflow")

    def state():
        return (
            *(log.handlers[:], log.level, log.propagate, log.isEnabledFor(logging.INFO)),
            tensorflow.level,
        )

    tensorflow_level = tensorflow.level
    tensorflow.setLevel(logging.INFO)  # as in a notebook
    try:
        before = state()
        run = RunLogging(quiet=False)
        run.to_file(tmp_path / "worker-0.log")
        assert not tensorflow.isEnabledFor(logging.INFO)
        assert log.isEnabledFor(logging.INFO)
        run.close()
        assert state() == before
    finally:
        tensorflow.setLevel(tensorflow_level)


def environment():
    """A person's, not that of the tests."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "TF_CONFIG")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT)}


@pytest.mark.long
def test_command_prints_lines_and_none_of_them_is_tensorflows(tmp_path):
    options = f"--dataset digits --max-steps 2 --log-every 1 --run-dir {tmp_path / 'run'}"
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.mnist", *options.split()],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not TENSORFLOW.search(ended.stdout)
    assert "\r" not in ended.stdout
    assert re.search(r"^step 1/2  loss ", ended.stdout, re.M)
    assert re.search(r"^step 2/2  loss .*  0 s left$", ended.stdout, re.M)
    logged = (tmp_path / "run" / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in logged] == ended.stdout.splitlines()


@pytest.mark.long
def test_terminal_shows_a_bar_and_with_quiet_the_results_only(tmp_path):
    # Two runs of one process, on the two replicas whose sum TensorFlow likes to talk about.
    program = f"""
from recipes import mnist
shared = dict(dataset="digits", max_examples=640, max_steps=30, strategy="mirrored", replicas=2)
mnist.main(mnist.Options(run_dir={str(tmp_path / "a")!r}, **shared))
print("second run")
mnist.main(mnist.Options(run_dir={str(tmp_path / "b")!r}, quiet=True, **shared))
"""
    shown, returncode = on_a_terminal(program)
    assert returncode == 0, shown
    assert not TENSORFLOW.search(shown)
    loud, quiet = shown.replace("\r\n", "\n").split("second run\n")
    bar = r"\repoch \d: +\d+%\|.*\| \d+/30, loss [\d.]+ examples/s [\d,]+ left \d+ s"
    assert re.search(bar, loud)
    seen = [line.split("\r")[-1] for line in loud.split("\n")]
    assert any(line.startswith("epoch 1  accuracy ") for line in seen)
    assert not any(line.startswith("step 30/30") for line in seen)
    assert [line.split()[0] for line in quiet.splitlines()] == [
        *("step", "to", "verdict", "model", "logs", "results")
    ]
    assert "\nverdict        better than the most frequent class\n" in quiet
    assert quiet.startswith("step 30  test  ")
    assert "\r" not in quiet


def on_a_terminal(program: str) -> tuple[str, int]:
    """What a process shows on its terminal, and its exit status."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 120))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment(), stdout=its, stderr=its
        )
        os.close(its)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not more:
                break
            shown += more
    finally:
        os.close(ours)
    return shown.decode(), process.wait()


class TestWarnings:
    """Keras's and TensorFlow's: what means nothing is kept from the terminal, not from the file."""

    HARMLESS = "Skipping variable loading for optimizer 'adam', because it has 2 variables"

    @pytest.fixture(autouse=True)
    def terminal(self):
        """What TensorFlow's handler shows; pytest has taken the one that it made itself."""
        handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("tensorflow")
        logger.addHandler(handler)
        yield handler.stream
        logger.removeHandler(handler)

    def lines(self, folder):
        return [line.split(" ", 2)[2] for line in (folder / "worker-0.log").open()]

    def test_what_means_nothing_is_in_the_file_alone(self, tmp_path, capfd, terminal):
        run = RunLogging(quiet=False)
        run.to_file(tmp_path / "worker-0.log")
        tensorflow = logging.getLogger("tensorflow")
        warnings.warn(self.HARMLESS, UserWarning, stacklevel=1)
        tensorflow.warning("5 out of the last 5 calls to x triggered tf.function retracing. Y")
        run.close()
        shown = capfd.readouterr()
        assert shown.out == shown.err == terminal.getvalue() == ""
        first, second = self.lines(tmp_path)
        assert first.startswith(f"UserWarning: {self.HARMLESS} (") and "retracing" in second

    def test_what_means_something_is_in_both(self, tmp_path, terminal):
        run = RunLogging(quiet=True)
        run.to_file(tmp_path / "worker-0.log")
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", UserWarning, stacklevel=1)
        logging.getLogger("tensorflow").warning("a device is slow")
        run.close()
        assert terminal.getvalue() == "a device is slow\n"
        assert self.lines(tmp_path)[-1] == "a device is slow\n"

    def test_all_is_put_back(self, tmp_path):
        show, handlers = warnings.showwarning, list(logging.getLogger("tensorflow").handlers)
        run = RunLogging(quiet=True)
        run.to_file(tmp_path / "worker-0.log")
        assert warnings.showwarning is not show
        with kept_from_terminal():  # within: nothing more
            pass
        assert warnings.showwarning is not show
        run.close()
        assert warnings.showwarning is show
        assert logging.getLogger("tensorflow").handlers == handlers
        assert not any(handler.filters for handler in handlers)
