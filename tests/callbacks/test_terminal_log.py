"""The lines of a run in the terminal."""

import logging

import pytest

from callbacks.terminal_log import RESULT, TerminalLog, format_epoch
from callbacks.throughput import Throughput

RECORD = {
    "event": "epoch",
    "step": 8,
    "epoch": 3,
    "loss": 1.26,
    "cross_entropy": 1.25,
    "perplexity": 3.49,
    "val_loss": 1.74,
    "val_cross_entropy": 1.75,
    "val_perplexity": 1234.5,
    "learning_rate": 0.00125,
    "tokens_per_second": 99.0,
}


@pytest.mark.parametrize(
    "changes, lines",
    [
        ({}, ["cross_entropy 1.2500 | 1.7500  perplexity 3.4900 | 1,234.50  lr 0.00125"]),
        (
            {"val_other": 12.345},
            ["cross_entropy 1.2500 | 1.7500  perplexity 3.4900 | 1,234.50", "other - | 12.35  lr"],
        ),
        (
            {"accuracy": 0.25, "val_accuracy": 0.5, "epoch": 12},
            [
                "cross_entropy 1.2500 | 1.7500  perplexity 3.4900 | 1,234.50",
                "accuracy 0.2500 | 0.5000  lr 0.00125",
            ],
        ),
    ],
)
def test_an_epoch(changes, lines):
    record = RECORD | changes
    found = format_epoch(record)
    assert len(found) == len(lines) and all(len(line) <= 80 for line in found)
    begin = f"epoch {record['epoch']}  "
    for line, start, expected in zip(found, (begin, " " * len(begin)), lines, strict=False):
        assert line.startswith(start + expected), line


class Speed(Throughput):
    """Half a second a step."""

    def seconds_for(self, steps):
        return steps / 2

    def total(self):
        return {"examples_per_second": 64.0, "tokens_per_second": 1234.4}


@pytest.fixture
def terminal():
    made = TerminalLog(Speed())
    made.count_steps(4, 8)
    return made


def test_a_line_of_each_record(terminal, caplog):
    caplog.set_level(logging.INFO, "recipes")
    step = {"event": "step", "step": 4, "loss": 2.5, "learning_rate": 0.001}
    terminal.on_train_begin()
    terminal.on_record(step | Speed().total())
    terminal.on_record({"event": "epoch", "step": 4, "epoch": 1, "accuracy": 0.5})
    terminal.on_record({"event": "epoch", "step": 8, "epoch": 2, "accuracy": 0.75})
    terminal.on_record({"event": "evaluation", "split": "test", "step": 4, "accuracy": 0.25})
    terminal.total_steps = 1000
    terminal.on_record(step)
    assert [record.getMessage() for record in caplog.records] == [
        "after each epoch: training | validation",
        "step 4/8  loss 2.5000  learning rate 0.001  1,234 tokens/s  2 s left",
        "epoch 1  accuracy 0.5000",
        "epoch 2  accuracy 0.7500",
        "step 4  test  accuracy 0.2500",
        "step 4/1000  loss 2.5000  learning rate 0.001  8.3 min left",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    terminal.on_train_end()  # an evaluation after it is a result
    terminal.on_record({"event": "evaluation", "split": "test", "step": 8, "accuracy": 0.25})
    assert caplog.records.pop().levelno == RESULT
