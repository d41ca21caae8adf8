"""Runs the Python of the pages on small runs: what a reader copies works."""

import contextlib
import re
import types

import keras
import numpy as np
import tensorflow as tf

from callbacks import tensorboard
from recipes import text_classification
from tests.support import tiny_recipe
from tests.support.processes import ROOT
from training.options import SharedOptions
from training.run import start_run


def block(page, word):
    """Returns the only block of Python on a page with this word in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (found,) = [code for code in blocks if word in code]
    return found


def test_a_runs_model_in_plain_kerasnlp(tiny_run, capsys):
    code = block("docs/your_own.md", "hidden.shape")
    assert "runs/bert_mlm/mine/model" in code
    exec(code.replace("runs/bert_mlm/mine", str(tiny_run.folder)), {})
    assert capsys.readouterr().out == f"(2, 64, {tiny_run.options.hidden_dim})\n"


def test_embeddings_of_sentences(tiny_run, tmp_path, monkeypatch):
    """Of a text they do not depend on the padding of the others."""
    monkeypatch.chdir(tmp_path)
    code = block("docs/your_own.md", "embeddings.npy")
    code = code.replace("runs/bert_mlm/mine", str(tiny_run.folder))
    found = []
    for lines in (["the loss of a step", "", "all tokens " * 30], ["the loss of a step"]):
        (tmp_path / "my_text.txt").write_text("\n".join(lines), encoding="utf-8")
        exec(code, {})
        found.append(np.load(tmp_path / "embeddings.npy"))
    assert found[0].shape == (2, tiny_run.options.hidden_dim)
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found[0], axis=1), 1, atol=1e-5)


def test_weights_of_a_checkpoint(tiny_run):
    code = block("docs/checkpoints.md", "load_weights")
    options, (folder, *_) = tiny_run.options, sorted((tiny_run.folder / "checkpoints").iterdir())
    code = code.replace("RUN_DIR/checkpoints/step-00000500", str(folder))
    vocabulary = (tiny_run.folder / "model/assets/tokenizer/vocabulary.txt").read_text()
    sizes = {
        "vocabulary_size": len(vocabulary.splitlines()),
        "num_layers": options.num_layers,
        "num_heads": options.num_heads,
        "hidden_dim": options.hidden_dim,
        "intermediate_dim": 4 * options.hidden_dim,
    }
    for name, size in sizes.items():
        code, count = re.subn(rf"\b{name}=\d+", f"{name}={size}", code)
        assert count == 1, name
    names = {}
    exec(code, names)
    weights = names["model"].get_weights()
    assert any(np.abs(weight).max() > 0 for weight in weights)
    exec(code.replace("model.load_weights", "#"), names)
    first = names["model"].get_weights()
    assert any((a != b).any() for a, b in zip(weights, first, strict=True))


def test_a_pipeline_that_reads_image_files(tmp_path):
    """A run accepts it; the batches are those of the files."""
    names: dict = {}
    exec(block("docs/your_own.md", "def pipelines"), names)
    draw, paths = np.random.default_rng(0), {"train": [], "valid": []}
    for number in range(30):
        path = tmp_path / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        keras.utils.save_img(path, draw.integers(0, 255, (9, 12, 3)) + number % 2, scale=False)
        paths["train" if number < 24 else "valid"].append(path)
    classes = ["cat", "dog"]

    def main(options):
        with start_run("photos", options) as run:
            plan = run.plan(examples=24, base_learning_rate=0.01)
            train, valid = names["pipelines"](paths, classes, options.seed, plan)
            with run.strategy.scope():
                pool, dense = keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(2)
                model = keras.Sequential([keras.Input((64, 64, 3)), pool, dense])
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.SGD(plan.learning_rate), loss)
            model.fit(train, **run.prepare(model, train, validation=valid, test=valid))
            images, labels, weights = next(iter(valid))
            assert weights.numpy().sum() == len(paths["valid"]) and labels.numpy()[1] == 1
            read = keras.utils.img_to_array(keras.utils.load_img(paths["valid"][1]))
            expected = tf.image.resize(read, (64, 64)) / 255
            np.testing.assert_allclose(images[1], expected, atol=1e-6)
            return run.finish(model, test={"loss": 0.0}, baseline={})

    results = main(SharedOptions(run_dir=tmp_path / "run", epochs=2, global_batch_size=8))
    assert results["steps"] == 6 and len(results["history"]["val_loss"]) == 2


def test_texts_with_labels(tmp_path):
    """A run that is evaluated on other texts keeps its own words and classes."""
    names: dict = {}
    exec(block("docs/your_own.md", "def read_texts"), names)
    for name, word in {"films": "good", "other": "superb"}.items():
        lines = [f"a {word} film {n},good\na bad film {n},bad" for n in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["body,category", *lines]))
    run = types.SimpleNamespace(
        dataset=str(tmp_path / "films.csv"),
        cache_dir=tmp_path / "cache",
        metadata={},
        trained=None,
        note=lambda line: None,
    )
    splits, metadata = names["read_texts"](run, "body", "category")
    ids, labels = splits["train"]
    assert ids.shape == (len(labels), 200) and metadata["classes"] == ("bad", "good")
    bad = metadata["words"].index("bad")
    np.testing.assert_array_equal(ids[:, 1] == bad, labels == 0)
    other = {"dataset": str(tmp_path / "other.csv"), "metadata": metadata, "trained": run}
    found, again = names["read_texts"](
        types.SimpleNamespace(**vars(run) | other), "body", "category"
    )
    assert again == metadata
    ids, labels = found["test"]
    np.testing.assert_array_equal(ids[:, 1] == bad, labels == 0)


def test_a_search_resumes(tmp_path, monkeypatch):
    """A second start has the options and the folders of the first, so finished runs return."""
    code = block("docs/runs.md", "rng.uniform").replace("runs/search", str(tmp_path))
    code = code.replace("range(20)", "range(3)")
    started = []

    def main(options):
        started.append(options)
        return {"history": {"val_accuracy": [0.9, options.base_learning_rate]}}

    monkeypatch.setattr(text_classification, "main", main)
    names: dict = {}
    for _ in range(2):
        exec(code, names)
    assert started[:3] == started[3:] and len({each.run_dir for each in started}) == 3
    best = max(started, key=lambda options: options.base_learning_rate)
    assert max(names["accuracies"], key=names["accuracies"].get) == best.run_dir


def test_a_callback_of_ones_own(tmp_path):
    names, steps = {}, []
    exec(block("docs/your_own.md", "class WeightNorm"), names)

    class Board(tensorboard.TensorBoard):
        @contextlib.contextmanager
        def writing(self, step):
            steps.append(step)
            yield

    made = names["WeightNorm"](Board(None))
    options = tiny_recipe.Options(run_dir=tmp_path / "run", epochs=2)
    tiny_recipe.main(options, extra=[made])
    assert steps == [tiny_recipe.STEPS_PER_EPOCH, 2 * tiny_recipe.STEPS_PER_EPOCH]
    other = names["WeightNorm"](Board(None))
    other.set_state(made.get_state())
    assert other.largest == made.largest > 0
