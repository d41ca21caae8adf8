"""Pretrained BERTs and trained ones: which is taken, its tokenizer, loading its weights."""

import os
import re
import socket
from pathlib import Path

import keras
import keras_nlp

from data import checksums, word_pieces
from data.errors import DataError
from data.paths import kind_of

TINY = "bert_tiny_en_uncased"
MAX_LENGTH = 512  # positions of the BERT models, and of ours from scratch


def problems_of_sizes(options) -> list[str]:
    """What is wrong with the sizes of a BERT from scratch, a line each.

    Args:
        options: with `num_layers`, `num_heads`, `hidden_dim`, `sequence_length` and `preset`.
    """
    found = []
    for name, most in (("num_layers", 1_000), ("num_heads", 1_000), ("hidden_dim", 100_000)):
        option, value = "--" + name.replace("_", "-"), getattr(options, name)
        if not 1 <= value <= most:
            found.append(f"{option}{_shown(value)}: must lie between 1 and {most:,}")
    if not found and options.hidden_dim % options.num_heads:
        found.append(
            f"--hidden-dim {options.hidden_dim}: must be a multiple of --num-heads "
            f"{options.num_heads}"
        )
    if options.sequence_length < 4:
        found.append(f"--sequence-length{_shown(options.sequence_length)}: must be 4 or more")
    if options.sequence_length > MAX_LENGTH and options.preset in ("scratch", "auto"):
        found.append(
            f"--sequence-length{_shown(options.sequence_length)}: the model takes at most "
            f"{MAX_LENGTH} tokens"
        )
    return found


def _shown(value: int) -> str:
    return f" {value}" if value.bit_length() <= 100 else ""  # Python does not print every number


def new_backbone(options, vocabulary_size: int):
    """A new `BertBackbone`; its feed-forward layers are four times as wide as the model.

    Args:
        options: with `num_layers`, `num_heads`, `hidden_dim` and `dropout` (None for none).
        vocabulary_size: number of word pieces.
    """
    return keras_nlp.models.BertBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        hidden_dim=options.hidden_dim,
        intermediate_dim=4 * options.hidden_dim,
        dropout=options.dropout or 0.0,
        max_sequence_length=MAX_LENGTH,
    )


def refuse_longer(backbone, sequence_length: int, preset: str) -> None:
    """Refuses sequences that are longer than a preset's positions.

    Raises:
        DataError: with both lengths.
    """
    if sequence_length > backbone.max_sequence_length:
        raise DataError(
            f"--sequence-length {sequence_length}: the preset {preset} takes at most "
            f"{backbone.max_sequence_length} tokens"
        )


def origin(options, preset: str | None) -> str:
    """Where the weights come from, in words."""
    if options.init_from is not None:
        return f"starts from {options.init_from}"
    return f"preset {preset}" if preset else "from scratch"


def preprocessor(tokenizer, masking, sequence_length: int):
    """What makes a `BertMaskedLM` a whole preset.

    Args:
        tokenizer: a `keras_nlp.models.BertTokenizer`.
        masking: a `data.masked_lm.Masking`.
        sequence_length: tokens of a sequence.
    """
    return keras_nlp.models.BertMaskedLMPreprocessor(
        tokenizer,
        sequence_length=sequence_length,
        mask_selection_rate=masking.probability,
        mask_selection_length=masking.max_predictions,
    )


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
    error = _unreachable(TINY)
    if error is None:
        return TINY, None
    return None, f"preset {TINY}: {error}; the same architecture from scratch is used instead"


def _unreachable(name: str) -> str | None:
    """Why a preset of Kaggle cannot be had, or None; a look takes at most 10 seconds."""
    root = Path(os.environ.get("KAGGLEHUB_CACHE", "~/.cache/kagglehub")).expanduser()
    if list(root.glob(f"models/keras/bert/keras/{name}/*/config.json")):
        return None
    try:
        socket.create_connection(("www.kaggle.com", 443), timeout=5).close()
    except OSError:
        return "no network"
    try:
        keras_nlp.models.BertTokenizer.from_preset(name)
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return re.sub(r"\S*://\S+", "...", first)[:80]
    return None


def make_tokenizer(options, preset: str | None, text, cache_dir: Path):
    """The preset's tokenizer with its own settings, or one with a learned or given vocabulary.

    Raises:
        DataError: the preset or the vocabulary cannot be loaded.
    """
    if preset is not None:
        return load(keras_nlp.models.BertTokenizer, preset)
    source = options.init_from if options.init_from and options.vocabulary is None else None
    if source is not None and kind_of(source / "model", "--init-from") == "folder":
        return load(keras_nlp.models.BertTokenizer, str(source / "model"))
    if options.vocabulary is not None:
        pieces = word_pieces.read_vocabulary(options.vocabulary)
    else:
        pieces = word_pieces.vocabulary_once(text, options.vocabulary_size, cache_dir)
    return keras_nlp.models.BertTokenizer(
        vocabulary=pieces, lowercase=True, strip_accents=True, special_tokens_in_strings=False
    )


def load_model(preset: str, dropout: float | None):
    """A `BertMaskedLM` of a preset, without its preprocessor, under the current dtype policy.

    Raises:
        DataError: the preset cannot be loaded, or is a trained model whose head is gone.
    """
    changes = {} if dropout is None else {"dropout": dropout}
    backbone = load_backbone(preset, **changes)
    model = keras_nlp.models.BertMaskedLM(backbone=backbone, compile=False)
    head = _trained_head(preset)
    if head is not None:
        _load_weights(model.load_task_weights, head, f"preset {preset}")
    return model


def _trained_head(preset: str) -> Path | None:
    """Where a trained head lies; None for a preset that has none, as those for download.

    Raises:
        DataError: it is gone; KerasHub would take a new one, and say nothing.
    """
    head = Path(preset) / "task.weights.h5"
    if os.path.exists(head):
        return head
    if os.path.exists(Path(preset) / "task.json"):
        raise DataError(f"preset {preset}: task.weights.h5 is gone, and with it the trained head")
    return None


def encoder_of(init_from: Path | None, preset: str) -> str | None:
    """The preset that an encoder is taken from: a run's model, a named one, or None for a new one.

    Raises:
        DataError: `init_from` is no finished run.
    """
    if init_from is None:
        return None if preset == "scratch" else preset
    for folder in (init_from / "model", init_from):
        if kind_of(folder / "config.json", "--init-from") == "file":
            return str(folder)
    raise DataError(f"--init-from {init_from}: holds no model; a finished run of bert_mlm does")


def load_backbone(preset: str, **changes):
    """A `BertBackbone` of a preset or of a run's `model` folder, under the current dtype policy.

    Args:
        preset: a name of Kaggle or Hugging Face, or a folder.
        **changes: arguments of the backbone that differ from the preset's, for instance `dropout`.

    Raises:
        DataError: it cannot be loaded, or its files do not match their checksums.
    """
    problem = checksums.problem(Path(preset)) if os.path.isdir(preset) else None
    if problem:
        raise DataError(f"preset {preset}: damaged ({problem})")
    policy = keras.config.dtype_policy()
    return load(keras_nlp.models.BertBackbone, preset, dtype=policy, **changes)


def load(kind, preset: str, **changes):
    """`kind.from_preset(preset, **changes)`, whose errors become one line.

    Args:
        kind: a class of KerasNLP.
        preset: a name of Kaggle or Hugging Face, or a folder.
        **changes: what `from_preset()` takes.

    Raises:
        DataError: it cannot be loaded, or is a trained model whose head is gone.
    """
    if issubclass(kind, keras_nlp.models.Task):
        _trained_head(preset)
    try:
        made = kind.from_preset(preset, **changes)
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        raise DataError(f"preset {preset}: cannot be loaded ({_first_line(error)})") from error
    if not isinstance(made, kind):  # of a JSON file that names nothing Keras returns a dict
        raise DataError(f"preset {preset}: holds no {kind.__name__}")
    return made


def load_weights(model, source: Path) -> None:
    """Loads the weights of a run, of a checkpoint, or of a weights file.

    Raises:
        DataError: nothing is there, its checksums do not match, or the weights are of another
            model.
    """
    candidates = [source / "model" / "task.weights.h5", source / "model.weights.h5", source]
    what = f"--init-from {source}"
    found = next((path for path in candidates if kind_of(path, what) == "file"), None)
    if found is None:
        raise DataError(
            f"--init-from {source}: neither a run's folder with model/ nor a weights file"
        )
    problem = checksums.problem(found.parent)
    if problem:
        raise DataError(f"--init-from {source}: {found.parent} is damaged ({problem})")
    what = f"--init-from {found}"
    if found.name == "task.weights.h5":
        _load_weights(model.load_task_weights, found, what)  # the head alone
        _load_weights(model.backbone.load_weights, found.with_name("model.weights.h5"), what)
    else:
        _load_weights(model.load_weights, found, what)


def _load_weights(load, path: Path, what: str) -> None:
    try:
        load(path)
    except (ValueError, OSError, KeyError) as error:
        raise DataError(f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
