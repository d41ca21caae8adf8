"""Pretrained BERTs and trained ones: which is taken, its tokenizer, loading and saving."""

import os
import shutil
import socket
from pathlib import Path

import keras
import keras_nlp

from data import masked_lm, word_pieces
from data.errors import DataError

TINY = "bert_tiny_en_uncased"
MAX_LENGTH = 512  # positions of the BERT models, and of ours from scratch


def choose(options, english_wikitext: bool, known: str | None) -> tuple[str | None, str | None]:
    """Which preset is taken.

    Args:
        options: with `preset`, `vocabulary` and `init_from`.
        english_wikitext: whether the text is what the tiny preset was trained for.
        known: what an earlier part of this run took.

    Returns:
        The preset, or None for a model from scratch; and a line that says what is used instead of
        the first choice, and why, or None.
    """
    if known is not None:
        return (None if known == "scratch" else known), None
    if options.preset == "scratch":
        return None, None
    if options.preset != "auto":
        return options.preset, None
    if not english_wikitext or options.vocabulary is not None or options.init_from is not None:
        return None, None
    fault = _unreachable(TINY)
    if fault is None:
        return TINY, None
    return None, f"preset {TINY}: {fault}; the same architecture from scratch is used instead"


def _unreachable(name: str) -> str | None:
    """Why a preset of Kaggle cannot be had, or None; a look takes at most 10 seconds."""
    root = Path(os.environ.get("KAGGLEHUB_CACHE", "~/.cache/kagglehub")).expanduser()
    if list(root.glob(f"models/keras/bert/keras/{name}/*/config.json")):
        return None
    try:
        socket.create_connection(("www.kaggle.com", 443), timeout=5).close()
        keras_nlp.models.BertTokenizer.from_preset(name)
    except Exception as fault:  # kagglehub raises whatever its HTTP client raises
        return f"cannot be loaded ({_first_line(fault)})"
    return None


def make_tokenizer(options, preset: str | None, text, cache_dir: Path):
    """The preset's tokenizer with its own settings, or one with a learned or given vocabulary.

    Raises:
        DataError: the preset or the vocabulary cannot be loaded.
    """
    if preset is not None:
        return _load(keras_nlp.models.BertTokenizer, preset)
    source = options.init_from if options.init_from and options.vocabulary is None else None
    if source is not None and (source / "model").is_dir():
        return _load(keras_nlp.models.BertTokenizer, str(source / "model"))
    if options.vocabulary is not None:
        pieces = word_pieces.read_vocabulary(options.vocabulary)
    else:
        pieces = word_pieces.vocabulary_once(text, options.vocabulary_size, cache_dir)
    return keras_nlp.models.BertTokenizer(
        vocabulary=pieces, lowercase=True, strip_accents=True, special_tokens_in_strings=False
    )


def load_model(preset: str, dropout: float | None):
    """A `BertMaskedLM` of a preset, without its preprocessor, under the current dtype policy."""
    changes = {} if dropout is None else {"dropout": dropout}
    backbone = _load(
        keras_nlp.models.BertBackbone, preset, dtype=keras.config.dtype_policy(), **changes
    )
    model = keras_nlp.models.BertMaskedLM(backbone=backbone, compile=False)
    if (Path(preset) / "task.weights.h5").exists():
        model.load_task_weights(Path(preset) / "task.weights.h5")
    return model


def _load(kind, preset: str, **changes):
    try:
        return kind.from_preset(preset, **changes)
    except Exception as fault:  # kagglehub raises whatever its HTTP client raises
        raise DataError(f"--preset {preset}: cannot be loaded ({_first_line(fault)})") from fault


def load_weights(model, source: Path) -> None:
    """Loads the weights of a run, of a checkpoint, or of a weights file.

    Raises:
        DataError: nothing is there, or the weights are of another model.
    """
    candidates = [source / "model" / "task.weights.h5", source / "model.weights.h5", source]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise DataError(
            f"--init-from {source}: neither a run's folder with model/ nor a weights file"
        )
    try:
        if found.name == "task.weights.h5":
            model.load_task_weights(found)  # the head alone
            model.backbone.load_weights(found.with_name("model.weights.h5"))
        else:
            model.load_weights(found)
    except (ValueError, OSError, KeyError) as fault:
        raise DataError(f"--init-from {found}: {_first_line(fault)}") from fault


def save(model, tokenizer, masking: masked_lm.Masking, length: int, folder: Path) -> None:
    """Saves a preset that `keras_nlp.models.BertMaskedLM.from_preset(folder)` loads.

    The folder is written aside and renamed.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.preprocessor = keras_nlp.models.BertMaskedLMPreprocessor(
        tokenizer,
        sequence_length=length,
        mask_selection_rate=masking.probability,
        mask_selection_length=masking.slots,
    )
    # Keras would put the optimizer's state, twice the size of the weights, beside the head.
    optimizer, model.optimizer = model.optimizer, None
    try:
        model.save_to_preset(str(temporary))
    finally:
        model.preprocessor, model.optimizer = None, optimizer
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def _first_line(fault: Exception) -> str:
    text = str(fault).strip() or type(fault).__name__
    return text.splitlines()[0][:200]
