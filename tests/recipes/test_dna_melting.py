import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from callbacks.checkpoint import newest
from data import oligos
from distribution.global_batch import GlobalMean
from recipes import dna_melting
from tests.recipes.test_mnist import predicted_elsewhere, records
from tests.support import processes
from tests.support.strategy_run import write_oligos

TINY = dict(
    strategy="none",
    num_layers=1,
    hidden_dim=8,
    max_examples=64,
    epochs=2,
    global_batch_size=16,
    base_learning_rate=0.01,
    warmup_steps=5,
    log_every=1,
    quiet=True,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("oligos") / "oligos.csv"
    write_oligos(path, 150)
    return path


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dna") / "run"
    options = dict(dataset=str(table), validate_every=1, test_every=3, checkpoint_every=3)
    results = dna_melting.main(dna_melting.Options(**(TINY | options | dict(run_dir=folder))))
    return folder, results


def errors(answers, tm):
    """Huber (delta 1) and root mean squared error, by hand."""
    miss = np.abs(answers[:, 0].astype(np.float64) - tm)
    return np.where(miss < 1, miss**2 / 2, miss - 0.5).mean(), np.sqrt((miss**2).mean())


def test_results(run, table):
    folder, results = run
    assert results["recipe"] == "dna_melting" and results["dataset"] == str(table)
    assert results["steps"] == 8 and results["learning_rate"] == 0.01
    assert set(results["test"]) == {"huber", "rmse"}
    assert {"linear_rmse", "mean_rmse"} <= set(results["baseline"])
    assert results["baseline"]["linear_rmse"] < results["baseline"]["mean_rmse"]
    assert json.loads((folder / "results.json").read_text())["test"] == results["test"]
    log = (folder / "worker-0.log").read_text()
    beaten = next(line for line in log.splitlines() if "to be beaten" in line)
    for name, value in results["baseline"].items():
        assert f"{name} {value:.4f}" in beaten


@pytest.mark.parametrize("hidden_dim", [1, 9])
def test_fewer_numbers_than_heads_and_no_multiple(hidden_dim):
    said = f"--hidden-dim {hidden_dim}: must be a multiple of --num-heads 2"
    assert dna_melting.Options(hidden_dim=hidden_dim).problems() == [said]
    together = dna_melting.Options(hidden_dim=hidden_dim, epochs=0).problems()
    assert said in together and len(together) == 2


@pytest.mark.long
def test_the_saved_model_answers_in_degrees(run, table, tmp_path):
    folder, results = run
    ids, tm = oligos.load_oligos(str(table), 0).splits["test"]
    assert len(tm) % 16  # so the last batch is padded
    path = folder / "model" / "model.keras"
    huber, rmse = errors(predicted_elsewhere(path, ids, tmp_path, "keras_nlp"), tm)
    assert results["test"]["huber"] == pytest.approx(huber, rel=1e-5)
    assert results["test"]["rmse"] == pytest.approx(rmse, rel=1e-5)


def test_evaluations_in_mid_epoch_equal_separate_ones(run, table):
    folder, _ = run
    found = {
        (record["split"], record["step"]): record
        for record in records(folder)
        if record["event"] == "evaluation"
    }
    saved = newest(folder / "checkpoints")
    splits = oligos.load_oligos(str(table), 0).splits
    train_tm = splits["train"][1][:64].astype(np.float64)
    model = dna_melting.build_model(
        dna_melting.Options(**TINY), float(train_tm.mean()), float(train_tm.std())
    )
    for step in (3, 6):
        model.load_weights(saved.folder.with_name(f"step-{step:08d}") / "model.weights.h5")
        for split, name in (("valid", "validation"), ("test", "test")):
            ids, tm = splits[split]
            huber, rmse = errors(keras.ops.convert_to_numpy(model(ids, training=False)), tm)
            assert found[name, step]["huber"] == pytest.approx(huber, rel=1e-5)
            assert found[name, step]["rmse"] == pytest.approx(rmse, rel=1e-5)


def test_evaluations_leave_the_epoch_alone(run, table, tmp_path):
    _, results = run
    options = TINY | dict(dataset=str(table), run_dir=tmp_path / "plain")
    plain = dna_melting.main(dna_melting.Options(**options))
    assert plain["history"] == results["history"]
    assert plain["weights_sha256"] == results["weights_sha256"]


def test_shape_trap():
    """(batch,) against (batch, 1) must not become (batch, batch), in loss and metrics."""
    tm = np.array([10.0, 20.0, 30.0, 40.0], np.float32)
    answers = tm[:, np.newaxis] + np.array([[0.5], [-0.5], [2.0], [0.0]], np.float32)
    weights = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    huber, rmse = errors(answers[:3], tm[:3])
    loss = GlobalMean(keras.losses.Huber(delta=1.0))
    for targets in (tm, tm[:, np.newaxis]):
        assert float(loss(targets, answers, weights)) == pytest.approx(huber, rel=1e-5)
        metric = keras.metrics.RootMeanSquaredError()
        metric.update_state(tm[:, np.newaxis], answers, weights)
        assert float(metric.result()) == pytest.approx(rmse, rel=1e-5)
    # What the trap would have given: hundreds of degrees squared.
    assert np.square(tm - answers).mean() > 100


def test_padding_is_masked():
    """What stands after an oligo's end does not change its answer.

    The convolution sees one place more; what is there follows from the oligo's length.
    """
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0, 15.0)
    ids = np.random.default_rng(0).integers(1, 5, (3, 60)).astype(np.int32)
    ids[:, 20:] = 0
    before = keras.ops.convert_to_numpy(model(ids, training=False))
    embedding = next(layer for layer in model.layers if "embedding" in layer.name)
    positions = embedding.position_embedding.position_embeddings
    value = keras.ops.convert_to_numpy(positions).copy()
    value[21:] += 1.0
    positions.assign(value)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(model(ids, training=False)), before, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sequence,melting\nACGTACGT,20\n", "no column tm"),
        ("sequence,tm\nACGTACGT,20\nACGTNCGT,20\n", "line 3: letter 'N'"),
        ("", "empty"),
        ("sequence,tm\nACGTACGT,warm\n", "line 2: tm is 'warm'"),
    ],
)
def test_a_bad_table_exits_with_2(content, words, tmp_path, command_line):
    (tmp_path / "t.csv").write_text(content)
    arguments = ("--dataset", tmp_path / "t.csv", "--run-dir", tmp_path / "run")
    status, _, err = command_line(dna_melting, *arguments)
    assert status == 2 and words in err and "Traceback" not in err


def test_equal_temperatures_are_refused(tmp_path, command_line):
    rows = [line.split(",")[0] + ",50" for line in _lines(tmp_path)[1:]]
    (tmp_path / "flat.csv").write_text("\n".join(["sequence,tm", *rows]))
    arguments = ("--dataset", tmp_path / "flat.csv", "--run-dir", tmp_path / "run")
    status, _, err = command_line(dna_melting, *arguments)
    assert status == 2 and "all training oligos melt at 50 degrees C" in err


def _lines(folder):
    write_oligos(folder / "o.csv", 150)
    return (folder / "o.csv").read_text().splitlines()


@pytest.mark.long
def test_bad_options_exit_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "recipes.dna_melting", "--hidden-dim", "9", "--warmup-steps", "-1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--hidden-dim 9: must be a multiple of --num-heads 2" in done.stderr
    assert "--warmup-steps -1: must be 0 or more" in done.stderr


@pytest.mark.long
def test_accumulated_batches_are_one_batch_of_all_their_examples(table, tmp_path):
    """Also for the embedding, in which a batch looks up each row many times."""
    exact = TINY | dict(dataset=str(table), precision="float64", dropout=0.0, lr_scaling="none")
    # The key's bias has a true gradient of zero: Adam, whose epsilon is small here, makes steps of
    # its rounding. At this rate they stay below the tolerance.
    exact |= dict(base_learning_rate=0.001)
    for name, batch, count in (("one", 16, 1), ("two", 8, 2)):
        changes = dict(global_batch_size=batch, accumulate_steps=count, run_dir=tmp_path / name)
        dna_melting.main(dna_melting.Options(**(exact | changes)))
    processes.assert_equal_tensors(tmp_path / "one", tmp_path / "two")
