import importlib
from types import SimpleNamespace

import keras
import keras_nlp
import numpy as np
import pytest

from tests.support import strategy_run

PRECISION = {"bert": "float32", "text": "float32", "mnist": "float64", "dna": "mixed_bfloat16"}
CLASSES = ["good", "poor", "fair"]
# Of different lengths, so that padding counts, and with no, one and two masks.
TEXTS = [
    "the loss of a [MASK] is the mean over all replicas and batches",
    "a [MASK] the [MASK] of tokens",
    "no mask",
    "? ! ( ) ; the [MASK]",
]


class Runs(dict):
    """Folders of finished runs by name, each trained for three steps when it is first asked for."""

    def __init__(self, root):
        super().__init__()
        self.root = root
        strategy_run.write_data(root)

    def __missing__(self, name):
        every = strategy_run.RUNS | strategy_run.FINE_TUNED | strategy_run.FAMILIES
        module, options = every["bert_packed" if name == "bert" else name]
        recipe = importlib.import_module(f"recipes.{module}")
        more = dict(run_dir=self.root / name, cache_dir=self.root / "cache")
        more |= dict(precision=PRECISION.get(name, "float32"), max_steps=3, epochs=1)
        more |= strategy_run.data_options(module, self.root)
        if module == "causal_lm":
            more |= dict(sequence_length=32)  # so that the usual input leaves room for tokens
        if "preset" in options and options["preset"] != "scratch":
            strategy_run.write_preset(options["preset"], self.root)
            more |= dict(preset=str(self.root / "presets" / options["preset"]))
        if "warmup_steps" in options:  # may be more than three
            more |= dict(warmup_steps=None)
        recipe.main(recipe.Options(**(options | more)))
        return self.setdefault(name, self.root / name)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A finished run of each recipe; not to be changed."""
    return Runs(tmp_path_factory.mktemp("runs"))


def spread(model):
    """Makes weights as large as training does: a new BERT answers to all inputs alike.

    Not those of queries and keys: a token would attend to one position, never to padding.
    """
    for weight in model.weights:
        if weight.path.endswith("kernel") and not weight.path.endswith(
            ("query/kernel", "key/kernel")
        ):
            weight.assign(10 * weight)
    return model


@pytest.fixture(scope="session")
def masked_lm(tiny_run):
    """Loads a BertMaskedLM and its preset, a new one each time: an exporter may change it."""

    def load():
        preset = str(tiny_run.folder / "model")
        model = keras_nlp.models.BertMaskedLM.from_preset(preset, dtype="float32", compile=False)
        return SimpleNamespace(model=spread(model), preset=preset, classes=[])

    return load


@pytest.fixture(scope="session")
def classifier(tiny_run):
    """Makes a BertTextClassifier of three classes on the tiny run's encoder."""

    def load():
        preset = str(tiny_run.folder / "model")
        keras.utils.set_random_seed(7)
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(preset)
        model = keras_nlp.models.BertTextClassifier(
            keras_nlp.models.BertBackbone.from_preset(preset, dtype="float32"),
            len(CLASSES),
            keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=16),
            dropout=0.2,
        )
        return SimpleNamespace(model=spread(model), preset=preset, classes=CLASSES)

    return load


def inputs_of(model, length=12):
    """Three examples of different lengths."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, model.backbone.vocabulary_size, (3, length)).astype(np.int32)
    inputs = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": (np.arange(length) < np.array([[12], [5], [8]])).astype(np.int32),
    }
    if isinstance(model, keras_nlp.models.BertMaskedLM):
        inputs["mask_positions"] = np.array([[1, 2], [3, 4], [5, 7]], np.int32)
    return inputs
