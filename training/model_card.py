"""The card of a trained model: what it is, from which data, how good, how to load it."""

import json
from pathlib import Path

import keras

from training.options import SharedOptions, shown

LOADING = "## How to load it"  # the last section; an export puts its own in its place

TITLES = {
    "bert_mlm": "A BERT that fills in masked words",
    "text_classification": "A BERT that sorts sentences into classes",
    "mnist": "A small network that classifies images of 28x28 pixels",
    "dna_melting": "Melting temperatures of DNA oligos",
}
LICENCES = {
    "wikitext": "text of Wikipedia, CC BY-SA 3.0",
    "installed-docs": "docstrings of TensorFlow, Keras and KerasHub (Apache-2.0) and NumPy "
    "(BSD-3-Clause)",
    "mnist": "Yann LeCun and Corinna Cortes, CC BY-SA 3.0",
    "fashion_mnist": "Zalando, MIT",
    "digits": "Optical Recognition of Handwritten Digits, UCI, CC BY 4.0",
    "nearest-neighbour": "drawn at random and labelled by a formula: nobody's",
}
UNKNOWN_LICENCE = "licence not known to the recipe: look it up before you hand the model on"
LIMITS = {
    "bert_mlm": (
        "It knows what its text says and how it says it, errors and prejudices included. Fills "
        "are likely words, not facts. Texts longer than {length} tokens are beyond it."
    ),
    "text_classification": (
        "It always names one of its classes, also for a sentence of another kind, and its "
        "probabilities were not calibrated. Of a sentence it reads the first {length} tokens."
    ),
    "mnist": (
        "It always names one of ten classes, also for an image of something else. Images are to "
        "be centred and scaled as those of its data, light on dark."
    ),
    "dna_melting": (
        "For oligos of 8 to 60 bases A, C, G, T, under the conditions of its data (drawn ones: "
        "each strand at 25 nM, 50 mM sodium). It has learned a formula's or a table's numbers, "
        "and measured nothing."
    ),
}
OF_ANY = "It was tested on the test split of its own data and on nothing else."

SNIPPETS = {
    "bert_mlm": """\
import keras_nlp
import numpy as np

model = keras_nlp.models.BertMaskedLM.from_preset(".")
tokenizer = keras_nlp.models.BertTokenizer.from_preset(".", special_tokens_in_strings=True)
ids = [tokenizer.cls_token_id, *tokenizer("the [MASK] of the year"), tokenizer.sep_token_id]
token_ids = np.array([ids], "int32")
logits = model(
    {
        "token_ids": token_ids,
        "segment_ids": np.zeros_like(token_ids),
        "padding_mask": np.ones_like(token_ids),
        "mask_positions": np.array([[ids.index(tokenizer.mask_token_id)]], "int32"),
    },
    training=False,
)
best = np.argsort(-np.array(logits)[0, 0])[:5]
print([tokenizer.id_to_token(number) for number in best])""",
    "text_classification": """\
import keras
import keras_nlp

classes = {classes}
model = keras_nlp.models.BertTextClassifier.from_preset(".")
logits = model.predict(["a small miracle of a film"])
print(classes, keras.ops.convert_to_numpy(keras.ops.softmax(logits)))""",
    "mnist": """\
import keras
import numpy as np

model = keras.saving.load_model("model.keras")
images = np.zeros((1, 28, 28, 1), "float32")  # pixels in [0, 1], light on dark
print(model.predict(images).argmax(axis=1))""",
    "dna_melting": """\
import keras
import keras_nlp  # its layers are in the model
import numpy as np

model = keras.saving.load_model("model.keras")
token_ids = np.zeros((1, 60), "int32")  # A, C, G, T are 1 to 4, and 0 fills up to 60
sequence = "GATTACAGATTACA"
token_ids[0, : len(sequence)] = [1 + "ACGT".index(base) for base in sequence]
print(model.predict(token_ids), "degrees C")""",
}


def model_card(model: keras.Model, results: dict, options: SharedOptions) -> str:
    """The card, in Markdown; Python in it runs in the folder that the card lies in.

    Args:
        model: the trained model.
        results: what `results.json` will hold.
        options: the recipe's options.
    """
    recipe = results["recipe"]
    backbone = getattr(model, "backbone", None)
    length = getattr(options, "sequence_length", None)
    limits = LIMITS.get(recipe, "").format(length=length)
    parts = [
        f"# {TITLES.get(recipe, f'A model of {recipe}')}",
        f"Trained by the recipe `{recipe}`, {results['steps']:,} steps of "
        f"{results['global_batch_size']} examples, {_origin(results, options)}.",
        f"## Data\n\n{_data(results)}",
        f"## Model\n\n{_sizes(model, backbone, length)}",
        f"## Test\n\n{_test(results)}",
        f"## Options\n\n{_options(options)}",
        f"## Limits\n\n{' '.join(filter(None, [limits, OF_ANY]))}",
        f"{LOADING}\n\nIn this folder, with the versions "
        f"{', '.join(f'{name} {version}' for name, version in results['versions'].items())}:"
        f"\n\n```python\n{_snippet(recipe, results, backbone, model)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _origin(results: dict, options: SharedOptions) -> str:
    # Names, not paths: a card is handed on.
    start = getattr(options, "init_from", None)
    if start is not None:
        return f"starting from the weights of `{Path(start).name}`"
    preset = results.get("preset")
    if preset in (None, "scratch"):
        return "from scratch"
    return f"starting from the preset `{Path(preset).name}`, which has a card and a licence itself"


def _data(results: dict) -> str:
    name = results["dataset"]
    if name is None:
        return f"Not named; {UNKNOWN_LICENCE}."
    key = next((k for k in ("wikitext",) if name.startswith(k)), name)
    licence = LICENCES.get(key, UNKNOWN_LICENCE)
    lines = [f"`{name if key in LICENCES else Path(name).name}`: {licence}.", *results["notes"]]
    return "\n\n".join(lines)


def _sizes(model: keras.Model, backbone, length: int | None) -> str:
    lines = [f"`{type(model).__name__}`, {model.count_params():,} parameters"]
    if backbone is not None:
        lines += [
            f"{backbone.num_layers} Transformer layers of width {backbone.hidden_dim} with "
            f"{backbone.num_heads} heads",
            f"{backbone.vocabulary_size:,} word pieces, trained on {length} tokens at a time",
            "tanh GELU and layer norms with an epsilon of 1e-12 in the encoder, as KerasHub has it",
        ]
    return "\n".join(f"- {line}" for line in lines)


def _test(results: dict) -> str:
    rows = ["| on the test split | this model | to be beaten |", "|---|---|---|"]
    rows += [f"| {name} | {value:.4f} | |" for name, value in results["test"].items()]
    rows += [f"| {name} | | {value:.4f} |" for name, value in results["baseline"].items()]
    return "\n".join(rows)


def _options(options: SharedOptions) -> str:
    """The options that decide the numbers and are not the defaults."""
    default = shown(type(options)())
    given = [
        f"- `{name}`: {Path(value).name if isinstance(getattr(options, name), Path) else value}"
        for name, value in shown(options).items()
        if name != "dataset" and value != default.get(name)
    ]
    return "\n".join([f"Seed {options.seed}; the recipe's defaults, but for:", "", *given])


def _snippet(recipe: str, results: dict, backbone, model: keras.Model) -> str:
    if recipe in SNIPPETS:
        classes = json.dumps(results.get("classes"), ensure_ascii=False)
        return SNIPPETS[recipe].replace("{classes}", classes)
    if backbone is not None:
        kind = type(model).__name__
        return f'import keras_nlp\n\nmodel = keras_nlp.models.{kind}.from_preset(".")'
    return 'import keras\n\nmodel = keras.saving.load_model("model.keras")'
