"""Reports on a finished run: compares it with the baselines, and writes the model card."""

import json
import re
import string
import sys
from pathlib import Path

import keras
import numpy as np

from callbacks.metric_direction import direction
from data import files
from data.baselines import standard_error
from data.errors import DataError
from data.prompts import of_input
from data.splits import TITLES
from data.templates import CHATS, form_of, last_text
from training.options import HeldOutOptions, SharedOptions, to_json

BASELINES = {
    "copied": "the copied prompt",
    "unigram": "the unigram model",
    "kneser_ney": "Kneser-Ney n-grams",
    "most_frequent": "the most frequent class",
    "tfidf": "TF-IDF with logistic regression",
    "ridge": "TF-IDF with ridge regression",
    "linear": "the linear fit",
    "mean": "the mean of training",
    "formula": "the formula",
    "nearest_neighbour": "the fit on nearest neighbours",
    "": "the baseline",
}
OF_SEVERAL_LABELS = BASELINES | {"most_frequent": "the labels' most frequent values"}
# The verdict marks smaller gains, which may be chance.
MARGIN = 0.01  # absolute for accuracies, relative for losses

CARD = string.Template("""\
# $recipe: $title

Trained by the recipe `$recipe`: $steps steps of $batch examples$best.

## Data

`$dataset`$held_out. Look up its licence before you pass the model on.

$notes

## Model

`$model`, $parameters parameters.$origin

## Inputs and outputs

$usage

## Test

| on the test split | this model | baseline |
|---|---|---|
$metrics

## Options

$options

## Limits

It was tested only on the test split of its own data.

## How to load it

In this folder, with $versions:

```python
import keras
import keras_nlp  # registers its layers and models

model = $load
model.summary()$call
```
$words""")

WORDS = string.Template("""
KerasNLP alone does not split a text into words before it merges byte pairs, as this training did:
runs of spaces, line breaks and long numbers become other tokens. With the package of the recipe on
Python's path the tokens are the same:

```python
import keras_nlp

from models import presets

model = presets.load($task, ".")
```
""")

MOST_CLASSES = 20  # that a card lists


FEW_STEPS = 100  # a run of fewer has hardly learned, whatever its data and model


def verdict(
    test: dict[str, float],
    baseline: dict[str, float],
    history: dict[str, list[float]],
    steps: int | None = None,
    test_examples: int | None = None,
    epochs: dict[str, list[int]] | None = None,
) -> list[str]:
    """Compares the metrics of the test split with the baselines.

    Args:
        test: metrics by name.
        baseline: numbers by name; a name that ends in that of a test metric is compared with it
            (`unigram_cross_entropy` with `cross_entropy`).
        history: one list per metric, one number per epoch that has it; validation metrics begin
            with `val_`.
        steps: of the run, or None.
        test_examples: examples that an `accuracy` is a share of, or None. A gain in accuracy, or in
            another metric whose larger values are better, is then narrow if it is less than two
            standard errors of the accuracy.
        epochs: the epochs of the numbers of `history`, counted from 1; None for all of them.

    Returns:
        Lines: the baselines that are beaten, beaten narrowly, or not beaten; then a suggestion.
    """
    titles = OF_SEVERAL_LABELS if "micro_f1" in test else BASELINES
    of_shares, of_shares_text = MARGIN, f"{MARGIN:.2f}"
    if test_examples is not None and "accuracy" in test:
        error = standard_error(test["accuracy"], test_examples)
        if 2 * error > MARGIN:
            of_shares = 2 * error
            of_shares_text = f"two standard errors of the accuracy ({2 * error:.3f})"
    beaten: list[str] = []
    others: list[str] = []
    narrowly: dict[str, list[str]] = {}
    for name, number in baseline.items():
        metric = next((m for m in sorted(test, key=len, reverse=True) if name.endswith(m)), "")
        better = direction(metric)
        if better is None:
            continue
        gain = test[metric] - number if better == "max" else number - test[metric]
        margin = of_shares if better == "max" else MARGIN * abs(number)
        key = name.removesuffix(metric).strip("_")
        title = titles.get(key, key.replace("_", " "))
        comparison = f"{title} in {metric}"
        if gain > margin:
            beaten.append(comparison)
        elif gain > 0:
            few = of_shares_text if better == "max" else f"{MARGIN:.0%}"
            narrowly.setdefault(few, []).append(comparison)
        else:
            others.append(comparison)
    lines = ["beats " + ", ".join(beaten)] if beaten else []
    lines += [
        f"beats {', '.join(names)}, but by less than {few}" for few, names in narrowly.items()
    ]
    if others:
        lines.append("does not beat " + ", ".join(others))
    if (others or narrowly) and steps != 0:  # of a model as it was
        losses = history.get("val_loss", [])
        if losses and losses[-1] > min(losses) * 1.02 and not _still_improves(history):
            validated = (epochs or {}).get("val_loss", range(1, len(losses) + 1))
            best = f"after epoch {validated[losses.index(min(losses))]} of {validated[-1]}"
            lines.append(f"try more data or more --dropout: val_loss was best {best}")
        elif steps is not None and steps < FEW_STEPS:
            lines.append(f"{steps:,} steps are few: try a smaller batch or more --epochs")
        else:
            lines.append("try more data, more --epochs, or a larger model")
    return lines


def error_of_accuracy(test: dict[str, float], examples: int | None) -> dict[str, float]:
    """Returns the standard error of the test's accuracy, by its name in the results.

    Args:
        test: metrics by name.
        examples: that the `accuracy` is a share of, or None.

    Returns:
        `test_standard_error`; nothing without an accuracy or their number.
    """
    if examples is None or "accuracy" not in test:
        return {}
    return {"test_standard_error": standard_error(test["accuracy"], examples)}


def _still_improves(history: dict[str, list[float]]) -> bool:
    """Tells whether a validation metric besides the loss was best after the last epoch.

    A loss may rise while the metric that counts improves: of unbalanced classes whose weights the
    training's loss alone has, for instance, or of labels that are predicted ever more confidently.
    """
    for name, values in history.items():
        better = direction(name.removeprefix("val_"))
        if not name.startswith("val_") or name == "val_loss" or better is None or len(values) < 2:
            continue
        best = max if better == "max" else min
        if values[-1] == best(values) != best(values[:-1]):
            return True
    return False


def _origin(preset: str | None) -> str:
    """Names the preset that a model was trained from; of a folder only its name: no path."""
    if preset in (None, "scratch"):
        return ""
    name, path = preset, Path(preset)
    if "/" in preset and "://" not in preset:
        name = path.parent.name if path.name == "model" else path.name  # of a run
    return f" Fine-tuned from `{name}`, whose licence applies too."


def _without_paths(note: str, options: SharedOptions) -> str:
    """Returns a note with the last part alone of each path of the options, and of absolute ones."""
    values = [value for value in to_json(options).values() if isinstance(value, str)]
    paths = [value for value in values if "/" in value and "://" not in value]
    for path in sorted({*paths, *map(str, map(files.expand, paths))}, key=len, reverse=True):
        name = Path(path).name.replace("\\", r"\\")
        note = re.sub(rf"(?<![\w~/.-]){re.escape(path)}(?![\w/])", name, note)
    return re.sub(r"(?<![\w:/.])~?/(?:[\w.+@~-]+/)*(?=[\w.+@~-])", "", note)


def _usage(
    model: keras.Model, options: SharedOptions, metadata: dict, preprocessor, example: str
) -> tuple[str, list[str]]:
    """Returns a text on a model's inputs and outputs, and lines of Python that answer an input."""
    texts: list[str] = []
    lines: list[str] = []
    if preprocessor is not None:
        texts, lines = _of_task(model, options, metadata, preprocessor, example)
    texts = [options.INPUTS_AND_OUTPUTS] if options.INPUTS_AND_OUTPUTS else texts
    classes = metadata.get("classes", ())  # of a recipe of another author perhaps something else
    if isinstance(classes, list | tuple | np.ndarray) and np.ndim(classes) == 1 and len(classes):
        named = ", ".join(f"{n} `{name}`" for n, name in enumerate(classes[:MOST_CLASSES]))
        more = f", ...; all {len(classes):,} are in `recipe.json`"
        is_all = len(classes) <= MOST_CLASSES
        texts.append(f"The outputs are those of the classes {named}{'' if is_all else more}.")
    return "\n\n".join(texts) or "Those that `model.summary()` shows.", lines


def _of_task(
    model: keras.Model, options: SharedOptions, metadata: dict, preprocessor, example: str
) -> tuple[list[str], list[str]]:
    """Returns what `_usage` does, of a task of KerasNLP that has its preprocessor."""
    from keras_nlp import models  # after the start of the training, for which it may not be needed

    if isinstance(model, models.TextClassifier):
        inputs = "Texts in"
        call = f"model.predict([{_quoted(example)}])"
        if metadata.get("pairs"):
            inputs = "Pairs of texts in, as a tuple of the first and the second ones"
            call = 'model.predict((["the first text"], ["the second text"]))'
        outputs = f"numbers of shape (batch, {model.num_classes})"
        if metadata.get("scores"):
            outputs = "scores of shape (batch, 1), in the unit of the labels,"
        elif model.activation is keras.activations.linear:
            outputs = (
                f"logits of shape (batch, {model.num_classes}), whose softmax are probabilities,"
            )
            if metadata.get("several"):
                outputs = outputs.replace("softmax are", "sigmoid are the labels'")
        return [f"{inputs}; {outputs} out."], [f"outputs = {call}", "print(outputs)"]
    if isinstance(model, models.MaskedLM):
        return [
            "Tokens and masked positions in; logits of the tokens at these positions, of shape "
            "(batch, positions, vocabulary), out. `model.preprocessor` masks tokens at random."
        ], []
    if not isinstance(model, models.CausalLM):
        return [], []
    texts = ["A text in, its continuation out."]
    if isinstance(model, models.Seq2SeqLM):
        texts = ["A text in, another one out."]
        prefix = getattr(options, "prefix", None)
        if isinstance(prefix, str) and prefix:
            example = prefix + example
            texts.append(f"Each input begins with {_quoted(prefix)}.")
    template = metadata.get("template")
    if isinstance(template, str):
        chat = CHATS.get(template)
        form = form_of(chat, None) if chat is not None else template
        texts = [f"Trained on prompts and responses in this form: {_quoted(form)}."]
        example = form.partition("{response}")[0].replace("{prompt}", _as_prompt(example))
        if chat is not None:
            texts.append(f"Each of {', '.join(f'`{name}`' for name in chat.markers)} is one token.")
            if any(len(preprocessor.tokenizer(name)) > 1 for name in chat.markers):
                texts.append("KerasNLP's tokenizer alone does not read them so in a text.")
                return texts, []
    return texts, [
        'model.compile(sampler="greedy")  # the likeliest token each time',
        f"text = model.generate({_quoted(example)})",
        "print(text)",
    ]


def _as_prompt(example: str) -> str:
    """Returns an input of `predict()` as a prompt: of a chat in JSON what its last turn says."""
    try:
        return last_text(of_input(example))
    except DataError:  # a text that only looks like one
        return example


def _quoted(text: str) -> str:
    """Returns a text as Python writes it, between double quotes."""
    return json.dumps(text, ensure_ascii=False)


def model_card(
    model: keras.Model,
    results: dict,
    options: SharedOptions,
    described: dict,
    metadata: dict,
    preprocessor=None,
    example_input: str | None = None,
) -> str:
    """Returns the model card in Markdown; its Python runs in the model's folder.

    Args:
        model: the trained model.
        results: the content of `results.json`.
        options: the recipe's options.
        described: the options that describe the training, and resolved values, by name.
        metadata: values that the model's inputs and outputs need.
        preprocessor: of KerasNLP, where the folder is a preset; otherwise None.
        example_input: an input of the recipe's `predict()`; None for the one of its options.
    """
    kind, best = type(options), results["weights_of_step"]
    held_out = options.held_out if isinstance(options, HeldOutOptions) else {}
    rows = [f"| {name} | {value:.4f} | |" for name, value in results["test"].items()]
    rows += [f"| {name} | | {value:.4f} |" for name, value in results["baseline"].items()]
    load, words = 'keras.saving.load_model("model.keras")', ""
    if preprocessor is not None:
        task = f"keras_nlp.models.{type(model).__name__}"
        load = f'{task}.from_preset(".")'
        if getattr(getattr(preprocessor, "tokenizer", None), files.SPLITS_WORDS, False):
            words = WORDS.substitute(task=task)
    example = example_input or options.EXAMPLE_INPUT or "..."
    usage, call = _usage(model, options, metadata, preprocessor, example)
    return CARD.substitute(
        recipe=results["recipe"],
        title=(sys.modules[kind.__module__].__doc__ or kind.__name__).strip().splitlines()[0],
        steps=f"{results['steps']:,}",
        best=f"; its weights are those of step {best:,}" if best != results["steps"] else "",
        batch=results["global_batch_size"] * options.accumulate_steps,
        dataset=Path(results["dataset"] or "not named").name,
        held_out="".join(f"; {TITLES[split]}: `{path.name}`" for split, path in held_out.items()),
        notes="\n\n".join(_without_paths(note, options) for note in results["notes"]),
        model=type(model).__name__,
        parameters=f"{model.count_params():,}",
        origin=_origin(results["preset"]),
        metrics="\n".join(rows),
        options="\n".join(
            f"- `{name}`: {value}"
            for name, value in described.items()
            if value is not None and "/" not in str(value)  # it is passed on: no path in it
        ),
        versions=", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        usage=usage,
        load=load,
        call="".join(f"\n{line}" for line in call),
        words=words,
    )
