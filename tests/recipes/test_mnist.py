import dataclasses
import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from data.images import GARMENTS
from recipes import mnist
from tests.support.strategy_run import write_images
from training.loaded_run import load_run

TINY = dict(
    strategy="none",
    max_examples=64,
    epochs=2,
    global_batch_size=16,
    dropout=0.0,
    base_learning_rate=0.003,
    log_every=1,
    quiet=True,
)

# A process that knows nothing of this package: it runs in another folder, without our path.
LOAD = """
import os, sys
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
ours = {"recipes", "models", "training", "callbacks", "distribution", "data"} & set(sys.modules)
assert not ours, ours
"""


def predicted_elsewhere(model_path, inputs, folder):
    np.save(folder / "inputs.npy", inputs)
    arguments = [model_path, folder / "inputs.npy", folder / "outputs.npy"]
    subprocess.run([sys.executable, "-c", LOAD, *map(str, arguments)], check=True, cwd="/")
    return np.load(folder / "outputs.npy")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist") / "run"
    options = dict(dataset=str(images), validate_every=1, test_every=3, checkpoint_every=3)
    loaded = dataclasses.replace(mnist.load_images(str(images)), classes=GARMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "load_images", lambda dataset, held_out, test_file: loaded)
        return folder, mnist.main(mnist.Options(**(TINY | options | dict(run_dir=folder))))


def test_results(run, images):
    folder, results = run
    assert results["recipe"] == "mnist" and results["dataset"] == str(images)
    assert results["steps"] == 8 and results["epochs"] == 2
    assert set(results["test"]) == {"cross_entropy", "accuracy"}
    on_disk = json.loads((folder / "results.json").read_text())
    assert on_disk["test"] == results["test"]
    # Of the adjusted share of the 37 images.
    share = (results["test"]["accuracy"] * 37 + 2) / 41
    assert on_disk["test_standard_error"] == pytest.approx((share * (1 - share) / 41) ** 0.5)
    log = (folder / "worker-0.log").read_text()
    assert f"± {on_disk['test_standard_error']:.4f} (37 examples)" in log


@pytest.mark.long
def test_the_saved_model_needs_nothing_of_ours(run, images, tmp_path):
    folder, results = run
    pixels, labels = mnist.load_images(str(images)).splits["test"]
    logits = predicted_elsewhere(folder / "model" / "model.keras", pixels, tmp_path)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    # The padded last batch counts for what it holds: the plain mean over 37 images.
    assert results["test"]["cross_entropy"] == pytest.approx(float(loss), rel=1e-5)
    assert results["test"]["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == labels))


def test_the_names_of_the_classes_are_the_datasets(run, tmp_path):
    """They go into the model's folder, from which `predict` reads them."""
    finished = load_run(run[0])
    assert tuple(finished.metadata["classes"]) == GARMENTS
    keras.utils.save_img(tmp_path / "picture.png", np.zeros((28, 28, 1)), scale=False)
    (answers,) = mnist.predict(finished, [str(tmp_path / "picture.png")])
    assert {answer["class"] for answer in answers} < set(GARMENTS)


def test_classes_that_training_lacks_are_noted(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mnist.arrays, "training_data", None)  # ends the run after its notes
    options = TINY | dict(dataset=str(images), run_dir=tmp_path / "run")
    with pytest.raises(TypeError):
        mnist.main(mnist.Options(**options))
    assert "no training images are of" not in capsys.readouterr().out
    cut = dict(max_examples=4, global_batch_size=4, run_dir=tmp_path / "cut")
    with pytest.raises(TypeError):
        mnist.main(mnist.Options(**options | cut))
    assert "no training images are of" in capsys.readouterr().out


def test_pictures_are_of_the_validation_split(images, tmp_path, monkeypatch):
    class Shown(Exception):
        pass

    def summaries(board, *arrays):
        raise Shown(*arrays)

    monkeypatch.setattr(mnist, "ImageSummaries", summaries)
    with pytest.raises(Shown) as shown:
        mnist.main(mnist.Options(**TINY, dataset=str(images), run_dir=tmp_path / "run"))
    found, labels, _ = shown.value.args
    valid_images, valid_labels = mnist.load_images(str(images)).splits["valid"]
    assert np.array_equal(found, valid_images) and np.array_equal(labels, valid_labels)


@pytest.mark.long
def test_l2_is_in_the_loss_once(images, tmp_path):
    options = TINY | dict(dataset=str(images), l2=0.5, epochs=1, run_dir=tmp_path / "run")
    results = mnist.main(mnist.Options(**options))
    history = results["history"]
    model = keras.saving.load_model(tmp_path / "run" / "model" / "model.keras")
    penalty = history["val_loss"][0] - history["val_cross_entropy"][0]
    # The 10 validation images are one batch, so the loss tracker's mean over batches is exact.
    assert penalty == pytest.approx(float(sum(model.losses)), rel=1e-4)
    dense = next(layer for layer in model.layers if getattr(layer, "units", None) == 64)
    squares = float(np.sum(np.square(keras.ops.convert_to_numpy(dense.kernel))))
    assert penalty == pytest.approx(0.5 * squares, rel=1e-4)
    assert results["test"]["cross_entropy"] < 5 < penalty, "what is reported is without it"
