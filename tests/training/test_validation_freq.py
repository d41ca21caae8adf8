"""Tests `fit(validation_freq=...)`: values of the validation stay with their epochs."""

import pytest

from callbacks import checkpoint
from tests.support import processes, tiny_recipe

PER_EPOCH = tiny_recipe.STEPS_PER_EPOCH


def train(folder, freq=2, extra=(), **options):
    def fit(model, data, fit_options):
        model.fit(data, **fit_options, validation_freq=freq)

    options = tiny_recipe.Options(run_dir=folder, **options)
    return tiny_recipe.main(options, extra=list(extra), fit=fit)


def epochs_with_validation(folder):
    return [r["epoch"] for r in processes.records(folder, "epoch") if "val_loss" in r]


def charted(folder, tag):
    """The steps of a curve in TensorBoard."""
    return sorted(step for name, step, _ in processes.events(folder) if name == tag)


@pytest.mark.parametrize("freq, validated", [(2, [2, 4]), ([1, 4], [1, 4])], ids=["int", "list"])
def test_each_value_keeps_its_epoch(tmp_path, freq, validated):
    results = train(tmp_path / "run", freq, epochs=5)
    assert {name: len(values) for name, values in results["history"].items()} == {
        **dict.fromkeys(["accuracy", "cross_entropy", "loss"], 5),
        **dict.fromkeys(["val_accuracy", "val_cross_entropy", "val_loss"], 2),
    }
    assert epochs_with_validation(tmp_path / "run") == validated
    steps = [PER_EPOCH * epoch for epoch in validated]
    assert charted(tmp_path / "run", "accuracy/validation") == steps
    state = checkpoint.newest(tmp_path / "run" / "checkpoints").state["callbacks"]["records"]
    assert state["epochs"]["val_loss"] == validated and state["epochs"]["loss"] == [1, 2, 3, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize("step", [PER_EPOCH, 2 * PER_EPOCH + 3])
def test_it_resumes_with_the_same_epochs(tmp_path, step):
    options = dict(epochs=5, keep_best="val_loss", keep_best_mode="max", checkpoint_every=3)
    whole = train(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", extra=[tiny_recipe.StopAfter(step)], **options)
    resumed = train(tmp_path / "run", **options)
    assert resumed["resumed_from_step"] == step
    for name in ("weights_sha256", "history"):
        assert resumed[name] == whole[name]
    states = [checkpoint.newest(tmp_path / name / "checkpoints").state for name in ("whole", "run")]
    epochs = [state["callbacks"]["records"]["epochs"] for state in states]
    assert epochs[0] == epochs[1] and states[0]["best_epoch"] == states[1]["best_epoch"] == 2
    assert epochs_with_validation(tmp_path / "run") == [2, 4]


@pytest.mark.long
def test_early_stopping_waits_for_epochs_with_validation(tmp_path, capsys):
    """As `keras.callbacks.EarlyStopping` does; a val_loss that should grow is best at first."""
    options = dict(keep_best="val_loss", keep_best_mode="max", early_stopping=2, epochs=9)
    results = train(tmp_path / "run", **options)
    assert (results["steps"], results["weights_of_step"]) == (6 * PER_EPOCH, 2 * PER_EPOCH)
    assert "weights        of epoch 2, the best of 6 (val_loss " in capsys.readouterr().out


@pytest.mark.long
def test_an_earlier_better_epoch_is_named_by_its_number(tmp_path):
    """Where `--keep-best` is added after the best epoch; the run is extended within an epoch."""
    train(tmp_path / "run", epochs=4, max_steps=3 * PER_EPOCH + 2)
    options = dict(epochs=6, resume="extend", keep_best="val_loss", keep_best_mode="max")
    results = train(tmp_path / "run", **options)
    state = checkpoint.newest(tmp_path / "run" / "checkpoints").state
    assert state["callbacks"]["records"]["epochs"]["val_loss"] == [2, 4, 6]
    assert [len(results["history"][name]) for name in ("loss", "val_loss")] == [6, 3]
    (note,) = results["notes"]
    assert note.startswith("epoch 2 had a better val_loss") and "those of epoch 4" in note
