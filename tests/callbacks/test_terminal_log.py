import logging

import pytest

from callbacks.terminal_log import TerminalLog, numbers_in_words, time_left


class Speed:
    def seconds_for(self, steps):
        return 3.0 * steps

    def total(self):
        return {"examples_per_second": 1234.5}


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
    caplog.set_level("INFO", logger="recipes")
    return caplog


def test_a_line_a_record(said):
    callback = TerminalLog(Speed()).count_steps(5, 10)
    step = {"event": "step", "step": 4, "epoch": 1, "loss": 0.5, "learning_rate": 0.001}
    callback.on_record(step | {"examples_per_second": 20.0, "tokens_per_second": 20480.0})
    callback.on_record({"event": "epoch", "step": 5, "epoch": 1, "loss": 0.5, "val_loss": 0.25})
    callback.on_record(
        {"event": "evaluation", "step": 5, "epoch": 1, "split": "test", "accuracy": 0.75}
    )
    assert said.messages == [
        "step 4/10  loss 0.5000  learning rate 0.001  20,480 tokens/s  18 s left",
        "epoch 1  loss 0.5000  validation:  loss 0.2500",
        "step 5  test  accuracy 0.7500",
    ]
    # Where a bar tells it already, a handler may leave out the line.
    assert [getattr(r, "shown_by_bar", False) for r in said.records] == [True, False, False]


def test_a_loss_that_is_the_cross_entropy_stands_once():
    numbers = {"loss": 1.0, "cross_entropy": 1.00001, "val_loss": 1.5, "val_cross_entropy": 1.0}
    assert numbers_in_words(numbers) == (
        "cross_entropy 1.0000  validation:  loss 1.5000  cross_entropy 1.0000"
    )


def test_time_left():
    assert [time_left(s) for s in (0.4, 119, 150)] == ["0 s", "119 s", "2.5 min"]


def test_a_bar_where_somebody_looks(capsys):
    callback = TerminalLog(Speed(), progress_bar=True).count_steps(5, 10)
    callback.step = 5  # resumed
    callback.on_train_begin()
    callback.on_epoch_begin(1)
    for batch in range(5):
        callback.on_train_batch_end(batch, {"loss": 0.25})
    callback._bar.refresh()
    shown = capsys.readouterr().out
    assert "epoch 2" in shown and "10/10" in shown and "loss 0.2500 examples/s 1,234" in shown
    callback.on_train_end()
    callback.close()  # again does no harm
