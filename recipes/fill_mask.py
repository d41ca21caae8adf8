"""Fill in the [MASK]s of a text with a trained masked language model.

    python -m recipes.fill_mask RUN_DIR "the loss is [MASK] over the global batch"
    python -m recipes.fill_mask path/to/a/preset "first [MASK] text" "second [MASK] text" --top 3

RUN_DIR is the folder of a finished run of `recipes.bert_mlm`; the folder of a BERT preset with a
masked language model's head does as well. Prints, for each [MASK], the likeliest fills with their
probabilities, each as the text with the fill in its place. Special tokens are no fills: the
probabilities are those over all other word pieces.
"""

import dataclasses
import re
from pathlib import Path

import keras_nlp
import numpy as np

from data import checksums
from data.paths import kind_of
from models import bert
from models.bert import MASK, encode, fill_masks
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.options import COUNT, ProgramOptions, check, option
from training.run_folder import open_finished, read_run_file


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.fill_mask`."""

    run_dir: Path = option(help="Folder of a finished run, or of a preset.", positional=True)
    texts: tuple[str, ...] = option((), "Texts, each with one [MASK] or more.", positional=True)
    top: int = option(5, "Fills that are printed for each [MASK].", within=COUNT)

    def problems(self) -> list[str]:
        """Returns a line for each missing input."""
        found = []
        if not self.texts:
            found.append(f"no text: give one or more with {MASK}, each in quotation marks")
        found += [f"no {MASK} in {text[:60]!r}" for text in self.texts if MASK not in text]
        return found


def main(options: Options) -> list[dict]:
    """Prints the fills and returns them.

    Returns:
        For each text a dict with `text` and `masks`: for each [MASK] a list of dicts with `piece`,
        `probability` and `text`, the likeliest first.
    """
    check(options)
    folder = preset_folder(options.run_dir)
    # The precision of the training is of no use here.
    model = bert.load(keras_nlp.models.BertMaskedLM, str(folder), dtype="float32", compile=False)
    tokenizer = bert.load(
        keras_nlp.models.BertTokenizer, str(folder), special_tokens_in_strings=True
    )
    # After the length that the model was trained on its positions are noise.
    longest = min(model.preprocessor.sequence_length, model.backbone.max_sequence_length)
    token_ids = [encode(tokenizer, text) for text in options.texts]
    found = [
        f"{len(ids)} tokens with [CLS] and [SEP], the model takes {longest}: {text[:60]!r}"
        for text, ids in zip(options.texts, token_ids, strict=True)
        if len(ids) > longest
    ]
    if found:
        raise OptionsError("\n".join(found))

    filled = []
    for text, ids in zip(options.texts, token_ids, strict=True):
        probabilities = fill_masks(model, tokenizer, ids)
        masks = [
            best_fills(text, place, row, tokenizer, options.top)
            for place, row in enumerate(probabilities)
        ]
        filled.append({"text": text, "masks": masks})
        print(text)
        for place, fills in enumerate(masks):
            if len(masks) > 1:
                print(f"  {MASK} {place + 1} of {len(masks)}")
            for fill in fills:
                print(f"  {fill['probability']:6.1%}  {fill['text']}")
    return filled


def preset_folder(folder: Path) -> Path:
    """The preset of a run's folder, or the folder itself where it is a preset.

    Raises:
        RunError: there is none, or it has no masked language model's head.
    """
    if kind_of(folder, "--run-dir") != "folder":
        raise RunError(f"{folder}: no such folder; a finished run or a preset is expected")
    if kind_of(folder / "options.json", "--run-dir"):
        open_finished(folder, "bert_mlm")
        folder = folder / "model"
    missing = [n for n in ("task.json", "task.weights.h5") if not (folder / n).is_file()]
    if missing:
        raise RunError(
            f"{folder}: lacks {' and '.join(missing)}; a finished run of bert_mlm is expected, "
            "or a preset with a masked language model's head"
        )
    problem = checksums.problem(folder)
    if problem:
        raise RunError(f"{folder}: damaged ({problem})")
    kind = read_run_file(folder / "task.json", class_name=str)["class_name"]
    if kind != "BertMaskedLM":
        raise RunError(f"{folder}: a preset of {kind}; one of BertMaskedLM is expected")
    return folder


def best_fills(text: str, place: int, probabilities: np.ndarray, tokenizer, top: int) -> list[dict]:
    """The likeliest pieces for one [MASK], and the text with each of them.

    Args:
        text: the text as it was given.
        place: which [MASK], from 0; the others stay.
        probabilities: of all pieces, shape (vocabulary size,).
        tokenizer: gives the pieces.
        top: how many fills; word pieces of probability zero are none.
    """
    mask = list(re.finditer(re.escape(MASK), text))[place]
    best = np.argsort(-probabilities, kind="stable")[:top]
    fills = []
    for number in best[probabilities[best] > 0]:
        piece = tokenizer.id_to_token(int(number))
        before, after = text[: mask.start()], text[mask.end() :]
        if piece.startswith("##"):  # belongs to the word before it
            before, piece_text = before.rstrip(), piece[2:]
        else:
            piece_text = piece
        fills.append(
            {
                "piece": piece,
                "probability": float(probabilities[number]),
                "text": before + piece_text + after,
            }
        )
    return fills


if __name__ == "__main__":
    command_line(Options, main)
