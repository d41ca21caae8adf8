"""What is taken elsewhere: a finished run's model in float32, and real inputs to compare on."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_nlp
import numpy as np

from data import files, images, oligos, sentence_inputs, sentences, text
from data.errors import DataError
from models import bert
from models.bert import MASK, encode

EXAMPLES = 16  # real inputs on which an export is compared with the Keras model

# Where a run's own data are not at hand any more.
SENTENCES = (
    "The old bridge was built in 1887, and nobody remembers who paid for it.",
    "Returns the mean of the values along an axis; an empty array gives NaN.",
    "She didn't like the film: its first half hour is dull, its end is silly.",
    "After the storm (the worst in years) the harbour stayed closed for 12 days.",
    "A small miracle of a book, funny and sad at once.",
    "The company said on Monday that sales fell by 3.5 % in the third quarter.",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model with inputs that it was made for, and what it says to them.

    Attributes:
        recipe: "bert_mlm", "text_classification", "mnist" or "dna_melting".
        model: the model in float32.
        inputs: what the model takes, by name; arrays whose first dimension counts the examples.
        outputs: what the model gives, float32: logits of shape (n, masks, word pieces) for
            "bert_mlm", of shape (n, classes) for "text_classification" and "mnist", and degrees C
            of shape (n, 1) for "dna_melting".
        sources: the examples as a person has them: texts, oligos, or None for images.
        sources_of: where the examples come from, in words.
        tokenizer: of a BERT, with special tokens in strings; or None.
        classes: names of the classes, or None where the run wrote none down.
        longest: tokens that the model takes at most, or None where there are none.
    """

    recipe: str
    model: keras.Model
    inputs: dict[str, np.ndarray]
    outputs: np.ndarray
    sources: list[str] | None
    sources_of: str
    tokenizer: Any = None
    classes: list[str] | None = None
    longest: int | None = None

    @property
    def is_bert(self) -> bool:
        """Whether it is a BERT, whose input is token ids."""
        return self.tokenizer is not None

    def call(self, inputs: dict):
        """The model's outputs without dropout, for inputs by name."""
        return self.model(inputs if self.is_bert else next(iter(inputs.values())), training=False)


def load(folder: Path, run: dict, results: dict) -> Trained:
    """Loads a finished run's model, and examples of its test split.

    Args:
        folder: the run's folder.
        run: what its `options.json` holds.
        results: what its `results.json` holds.

    Raises:
        DataError: the recipe is none of those above, or the model cannot be loaded.
    """
    loaders: dict[str, Callable] = {
        "bert_mlm": _masked_lm,
        "text_classification": _classifier,
        "mnist": _images,
        "dna_melting": _oligos,
    }
    recipe = run["recipe"]
    if recipe not in loaders:
        raise DataError(
            f"{folder}: a run of {recipe}; what can be exported are runs of {', '.join(loaders)}, "
            "anything else by model.export() of Keras"
        )
    facts = {"seed": run["options"].get("seed", 0)} | run["resolved"]
    given = run["options"].get("cache_dir")
    cache_dir = files.expand(given, "--cache-dir") if given else files.default_cache_dir()
    made = loaders[recipe](folder / "model", facts, cache_dir, results)
    outputs = keras.ops.convert_to_numpy(made.call(made.inputs))
    return dataclasses.replace(made, outputs=outputs.astype(np.float32))


def _masked_lm(folder: Path, facts: dict, cache_dir: Path, results: dict) -> Trained:
    kind = keras_nlp.models.BertMaskedLM
    model = bert.load(kind, str(folder), dtype="float32", compile=False)
    tokenizer = _tokenizer(folder)
    longest = min(model.preprocessor.sequence_length, model.backbone.max_sequence_length)
    lines, whose = _lines(facts, cache_dir, lambda: _test_lines(facts, cache_dir))
    masked = [masked_line for line in lines for masked_line in _mask(line, tokenizer, longest)]
    rows = [encode(tokenizer, line) for line in masked]
    length = max(map(len, rows))
    token_ids = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    padding_mask = np.stack([np.arange(length) < len(row) for row in rows]).astype(np.int32)
    token_ids[padding_mask == 0] = tokenizer.pad_token_id
    places = [np.flatnonzero(row == tokenizer.mask_token_id)[:1] for row in rows]
    inputs = {
        "token_ids": token_ids.astype(np.int32),
        "segment_ids": np.zeros_like(token_ids, dtype=np.int32),
        "padding_mask": padding_mask,
        "mask_positions": np.stack(places).astype(np.int32),
    }
    return Trained(
        *("bert_mlm", model, inputs, np.zeros(0), masked, whose),
        tokenizer=tokenizer,
        longest=longest,
    )


def _classifier(folder: Path, facts: dict, cache_dir: Path, results: dict) -> Trained:
    kind = keras_nlp.models.BertTextClassifier
    model = bert.load(kind, str(folder), dtype="float32", compile=False)

    def own():
        data = sentences.load_sentences(facts["dataset"], cache_dir, facts["seed"])
        return data.splits["test"][0]

    lines, whose = _lines(facts, cache_dir, own)
    return Trained(
        *("text_classification", model, sentence_inputs.encode(lines, model.preprocessor)),
        *(np.zeros(0), lines, whose),
        tokenizer=model.preprocessor.tokenizer,
        classes=[str(name) for name in results["classes"]],
        longest=model.preprocessor.sequence_length,
    )


def _images(folder: Path, facts: dict, cache_dir: Path, results: dict) -> Trained:
    name = facts["dataset"]
    try:  # nothing is downloaded for it
        found = images.load_images("digits" if "mnist" == name[-5:] else name, cache_dir)
    except DataError:
        found = images.load_images("digits", cache_dir)
    pixels = found.splits["test"][0][:EXAMPLES]
    model = _in_float32(folder)
    whose = f"test images of {Path(found.name).name}"
    return Trained("mnist", model, {"images": pixels}, np.zeros(0), None, whose)


def _oligos(folder: Path, facts: dict, cache_dir: Path, results: dict) -> Trained:
    try:
        found = oligos.load_oligos(facts["dataset"], facts["seed"], 1)
    except DataError:
        found = oligos.load_oligos(oligos.NEAREST_NEIGHBOUR, facts["seed"], 1)
    ids = found.splits["test"][0][:EXAMPLES]
    letters = ["".join(oligos.BASES[i - 1] for i in row[row > 0]) for row in ids]
    whose = f"test oligos of {Path(found.name).name}"
    return Trained(
        *("dna_melting", _in_float32(folder), {"token_ids": ids}, np.zeros(0), letters, whose),
        longest=oligos.LONGEST,
    )


def _tokenizer(folder: Path):
    """The run's tokenizer, which takes [MASK] and [UNK] in strings for what they are."""
    kind = keras_nlp.models.BertTokenizer
    options = dict(special_tokens_in_strings=True, special_tokens=["[UNK]"])
    return bert.load(kind, str(folder), **options)


def _in_float32(folder: Path) -> keras.Model:
    """A `model.keras`, whatever the precision of its training."""
    model = keras.saving.load_model(folder / "model.keras", compile=False)
    config = json.dumps(model.get_config())  # each layer has a policy of its own
    for name in ("float64", "mixed_float16", "mixed_bfloat16"):
        config = config.replace(f'"{name}"', '"float32"')
    copy = type(model).from_config(json.loads(config))
    copy.set_weights(model.get_weights())
    return copy


def _lines(facts: dict, cache_dir: Path, own: Callable) -> tuple[list[str], str]:
    """Sentences of the run's test split, or ours; nothing is downloaded for it."""
    name = facts["dataset"]
    try:
        if name in text.WIKITEXT and not (cache_dir / f"{name}.zip").is_file():
            raise DataError(f"{name} is not in the cache")
        lines = [line for line in own() if len(line.split()) > 3]
    except DataError:
        lines = []
    if not lines:
        return list(SENTENCES), "sentences of the exporter's own, the run's data are not at hand"
    lines = lines[:: max(1, len(lines) // EXAMPLES)][:EXAMPLES]
    return lines, f"test sentences of {Path(name).name}"


def _test_lines(facts: dict, cache_dir: Path) -> Sequence[str]:
    return text.load_text(facts["dataset"], cache_dir).splits["test"]


def _mask(line: str, tokenizer, longest: int) -> list[str]:
    """A line that fits, with a word in its middle masked; none if no word of it fits."""
    words = line.split()[: longest // 2]
    while words:
        place = len(words) // 2
        masked = " ".join([*words[:place], MASK, *words[place + 1 :]])
        if len(encode(tokenizer, masked)) <= longest:
            return [masked]
        words = words[: len(words) * 3 // 4]
    return []
