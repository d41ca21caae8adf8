import math

import keras
import pytest

from callbacks.records import Records, perplexity
from callbacks.throughput import Throughput


@pytest.fixture
def records(listener, fake_model):
    fake_model.optimizer = keras.optimizers.SGD(0.5)

    def make(**arguments):
        made = Records([listener], Throughput(examples_per_step=8), **arguments)
        made.count_steps(steps_per_epoch=3, total_steps=5)
        made.set_model(fake_model)
        return made

    return make


def steps(records, epoch, losses):
    """An epoch's steps of these losses, as Keras shows them: as a running mean."""
    records.on_epoch_begin(epoch)
    for batch in range(len(losses)):
        mean = sum(losses[: batch + 1]) / (batch + 1)
        records.on_train_batch_end(batch, {"loss": mean})


def test_a_record_every_so_many_steps_and_of_the_last_one(records, listener):
    made = records(log_every=2)
    steps(made, 0, [6.0, 2.0, 1.0])
    steps(made, 1, [3.0, 7.0])
    assert [(r["event"], r["step"], r["epoch"]) for r in listener.records] == [
        ("step", 2, 1),
        ("step", 4, 2),
        ("step", 5, 2),
    ]
    # Of the steps since the last record; a new epoch begins anew.
    assert [r["loss"] for r in listener.records] == pytest.approx([4.0, 3.0, 7.0])
    assert {r["learning_rate"] for r in listener.records} == {0.5}


def test_epochs_go_into_the_history(records, listener):
    made = records(perplexity_of="cross_entropy")
    for epoch, value in enumerate((2.0, 1.0)):
        steps(made, epoch, [1.0])
        made.on_epoch_end(epoch, {"loss": 9.0, "cross_entropy": value, "val_cross_entropy": 0.0})
    assert made.history == {
        "loss": [9.0, 9.0],
        "cross_entropy": [2.0, 1.0],
        "val_cross_entropy": [0.0, 0.0],
        "perplexity": pytest.approx([math.exp(2), math.e]),
        "val_perplexity": [1.0, 1.0],
    }
    assert [(r["event"], r["step"], r["epoch"]) for r in listener.records] == [
        ("epoch", 1, 1),
        ("epoch", 4, 2),
    ]


def test_evaluations(records, listener):
    made = records()
    made.record_evaluation("test", 7, {"loss": 0.5})
    assert listener.records == [
        {"event": "evaluation", "step": 7, "epoch": 1, "split": "test", "loss": 0.5}
    ]


def test_its_state_is_all_that_it_needs(records, listener):
    """Stopped after the first of two steps, the second one's record is the same."""
    whole = records(log_every=2)
    steps(whole, 0, [6.0, 2.0, 1.0])
    whole.on_epoch_end(0, {"loss": 3.0})
    expected = listener.records[:]
    listener.records.clear()
    first = records(log_every=2)
    steps(first, 0, [6.0, 2.0])
    second = records(log_every=2)
    second.set_state(first.get_state())
    second.step = 2
    second.on_train_batch_end(2, {"loss": 3.0})
    second.on_epoch_end(0, {"loss": 3.0})
    assert listener.records == expected and second.history == whole.history
    third = records()
    third.set_state(whole.get_state())
    assert third.history == {"loss": [3.0]}


def test_perplexity():
    assert perplexity(0.0) == 1.0 and perplexity(math.log(5)) == pytest.approx(5)
    assert perplexity(1e6) == math.inf
