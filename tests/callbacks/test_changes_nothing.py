"""Logging and pictures do not change the training."""

import pytest
import tensorflow as tf

from callbacks import records
from callbacks.predictions import Predictions
from callbacks.tensorboard import TensorBoard
from tests.support.processes import events

SHOWN = {"filled_masks/sentence_1", "optimizer/gradient_norm"}


def tags(folder) -> set[str]:
    return {tag for tag, _, _ in events(folder)}


@pytest.mark.long
def test_weights_are_identical_without_norms_samples_and_charts(
    monkeypatch, tiny_run, run_bert, tmp_path
):
    """The tiny run has dropout: a random number that is drawn for a sample would be seen."""
    assert tiny_run.options.dropout > 0 and SHOWN <= tags(tiny_run.folder)
    for kind, name in (
        (Predictions, "on_epoch_end"),
        (TensorBoard, "on_record"),
        (records, "gradient_norm"),
    ):
        monkeypatch.setattr(kind, name, lambda *_, **__: None)
    monkeypatch.setattr(tf.linalg, "global_norm", lambda _: tf.zeros(()))
    run = run_bert(tmp_path / "run")
    assert not SHOWN & tags(run.folder)
    assert run.results["weights_sha256"] == tiny_run.results["weights_sha256"]
