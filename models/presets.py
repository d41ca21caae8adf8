"""Finds, checks and loads presets of any family of KerasNLP: models, preprocessors, tokenizers.

`from_preset()` of a general class (`TextClassifier`, `MaskedLM`) chooses the preset's family.
"""

import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import keras
import keras_nlp
import numpy as np
from huggingface_hub import constants

from data import files, word_pieces
from data.errors import DataError, first_line, is_out_of_memory
from distribution.keras_compat.hub_models import (
    convert_bart,
    convert_llama,
    convert_without,
    split_words,
)
from models import init_from, transformers_format

TINY = "bert_tiny_en_uncased"
# Options of new models only.
FROM_SCRATCH = ("num_layers", "num_heads", "hidden_dim", "vocabulary_size", "vocabulary")
# An example preset of each task, for messages.
EXAMPLES = {
    "TextClassifier": "distil_bert_base_en_uncased",
    "MaskedLM": "bert_tiny_en_uncased",
    "CausalLM": "gpt2_base_en",
    "Seq2SeqLM": "bart_base_en",
}
# Encoders that cannot be trained in half precision: RoFormer-v2 counts positions in it.
NOT_IN_HALF = ("RoformerV2Backbone",)
JSON_FILES = ("config", "task", "preprocessor", "tokenizer", "model.weights")  # .json
HEAD_WEIGHTS = "task.weights.h5"  # the whole task's, as `save_to_preset()` writes them
HTTPS = 443  # the port
# Rows without a piece that published models have: embeddings are padded to a multiple of up to 128,
# for several devices to one of up to 1,024; beyond that a tenth of a small vocabulary is tolerated.
MOST_PADDED, MOST_UNUSED = 128, 2048
TRAINING_COPIES = 4  # weights, gradients, and AdamW's two moments


def problems_of_presets(options, *more: str) -> list[str]:
    """Lists problems of `--preset`, `--init-from` and sizes beside them, one per line.

    Args:
        options: with `preset`, `init_from` and `FROM_SCRATCH`.
        *more: names of further options that a preset has its own values of.
    """
    (default,) = (each.default for each in dataclasses.fields(options) if each.name == "preset")
    if options.preset == "auto" and default != "auto":
        return ["--preset auto: pass scratch, the name of a preset, or its folder"]
    named = [] if options.preset in ("auto", "scratch") else [f"the preset {options.preset}"]
    if getattr(options, "init_from", None) is not None:
        named.append("--init-from")
    if len(named) > 1:
        return ["--init-from and --preset: pass only one of them"]
    flags = ["--" + name.replace("_", "-") for name in given_sizes(options, *more)]
    return [f"{flag}: leave it out, {source} has its own" for source in named for flag in flags]


def given_sizes(options, *more: str) -> list[str]:
    """Returns the names among `FROM_SCRATCH` and more that differ from the recipe's defaults."""
    default = type(options)()
    names = (*more, *FROM_SCRATCH)
    return [name for name in names if getattr(options, name) != getattr(default, name)]


def choose_preset(
    options, known: str | None, english_wikitext: bool = False
) -> tuple[str | None, str | None]:
    """Chooses the preset: the run's, the named one, or for `auto` the tiny one if it fits.

    Args:
        options: with `preset` and `FROM_SCRATCH`, perhaps `init_from`.
        known: the preset of an earlier part of this run, or None.
        english_wikitext: whether the text is what the tiny preset was trained on.

    Returns:
        The preset, or None for a model from scratch; and a line that names a fallback and the
        reason, or None.

    Raises:
        DataError: `init_from` is neither a finished run nor part of one.
    """
    preset = known or options.preset
    start = getattr(options, "init_from", None)
    if known is None and start is not None:
        preset = init_from.preset_of(start)
    if preset != "auto":
        return (None if preset == "scratch" else preset), None
    if not english_wikitext or given_sizes(options):
        return None, None
    reason = _unreachable(TINY)
    if reason is None:
        return TINY, None
    return None, f"preset {TINY}: {reason}; the same architecture from scratch is used instead"


def _unreachable(name: str) -> str | None:
    """Returns why a Kaggle preset is unavailable, or None; gives up after some seconds."""
    if no_network(name):
        return "no network"
    try:
        keras_nlp.models.BertTokenizer.from_preset(name)
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        return re.sub(r"\S*://\S+", "...", first_line(error))[:80]
    return None


def no_network(preset: str) -> str | None:
    """Returns the host of a preset's download if it does not answer, else None.

    Args:
        preset: a name or a handle; a downloaded one needs no host.
    """
    known = keras_nlp.models.Backbone.presets
    handle = known[preset]["kaggle_handle"] if preset in known else preset
    scheme, _, path = handle.partition("://")
    port = HTTPS
    if scheme == "kaggle":
        host, root = "www.kaggle.com", os.environ.get("KAGGLEHUB_CACHE", "~/.cache/kagglehub")
        pattern = f"models/{'/'.join(path.split('/')[:4])}/*/config.json"
    elif scheme == "hf":
        root = constants.HF_HUB_CACHE
        address = urllib.parse.urlsplit(constants.ENDPOINT)
        host = address.hostname or "huggingface.co"
        port = address.port or (80 if address.scheme == "http" else HTTPS)
        pattern = f"models--{path.replace('/', '--')}/snapshots/*/config.json"
    else:
        return None
    if urllib.request.getproxies() or any(Path(root).expanduser().glob(pattern)):
        return None
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return host
    return None


def load_task(
    kind,
    preset: str,
    *,
    backbone_dropout: float | None = None,
    sequence_length: int | None = None,
    **changes,
):
    """Loads a model of a task under the current dtype policy, without its preprocessor.

    A preset with only a backbone, or a `TextClassifier` with a number of classes in `changes`, gets
    a new head; `kept_head` and `new_masked_lm_head` say so before.

    Args:
        kind: a general class of KerasNLP, for instance `keras_nlp.models.TextClassifier`.
        preset: a name, a handle (`hf://`, `kaggle://`), or a folder.
        backbone_dropout: None keeps the preset's.
        sequence_length: tokens of the run's sequences, or None.
        **changes: arguments of the task's constructor.

    Raises:
        DataError: the preset cannot be loaded, is of another task, has fewer positions, or fails in
            this precision.
    """
    require_task(kind, preset)
    policy = keras.config.dtype_policy()
    weights = init_from.source_of(preset).weights
    task = kind.__name__
    with_head = "num_classes" not in changes and transformers_format.has_head(preset, task)
    if with_head and task == "TextClassifier":
        changes["num_classes"] = len(transformers_format.classes_of(preset))
    if backbone_dropout is None:
        backbone_dropout = transformers_format.dropout_of(preset)
    if weights is not None and "num_classes" in changes:  # a new head: the checkpoint's is not read
        changes["backbone"] = load_backbone(preset, backbone_dropout)
        weights = None
    elif backbone_dropout is not None:
        changes["backbone"] = load_backbone(preset, backbone_dropout)
    model = load(kind, preset, dtype=policy, preprocessor=None, compile=False, **changes)
    if with_head:
        transformers_format.load_head(model, preset, task)
    require_positions(model.backbone, preset, sequence_length)
    family = type(model.backbone).__name__
    if family in NOT_IN_HALF and policy.compute_dtype in ("float16", "bfloat16"):
        raise DataError(
            f"preset {preset}: KerasNLP's {family.removesuffix('Backbone')} fails in "
            f"{policy.name}; pass --precision float32"
        )
    if weights is not None:
        init_from.load_checkpoint(model, weights)
    return model


def load_backbone(preset: str, dropout: float | None = None):
    """Loads a backbone alone under the current dtype policy.

    Args:
        preset: a name, a handle, or a folder.
        dropout: None keeps the preset's.

    Raises:
        DataError: the preset cannot be loaded, or has no dropout.
    """
    changes = {} if dropout is None else {"dropout": dropout}
    policy = keras.config.dtype_policy()
    backbone = load(keras_nlp.models.Backbone, preset, dtype=policy, **changes)
    parameters = inspect.signature(type(backbone).__init__).parameters
    if dropout is not None and "dropout" not in parameters:  # then KerasNLP has ignored it
        names = [name for name in parameters if "dropout" in name]
        if not names:
            raise DataError(f"--dropout: {type(backbone).__name__} of {preset} has none")
        changes = dict.fromkeys(names, dropout)
        backbone = load(keras_nlp.models.Backbone, preset, dtype=policy, **changes)
    init_from.load_encoder(backbone, init_from.source_of(preset))
    return backbone


def kept_head(
    preset: str, classes: Sequence[str], several: bool = False
) -> tuple[bool, str | None]:
    """Decides whether to keep the head of a classifier's folder or to train a new one.

    The head is kept if it has weights and as many classes as the data, and the same ones where the
    folder names them, as `model/` of a run does. One for scores is kept only if the folder says
    that it is; one for several labels only for those.

    Args:
        preset: a name, a handle, or a folder.
        classes: names of the data's classes, in the order of their numbers; none for scores.
        several: whether each of the data's examples has any number of them.

    Returns:
        Whether the head is kept, and a line for the log; None if the folder has no classifier.
    """
    if transformers_format.has_head(preset, "TextClassifier"):
        is_of_several = transformers_format.has_several_labels(preset)
        if is_of_several is not None and is_of_several != several:
            return False, _other_kind(preset, is_of_several)
        names = transformers_format.classes_of(preset)
        named = not names[0].startswith("LABEL_")
        return _fits(preset, classes, len(names), names if named else None, len(names) == 1)
    other = transformers_format.other_head(preset)
    if other is not None:
        return False, f"a new head: that of {preset} {other}"
    folder = Path(init_from.source_of(preset).preset)
    stored = files.json_object(folder / "task.json")
    kind = getattr(keras_nlp.models, str(stored.get("class_name")), None)
    if kind is None or not issubclass(kind, keras_nlp.models.TextClassifier):
        return False, None
    if not (folder / HEAD_WEIGHTS).is_file():  # KerasHub would load a random head without a word
        return False, f"a new head: that of {preset} has no weights ({HEAD_WEIGHTS})"
    config: dict = stored["config"] if isinstance(stored.get("config"), dict) else {}
    count: int = config.get("num_classes", 0)
    metadata = files.json_object(folder / files.METADATA)
    is_of_several = metadata.get("several") is True
    if metadata.get("classes") and is_of_several != several:
        return False, _other_kind(preset, is_of_several)
    return _fits(preset, classes, count, metadata.get("classes"), metadata.get("scores") is True)


def classes_of_head(preset: str) -> list[str]:
    """Returns the names of a head's classes in the order of its outputs; none if it has no names.

    Args:
        preset: a name, a handle, or a folder.
    """
    if transformers_format.has_head(preset, "TextClassifier"):
        return transformers_format.classes_of(preset)
    folder = Path(init_from.source_of(preset).preset)
    return files.json_object(folder / files.METADATA).get("classes") or []


def _other_kind(preset: str, several: bool) -> str:
    kind = "several labels for a text" if several else "one class for each text"
    return f"a new head: that of {preset} is for {kind}"


def _fits(
    preset: str, classes: Sequence[str], count: int, names: list[str] | None, scores: bool
) -> tuple[bool, str]:
    """Decides whether a head is kept, see `kept_head`.

    Args:
        preset: named in the line for the log.
        classes: names of the data's classes; none for scores.
        count: number of the head's classes.
        names: of the head's classes, if the preset names them.
        scores: whether the head is for scores.
    """
    if scores:
        if not classes and count == 1:
            return True, f"the head of {preset}, for scores, is trained further"
        return False, f"a new head: that of {preset} is for scores"
    if count == len(classes) and names in (None, list(classes)):
        return True, f"the head of {preset} is trained further; its classes are those of the data"
    other = f"{count} classes" if names is None else f"the classes {', '.join(names)[:80]}"
    return False, f"a new head: that of {preset} is for {other}"


def new_pooler(preset: str, is_frozen: bool = False) -> str | None:
    """Returns a line for the log if a preset's encoder gets other weights to pool; else None.

    Args:
        preset: a name, a handle, or a folder.
        is_frozen: whether the encoder's own weights do not train.
    """
    if transformers_format.pools_means(preset):
        begins = "[CLS] begins as the mean of the tokens, in one more layer"
        return f"{begins}: {preset} was trained on means"
    lacks = transformers_format.lacks_pooler(preset)
    if not lacks:
        return None
    stays = "; it stays random with --freeze-backbone and --lora-rank" if is_frozen else ""
    return f"a new pooler, which reads [CLS]: {preset} has none{stays}"


def new_masked_lm_head(preset: str) -> str | None:
    """Returns a line for the log if a preset has no head for masked words; else None.

    Args:
        preset: a name, a handle, or a folder.
    """
    folder = Path(init_from.source_of(preset).preset)
    if transformers_format.config_of(preset):
        lacks = not transformers_format.has_head(preset, "MaskedLM")
    else:
        lacks = folder.is_dir() and not (folder / HEAD_WEIGHTS).is_file()
    return f"a new head for masked words: {preset} has none" if lacks else None


def require_positions(
    backbone, preset: str, length: int | None, option: str = "--sequence-length"
) -> None:
    """Rejects sequences that are longer than a backbone's positions.

    Args:
        backbone: of KerasNLP.
        preset: named in the message.
        length: tokens of the sequences, or None.
        option: their length's option.

    Raises:
        DataError: with both numbers.
    """
    longest = getattr(backbone, "max_sequence_length", None)
    if length is not None and longest is not None and length > longest:
        raise DataError(f"{option} {length}: the preset {preset} takes at most {longest} tokens")


def require_task(kind, preset: str) -> None:
    """Rejects a preset of another task, or too large for memory, before anything is loaded.

    Args:
        kind: a general class of KerasNLP, for instance `keras_nlp.models.TextClassifier`.
        preset: a name, a handle, or a folder.

    Raises:
        DataError: with the families that have the task, or the size and the memory.
    """
    known = keras_nlp.models.Backbone.presets
    preset = init_from.source_of(preset).preset
    folder = Path(preset)
    parameters = None
    if preset in known:
        if preset not in kind.presets:
            raise DataError(_no_task(kind, preset, preset.rsplit("_", 1)[0]))
        parameters = known[preset].get("metadata", {}).get("params")
    elif (folder / "model" / "config.json").is_file():
        raise DataError(f"preset {preset}: a run; its model is in {folder / 'model'}")
    elif folder.is_dir():
        problem = transformers_format.missing_weights(preset)
        if problem is not None:
            raise DataError(f"preset {preset}: {problem}")
        parameters = files.json_object(folder / "metadata.json").get("parameter_count")
        parameters = parameters or transformers_format.parameters_of(preset)
        task = files.json_object(folder / "task.json").get("class_name")
        stored = getattr(keras_nlp.models, str(task), None)
        # A classifier can use the encoder of a masked LM; a classifier's head cannot fill masks.
        if kind is keras_nlp.models.MaskedLM and stored and not issubclass(stored, kind):
            raise DataError(
                f"preset {preset}: a {task}, not a masked LM; pass its encoder's preset"
            )
    elif folder.is_file():
        raise DataError(f"preset {preset}: a file, expected a folder; {_way_to_folder(preset)}")
    elif "://" not in preset:
        close = difflib.get_close_matches(preset, known, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else (
                f"names look like {EXAMPLES.get(kind.__name__, TINY)}, handles like hf://owner/model"
            )
        )
        raise DataError(f"preset {preset}: neither a folder nor a name of KerasNLP; {hint}")
    if isinstance(parameters, int):
        require_memory(preset, parameters)
    host = None if folder.is_dir() else no_network(preset)
    if host is not None:
        raise DataError(
            f"preset {preset}: no network ({host} does not answer); pass the folder of a preset"
        )
    transformers_format.require_same_operations(preset)


def require_memory(preset: str, parameters: int) -> None:
    """Rejects a preset whose weights alone exceed the memory of this machine.

    Raises:
        DataError: with both sizes.
    """
    bytes_each = np.dtype(keras.config.floatx()).itemsize  # also under mixed policies
    size, memory = parameters * bytes_each, _memory()
    if memory is not None and size > memory:
        raise DataError(
            f"preset {preset}: {parameters:,} parameters x {bytes_each} bytes = "
            f"{size / 1e9:.1f} GB, and {TRAINING_COPIES * size / 1e9:.1f} GB to train all of it; "
            f"this machine has {memory / 1e9:.1f} GB"
        )


def _memory() -> int | None:
    """Returns the bytes of memory that this process may use, or None."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # "max": none
            continue
    return min(limits)


def _splits_words(folder: Path) -> bool:
    """Tells whether a preset's texts are split into words before byte pairs are merged.

    Those of presets from elsewhere are, and of runs from them. A run that learned its own byte
    pairs has trained without, as KerasHub's tokenizer does.
    """
    own = folder / files.METADATA
    return not own.is_file() or bool(files.json_object(own).get(files.SPLITS_WORDS))


def _strip_accents(tokenizer, preset: str) -> None:
    """Makes KerasNLP's own presets of uncased BERTs strip accents, as their pretraining did.

    KerasHub's strip none (https://github.com/google-research/bert, "Pre-trained models": the
    uncased ones do).
    """
    uncased = (keras_nlp.models.BertTokenizer, keras_nlp.models.DistilBertTokenizer)
    named = preset in keras_nlp.models.Backbone.presets
    if named and isinstance(tokenizer, uncased) and tokenizer.lowercase:
        tokenizer.strip_accents = True


def load(kind, preset: str, **changes):
    """Calls `kind.from_preset(preset, **changes)`; shortens its errors to one line.

    Args:
        kind: a class of KerasNLP, general or of a family.
        preset: a name of Kaggle or Hugging Face, or a folder.
        **changes: arguments of `from_preset()`.

    Raises:
        DataError: the preset cannot be loaded, is of another task, lacks a tokenizer, or does not
            match its checksums.
    """
    preset = init_from.source_of(preset).preset  # of a checkpoint: name its run's model
    problem = files.damage(Path(preset)) if os.path.isdir(preset) else None
    if problem:
        raise DataError(f"preset {preset}: damaged ({problem})")
    loaded = None
    try:
        if issubclass(kind, (keras_nlp.models.Tokenizer, keras_nlp.models.Preprocessor)):
            tokenizer = transformers_format.tokenizer_of(preset)
            if issubclass(kind, keras_nlp.models.Tokenizer):
                loaded = tokenizer
            elif tokenizer is not None:
                changes["tokenizer"] = tokenizer
        new = convert_without("pooler") if transformers_format.lacks_pooler(preset) else None
        with new or contextlib.nullcontext(), convert_bart(), convert_llama():
            loaded = loaded or kind.from_preset(preset, **changes)
        if issubclass(kind, (keras_nlp.models.Backbone, keras_nlp.models.Task)):
            if "backbone" not in changes:  # that one was loaded here, too
                transformers_format.add_segments(getattr(loaded, "backbone", loaded), preset)
        if _splits_words(Path(preset)):
            owner = getattr(loaded, "preprocessor", loaded)
            tokenizer = getattr(owner, "tokenizer", owner)
            split_words(tokenizer)
            transformers_format.require_same_words(preset, tokenizer)
            _strip_accents(tokenizer, preset)
        return loaded
    except DataError:
        raise
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        if is_out_of_memory(error):
            raise
        damaged = _damaged_file(Path(preset))
        if damaged is not None:
            raise DataError(
                f"preset {preset}: {damaged}; save the preset again, or pass another"
            ) from error
        line = first_line(error)
        other = re.search(r"Unable to find a subclass of .* compatible with (\w+)", line)
        if other:
            raise DataError(_no_task(kind, preset, other[1])) from error
        if "tokenizer.json` doesn't exist" in line:
            raise DataError(
                f"preset {preset}: has no tokenizer; save one there with "
                "tokenizer.save_to_preset(folder), or save the whole task"
            ) from error
        absent = re.search(r"`(\S+)` doesn't exist in preset directory", line)
        if absent:  # KerasHub looks for an index of shards where the one file is missing
            name = absent[1].replace("model.weights.json", "model.weights.h5")
            is_local = Path(preset).is_dir()
            remedy = "save the preset again" if is_local else "download it again, or pass another"
            raise DataError(f"preset {preset}: has no {name}; {remedy}") from error
        if "Unable to synchronously open file" in line:
            raise DataError(
                f"preset {preset}: its weights are damaged ({line}); save the preset again"
            ) from error
        problem = transformers_format.not_converted(preset, error)
        if problem is not None:
            raise DataError(f"preset {preset}: {problem}") from error
        if _omits_tied_embeddings(Path(preset), line):
            raise DataError(
                f"preset {preset}: cannot be loaded; KerasHub did not save that its embeddings are "
                'tied: add "tie_word_embeddings": true to the "config" of the backbone, in '
                "config.json and task.json"
            ) from error
        unfit = re.search(r"A total of (\d+) objects could not be loaded.* name=(\w+),", line)
        if unfit:
            raise DataError(
                f"preset {preset}: its weights do not fit its config.json ({unfit[1]} layers, "
                f"{unfit[2]} among them): they are damaged or of another model; save the preset "
                "again"
            ) from error
        raise DataError(f"preset {preset}: cannot be loaded ({line})") from error


def _damaged_file(folder: Path) -> str | None:
    """Returns which file of a preset cannot be read, and how it is damaged; None if each can be.

    Weights are left out: the errors of HDF5 tell enough.
    """
    assets = sorted(path for path in folder.glob("assets/**/*") if path.is_file())
    named = [folder / f"{name}.json" for name in JSON_FILES]
    named = [path for path in named if path.is_file()]
    for path in named + assets:
        damage = _damage_of(path)
        if damage is not None:
            return f"{path.relative_to(folder)} {damage}"
    return None


def _damage_of(path: Path) -> str | None:
    """Returns how a file of a preset is damaged, by the ending of its name; None if it is not."""
    try:
        if path.suffix == ".spm":
            keras_nlp.tokenizers.SentencePieceTokenizer(proto=str(path))
            return None
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return None if isinstance(json.loads(text), dict) else "is not a JSON object"
        return None if text.strip() else "is empty"
    except Exception:  # SentencePiece raises whatever TensorFlow makes of its errors
        kinds = {".spm": "a SentencePiece model", ".json": "a JSON object"}
        return f"is not {kinds.get(path.suffix, 'UTF-8 text')}"


def _omits_tied_embeddings(folder: Path, line: str) -> bool:
    """Tells whether weights do not fit because KerasHub 0.32 omits Llama's tied embeddings.

    Args:
        folder: the preset's.
        line: the error of its weights.
    """
    stored, name = files.json_object(folder / "config.json"), "tie_word_embeddings"
    kind = getattr(keras_nlp.models, str(stored.get("class_name")), None)
    if kind is None or "token_embedding" not in line or name in str(stored.get("config")):
        return False
    return name in inspect.signature(kind.__init__).parameters


def _way_to_folder(file: str) -> str:
    """Returns how to save the model of a file as a preset."""
    save = "task.save_to_preset(FOLDER), and pass that"
    if file.endswith(".weights.h5"):
        return f"build the task that they are of, load_weights({file!r}), {save}"
    if file.endswith((".keras", ".h5")):
        return f"task = keras.saving.load_model({file!r}), {save}"
    return "pass the one of its config.json"


def _no_task(kind, preset: str, family: str) -> str:
    task = kind.__name__.removesuffix("Preprocessor")
    families = sorted(
        name.removesuffix(task)
        for name in dir(keras_nlp.models)
        if name.endswith(task) and name != task
    )
    family = family.removesuffix("Backbone")
    shown = ", ".join(families[:8]) + ", ..." * (len(families) > 8)
    example = EXAMPLES.get(task)
    is_encoder_decoder = hasattr(keras_nlp.models, f"{family}Seq2SeqLM")
    return (
        f"preset {preset}: {family} has no {task} in KerasNLP; families that have one: {shown}"
        + (f"; for instance --preset {example}" if example else "")
        + ("; recipes.seq2seq trains its Seq2SeqLM" if is_encoder_decoder else "")
    )


def added_tokens_note(preset: str | None, tokenizer) -> str | None:
    """Returns a line for the log if a preset's tokenizer splits tokens that were added; else None.

    Args:
        preset: a name, a handle, or a folder; None for a new model.
        tokenizer: loaded from it.
    """
    return preset and transformers_format.added_tokens_note(preset, tokenizer)


def require_mask_token(tokenizer, preset: str, option: str) -> None:
    """Rejects a tokenizer without a mask token.

    Raises:
        DataError: with the feature that needs it.
    """
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise DataError(f"preset {preset}: its tokenizer has no mask token, which {option} needs")


def check_vocabulary(model, tokenizer, preset: str) -> str | None:
    """Rejects a tokenizer with an id that the model has no embedding for.

    Returns:
        A note if the model has many more embeddings than the tokenizer has ids; otherwise None.

    Raises:
        DataError: with the largest id and the number of embeddings.
    """
    largest, rows = word_pieces.number_of_ids(tokenizer) - 1, model.backbone.vocabulary_size
    if largest >= rows:
        raise DataError(
            f"preset {preset}: its tokenizer has ids up to {largest:,} and its model {rows:,} "
            "embeddings; the two do not belong together"
        )
    unused = rows - 1 - largest
    if unused <= max(MOST_PADDED, min(MOST_UNUSED, rows // 10)):
        return None
    return (
        f"preset {preset}: its tokenizer has {largest + 1:,} pieces and its model {rows:,} "
        "embeddings: if its vocabulary was cut short, words are read as other pieces or as unknown "
        "ones; compare its files with the published ones"
    )
