"""The live line of a terminal, read from what is written to it."""

import io
import logging
import re
import sys
import types

import pytest
from tqdm import tqdm

from callbacks.progress import EvaluationProgress, Progress
from data import byte_pairs, live_line, next_tokens
from data.text import load_text
from models import decoders
from tests.callbacks.test_terminal_log import Speed
from training.log import run_logging

log = logging.getLogger("recipes")


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        """Returns the lines that the terminal has shown."""
        return [line.strip() for line in self.getvalue().replace("\r", "\n").splitlines()]


@pytest.fixture
def terminal(monkeypatch):
    """To be called in the test: between fixtures and tests pytest takes the outputs."""
    monkeypatch.setattr("callbacks.progress.used_learning_rate", lambda optimizer: 0.00125)
    monkeypatch.setattr("callbacks.progress.REDRAW_SECONDS", 0.0)

    def open_terminal():
        made = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, made)
        return made

    return open_terminal


def train(model):
    """Three steps, with an evaluation after the second one."""
    callback = Progress(Speed(), types.SimpleNamespace(loss_now=2.5)).count_steps(3, 3)
    callback.set_model(model)
    callback.on_train_begin()
    for batch in range(3):
        callback.on_train_batch_end(batch, {"loss": 2.5})
        if batch == 1:
            log.info("a line of the log")
            callback.on_test_begin()
            for number in range(2):
                callback.on_test_batch_end(number)
            callback.on_test_end()
    callback.on_train_end()


def test_it_tells_what_the_run_is_doing(terminal, fake_model):
    terminal = terminal()
    with run_logging(quiet=False):
        train(fake_model)
    seen = terminal.lines()
    assert seen[1].startswith("step 1/3  compiling the first step")
    numbers = "loss 2.5000  lr 0.00125  1,234 tokens/s"
    places = [
        *("step 1/3  " + numbers, "step 2/3  " + numbers, "a line of the log"),
        *("step 2/3  evaluating", "step 2/3  evaluating, batch 1"),
        *("step 2/3  evaluating, batch 2", "step 3/3  " + numbers),
    ]
    found = [next(i for i, line in enumerate(seen) if place in line) for place in places]
    assert found == sorted(found)
    assert seen[found[2]] == "a line of the log", "nothing of the live line is left beside it"
    assert all(len(line) < 80 for line in seen)
    assert terminal.getvalue().endswith("\r"), "the line is removed"


def test_an_evaluation_outside_of_training(terminal, fake_model, monkeypatch):
    terminal = terminal()
    stock, at_once = live_line.live_line, {"delay": 0, "mininterval": 0}
    monkeypatch.setattr("callbacks.progress.live_line", lambda **more: stock(**more, **at_once))
    callback = EvaluationProgress()
    for number in range(3):
        callback.on_test_batch_end(number)
    callback.on_test_end()
    assert any("evaluating: 3 batches" in line for line in terminal.lines())


@pytest.mark.parametrize("where", ["a pipe", "one of two", "--quiet"])
def test_elsewhere_there_is_no_live_line(terminal, fake_model, monkeypatch, where):
    terminal = terminal()
    if where != "--quiet":
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    if where == "a pipe":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    with run_logging(quiet=where == "--quiet"):
        train(fake_model)
        list(live_line.live_line(range(3), "counting", delay=0))
    written = sys.stdout.getvalue() + sys.stderr.getvalue()
    assert written.replace("a line of the log\n", "") == ""


def test_learning_a_vocabulary_and_tokenising_show_a_line(
    terminal, tiny_text, tmp_path, monkeypatch
):
    def at_once(*words, **named):
        return tqdm(*words, **named | {"delay": 0})

    monkeypatch.setattr(live_line, "tqdm", at_once)
    terminal, text = terminal(), load_text(str(tiny_text), tmp_path)
    tasks = {
        "learning the vocabulary": lambda: byte_pairs.merges_once(text, 300, tmp_path),
        "tokenising train": lambda: next_tokens.rows_once(
            text, tokenizer, tmp_path, length=16, together=True
        ),
    }
    tokenizer = None
    for name, task in tasks.items():
        merges = task()
        tokenizer = tokenizer or decoders.make_preprocessor("gpt2", merges, 16).tokenizer
        assert any(line.startswith(name) for line in terminal.lines()), name
    assert terminal.getvalue().endswith("\r"), "the lines are removed"


def test_elsewhere_what_takes_long_writes_a_line_a_minute(monkeypatch, caplog):
    caplog.set_level("INFO", "recipes")
    seconds = iter(range(10**6))
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(seconds)))  # a second each look
    for total in (None, 400):
        with live_line.live_line(what="tokenising train", total=total) as bar:
            for _ in range(400):
                bar.update()
    counted = [
        line for line in caplog.messages if re.fullmatch("tokenising train: [0-9]+, .*", line)
    ]
    shares = [line for line in caplog.messages if re.fullmatch("tokenising train: [0-9]+%.*", line)]
    assert len(counted) + len(shares) == len(caplog.messages)
    assert 2 <= len(counted) <= 7 and 2 <= len(shares) <= 7
    caplog.clear()
    assert list(live_line.live_line(range(3), "short")) == [0, 1, 2] and not caplog.messages
    with live_line.quiet(True):
        assert len(list(live_line.live_line(range(400), "hidden"))) == 400
    assert not caplog.messages


def test_elsewhere_what_waits_writes_its_minutes(monkeypatch, caplog):
    caplog.set_level("INFO", "recipes")
    monkeypatch.setattr(live_line, "LOG_SECONDS", 0.01)
    with live_line.Waiting("learning") as waiting:
        while len(caplog.messages) < 3:
            waiting._ended.wait(0.01)
    assert set(caplog.messages) == {"learning, 00:00"}


def test_what_takes_long_counts_its_seconds(terminal, monkeypatch):
    terminal = terminal()
    monkeypatch.setattr(live_line, "TICK_SECONDS", 0.01)
    with live_line.Waiting("learning") as waiting:
        before = terminal.getvalue().count("learning")
        while terminal.getvalue().count("learning") < before + 3:
            waiting._ended.wait(0.01)
    ended = terminal.getvalue()
    assert "learning, 00:00" in ended and ended.endswith("\r")


def test_a_line_that_was_never_removed_moves_no_other_one(terminal):
    """A task that failed may keep its line alive, in a notebook for instance."""
    forgotten = live_line.live_line(what="forgotten", delay=0)
    hidden = live_line._LogLines(what="hidden")
    terminal = terminal()
    with live_line.live_line(what="next", delay=0):
        pass
    assert terminal.lines()[1] == "next: 0it [00:00, ?it/s]"
    assert terminal.getvalue().endswith("\r") and "\n" not in terminal.getvalue()
    forgotten.close(), hidden.close()
