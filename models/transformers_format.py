"""Reads from models in the format of Hugging Face's `transformers` what KerasHub does not convert.

KerasHub's `from_preset()` converts the backbone and the tokenizer. It leaves out the heads for
masked words and for classes, BERT's dropout and RoBERTa's segments, keeps accents that an uncased
BERT removes, leaves out added tokens, and does not read the word pieces and byte pairs of
`tokenizer.json`, the only file of a tokenizer that `transformers` 5 saves.
"""

import functools
import json
import math
import re
from pathlib import Path

import huggingface_hub
import keras
import keras_nlp
import numpy as np
import safetensors
import tokenizers
from huggingface_hub import errors

from data import files
from data.errors import DataError, first_line
from distribution.keras_compat import hub_models

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files
WORD_PIECE = {
    "bert": keras_nlp.models.BertTokenizer,
    "distilbert": keras_nlp.models.DistilBertTokenizer,
}
BYTE_PAIRS = {
    "roberta": keras_nlp.models.RobertaTokenizer,
    "bart": keras_nlp.models.BartTokenizer,
    "gpt2": keras_nlp.models.GPT2Tokenizer,
}
VOCABULARY_AND_MERGES = ("vocab.json", "merges.txt")  # their files, unless in tokenizer.json
# The file with which KerasHub makes the tokenizers that are SentencePiece's.
SENTENCE_PIECES = {
    "albert": "spiece.model",
    "xlm-roberta": "sentencepiece.bpe.model",
    **dict.fromkeys(("gemma", "gemma2", "mixtral", "t5gemma"), "tokenizer.model"),
}
# Spaces, contractions, numbers and characters that rules for words treat differently.
PROBE = "It's  WE'LL don't 12345 3.14\n\n\tno_word d\u00e9j\u00e0 e\u0301 \u4e16\u754c \r\n x=y;  "
COMPOSED_PROBE = PROBE.replace(" e\u0301", "")  # our exports compose characters, BERT does not
# A tokenizer.json without word pieces, whose rules for words can be replaced.
NO_PIECES = {
    "version": "1.0",
    "added_tokens": [],
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"[UNK]": 0},
    },
}
# Tokens of Llama 3 that mean nothing.
RESERVED = "<|reserved_special_token_"
# Classes of tokenizers that split text as BERT's does; others split it by other rules.
LIKE_BERT = re.compile(r"((Distil)?BertTokenizer|PreTrainedTokenizer|TokenizersBackend)(Fast)?")
# Settings of config.json that are read here.
TYPES = {
    "model_type": str,
    "id2label": dict,
    "num_labels": int,
    "hidden_dropout_prob": float | int,
    "architectures": list,
}
WITHOUT_DROPOUT = ("bert", "xlm-roberta")  # KerasHub sets 0.1
WITH_POOLER = ("bert", "albert")  # in KerasHub's backbone

# Settings of generating models that KerasHub does not read, with what it computes; the first
# value is that of a file without the setting.
GATED = {"hidden_act": ("silu",), "rope_type": ("default",)}
SETTINGS: dict[str, dict[str, tuple]] = {
    "llama": GATED
    | {"rope_type": ("default", "llama3"), "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": GATED,
    "qwen2": GATED | {"use_sliding_window": (False,)},
    "qwen3": GATED | {"attention_bias": (False,)},
    "smollm3": GATED
    | {"tie_word_embeddings": (True,), "attention_bias": (False,), "mlp_bias": (False,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "reorder_and_upcast_attn": (False,),
        "layer_norm_epsilon": (1e-5,),
        "tie_word_embeddings": (True,),
    },
    "bart": {
        "activation_function": ("gelu",),
        "scale_embedding": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "add_final_layer_norm": (False,),
        "add_bias_logits": (False,),
        "static_position_embeddings": (False,),
        "tie_word_embeddings": (True,),
    },
    "gemma": {"rms_norm_eps": (1e-6,), "rope_theta": (10_000,)},
    "gemma2": {"rms_norm_eps": (1e-6,), "rope_theta": (10_000,)},
}
# Settings of encoders that KerasHub does not read, as those of causal language models.
ENCODERS = {"is_decoder": (False,), "add_cross_attention": (False,)}

# Weights of a head in Keras and in `transformers`.
ROBERTA = {
    "MaskedLM": {
        "intermediate_dense": "lm_head.dense",
        "intermediate_layer_norm": "lm_head.layer_norm",
        "": "lm_head",
    },
    "TextClassifier": {"pooled_dense": "classifier.dense", "logits": "classifier.out_proj"},
}
HEADS = {
    "bert": {
        "MaskedLM": {
            "intermediate_dense": "cls.predictions.transform.dense",
            "intermediate_layer_norm": "cls.predictions.transform.LayerNorm",
            "": "cls.predictions",
        },
        "TextClassifier": {"logits": "classifier"},
    },
    "distilbert": {
        "MaskedLM": {
            "intermediate_dense": "vocab_transform",
            "intermediate_layer_norm": "vocab_layer_norm",
            "": "vocab_projector",
        },
        "TextClassifier": {"pooled_dense": "pre_classifier", "logits": "classifier"},
    },
    "albert": {
        "MaskedLM": {
            "intermediate_dense": "predictions.dense",
            "intermediate_layer_norm": "predictions.LayerNorm",
            "": "predictions",
        },
        "TextClassifier": {"logits": "classifier"},
    },
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}
# Their names in old checkpoints are the second ones.
PARAMETERS = {
    "kernel": ("weight",),
    "bias": ("bias",),
    "output_bias": ("bias",),
    "gamma": ("weight", "gamma"),
    "beta": ("bias", "beta"),
}


def config_of(preset: str) -> dict:
    """Returns `config.json` of a model in this format; an empty dictionary for other presets.

    Raises:
        DataError: a setting that is read here has another type than there.
    """
    content = _read_json(preset, "config.json")
    if "model_type" not in content or "registered_name" in content:
        return {}
    for name, kind in TYPES.items():
        if not isinstance(content.get(name), kind | None):
            raise DataError(
                f"preset {preset}: config.json is damaged ({name} is {content[name]!r}); download "
                "the model again"
            )
    return content


def _shards(preset: str) -> set[str]:
    """Returns the names of the files of weights.

    Raises:
        DataError: the index of the files is damaged.
    """
    file_of_weight = _read_json(preset, INDEX).get("weight_map", {})
    if not isinstance(file_of_weight, dict) or not all(
        isinstance(name, str) for name in file_of_weight.values()
    ):
        raise DataError(f"preset {preset}: {INDEX} is damaged; download the model again")
    return set(file_of_weight.values()) or {WEIGHTS}


def file_of(preset: str, name: str) -> Path | None:
    """Returns a file of a folder or of a handle `hf://owner/model`; None if there is none.

    Raises:
        DataError: the file of a handle cannot be downloaded, for another reason.
    """
    path = _download(preset, name) if preset.startswith("hf://") else Path(preset) / name
    return path if path is not None and path.is_file() else None


@functools.cache  # so that all questions about a handle have one answer
def _download(handle: str, name: str) -> Path | None:
    owner_and_model = handle.removeprefix("hf://")
    try:
        return Path(huggingface_hub.hf_hub_download(owner_and_model, name))
    except errors.LocalEntryNotFoundError as failed:
        cached = huggingface_hub.try_to_load_from_cache(owner_and_model, name)
        # A path, None, or a mark: an earlier answer was that there is none.
        is_absent = cached is not None and not isinstance(cached, str)
        if is_absent or huggingface_hub.is_offline_mode():
            return None
        error: BaseException = failed.__cause__ or failed
        remedy = "; if the cache has the whole model, set HF_HUB_OFFLINE=1"
    except errors.EntryNotFoundError:
        return None
    except Exception as failed:  # whatever its HTTP client raises
        error, remedy = failed, ""
    raise DataError(
        f"preset {handle}: {name} cannot be downloaded ({type(error).__name__}: "
        f"{first_line(error)}){remedy}"
    ) from error


def _read_json(preset: str, name: str) -> dict:
    path = file_of(preset, name)
    return {} if path is None else files.json_object(path)


def tokenizer_of(preset: str):
    """Makes the tokenizer of a model in this format, for types of which KerasHub reads less.

    Returns:
        A tokenizer of KerasNLP, for types with word pieces or byte pairs; None for the others.

    Raises:
        DataError: it has no vocabulary, or its tokenizer is not like that of KerasHub.
    """
    model_type = config_of(preset).get("model_type", "")
    settings = _read_json(preset, "tokenizer_config.json")
    if model_type in WORD_PIECE:
        name = str(settings.get("tokenizer_class") or "BertTokenizer")
        if "XLMRoberta" not in name:
            return word_piece_tokenizer(preset, WORD_PIECE[model_type], name, settings)
        model_type = "xlm-roberta"
    if model_type in BYTE_PAIRS:
        return byte_pair_tokenizer(preset, BYTE_PAIRS[model_type], settings)
    file = SENTENCE_PIECES.get(model_type)
    if file is not None and file_of(preset, file) is None:
        stored = file_of(preset, "tokenizer.json")
        has = "has no tokenizer" if stored is None else "has only the tokenizer's tokenizer.json"
        raise DataError(
            f"preset {preset}: {has}, and KerasHub needs {file}; copy it from the original model"
        )
    return None


def word_piece_tokenizer(preset: str, kind, name: str, settings: dict):
    """Makes the tokenizer of a BERT or DistilBERT.

    Args:
        preset: a folder or a handle.
        kind: of KerasNLP's tokenizers.
        name: of the class in `transformers`.
        settings: its `tokenizer_config.json`.

    Raises:
        DataError: it has no vocabulary, or splits texts in another way.
    """
    if not LIKE_BERT.fullmatch(name):
        raise DataError(f"preset {preset}: its tokenizer is a {name}, which KerasHub does not have")
    stored = _read_json(preset, "tokenizer.json")
    vocabulary = _vocabulary_in(preset, stored)
    if vocabulary is None:
        raise DataError(
            f"preset {preset}: has no tokenizer: neither vocab.txt nor a tokenizer.json with word "
            "pieces"
        )
    rules = stored.get("normalizer") or {}
    lowercase = settings.get("do_lower_case", rules.get("lowercase", True))
    strip_accents = settings.get("strip_accents", rules.get("strip_accents"))
    tokenizer = kind(
        vocabulary=vocabulary,
        lowercase=lowercase,
        strip_accents=lowercase if strip_accents is None else strip_accents,
        split_on_cjk=settings.get(
            "tokenize_chinese_chars", rules.get("handle_chinese_chars", True)
        ),
    )
    if "pre_tokenizer" in stored:
        normalizer = tokenizers.normalizers.BertNormalizer(
            lowercase=tokenizer.lowercase,
            strip_accents=tokenizer.strip_accents,
            handle_chinese_chars=tokenizer.split_on_cjk,
        )
        if rules.get("type") == "BertNormalizer":  # the settings above have precedence
            stored = stored | {"normalizer": json.loads(normalizer.__getstate__())}
        expected = hub_models.words_by(
            normalizer, tokenizers.pre_tokenizers.BertPreTokenizer(), COMPOSED_PROBE
        )
        _require_words(preset, stored, COMPOSED_PROBE, expected, kind.__name__)
    return tokenizer


def _vocabulary_in(preset: str, stored: dict) -> list[str] | None:
    """Returns BERT's word pieces in the order of their numbers, added ones last; None without any.

    Args:
        preset: a folder or a handle.
        stored: its `tokenizer.json`.
    """
    file, model = file_of(preset, "vocab.txt"), stored.get("model")
    if file is not None:
        with file.open(encoding="utf-8") as lines:
            pieces = [line.rstrip() for line in lines]
    elif not isinstance(model, dict) or model.get("type") != "WordPiece":
        return None
    else:
        numbers = model["vocab"]
        pieces = sorted(numbers, key=numbers.__getitem__)
        is_whole = [numbers[piece] for piece in pieces] == list(range(len(pieces)))
        if not is_whole:
            return None
    added = {
        number: token for token, number in added_tokens(preset).items() if number >= len(pieces)
    }
    pieces += [added[number] for number in sorted(added)]
    return pieces if not added or len(pieces) == max(added) + 1 else None


def byte_pair_tokenizer(preset: str, kind, settings: dict):
    """Makes the tokenizer of a RoBERTa, BART or GPT-2, with the tokens that were added to it.

    Args:
        preset: a folder or a handle.
        kind: of KerasNLP's tokenizers.
        settings: its `tokenizer_config.json`.

    Raises:
        DataError: it has no vocabulary, or does not merge byte pairs as KerasHub does.
    """
    stored = _read_json(preset, "tokenizer.json")
    file_of_pieces, file_of_merges = (file_of(preset, name) for name in VOCABULARY_AND_MERGES)
    if file_of_pieces is not None and file_of_merges is not None:
        vocabulary = files.json_object(file_of_pieces)
        with file_of_merges.open(encoding="utf-8") as lines:
            merges = [line.rstrip() for line in lines]
        merges = [pair for pair in merges if pair and not pair.startswith("#version")]
    elif stored:
        model = stored.get("model")
        vocabulary, merges = _pairs_of(preset, model if isinstance(model, dict) else {}, kind)
    else:
        raise DataError(
            f"preset {preset}: has no tokenizer: neither vocab.json and merges.txt nor "
            "tokenizer.json; download the model again"
        )
    added = {
        token: number for token, number in added_tokens(preset).items() if token not in vocabulary
    }
    rules = stored.get("pre_tokenizer") or {}
    prefix = settings.get("add_prefix_space", rules.get("add_prefix_space"))
    tokenizer = kind(vocabulary=vocabulary | added, merges=merges, add_prefix_space=bool(prefix))
    if added:  # a text is split there, as at the special tokens
        whole = [*tokenizer.special_tokens, *added]
        tokenizer.unsplittable_tokens = list(dict.fromkeys(whole))
        tokenizer.set_vocabulary_and_merges(tokenizer.vocabulary, merges)
    return tokenizer


def _pairs_of(preset: str, model: dict, kind) -> tuple[dict[str, int], list[str]]:
    """Returns the vocabulary and the merges of the model in a `tokenizer.json`.

    Raises:
        DataError: it merges other pairs than a tokenizer of KerasHub, or is damaged.
    """
    if model.get("type") != "BPE":
        raise DataError(
            f"preset {preset}: its tokenizer.json is of type {model.get('type')}, and KerasHub's "
            f"{kind.__name__} merges byte pairs; choose a model with the tokenizer of its family"
        )
    other = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    for name in other:
        if model.get(name):
            raise DataError(
                f"preset {preset}: {name} is {model[name]!r} in its tokenizer.json, and KerasHub's "
                f"{kind.__name__} has none; choose a model with the tokenizer of its family"
            )
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not (isinstance(vocabulary, dict) and isinstance(merges, list)):
        raise DataError(
            f"preset {preset}: tokenizer.json is damaged (vocab or merges); download the model "
            "again"
        )
    return vocabulary, [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def added_tokens(preset: str) -> dict[str, int]:
    """Returns the numbers of the tokens that were added to a tokenizer of this format."""
    listed = _read_json(preset, "tokenizer.json").get("added_tokens") or []
    if not listed:
        return {
            token: number
            for token, number in _read_json(preset, "added_tokens.json").items()
            if isinstance(number, int)
        }
    try:
        return {str(token["content"]): int(token["id"]) for token in listed}
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"preset {preset}: tokenizer.json is damaged (added_tokens); download the model again"
        ) from error


def added_tokens_note(preset: str, tokenizer) -> str | None:
    """Returns a line for the log if a tokenizer splits added tokens; else None.

    Args:
        preset: a folder or a handle.
        tokenizer: of KerasNLP, loaded from it.
    """
    if not config_of(preset):
        return None
    model = _read_json(preset, "tokenizer.json").get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    of_model = {piece if isinstance(piece, str) else piece[0] for piece in pieces or ()}
    known = of_model.union(tokenizer.special_tokens)
    lost = [
        token
        for token, number in added_tokens(preset).items()
        if token not in known and not token.startswith(RESERVED)
        if [int(each) for each in tokenizer(token)] != [number]
    ]
    if not lost:
        return None
    shown = ", ".join(lost[:5]) + ", ..." * (len(lost) > 5)
    return (
        f"tokens added to {preset} are split as any text, since KerasHub's "
        f"{type(tokenizer).__name__} does not have them: {shown}"
    )


def require_same_words(preset: str, tokenizer) -> None:
    """Rejects a `tokenizer.json` that splits a text into other words than KerasHub's tokenizer.

    Args:
        preset: a folder or a handle.
        tokenizer: of KerasNLP, loaded from it; one that does not merge byte pairs is not compared.

    Raises:
        DataError: with the kinds of its normalizer and pre-tokenizer.
    """
    stored = _read_json(preset, "tokenizer.json") if config_of(preset) else {}
    words = hub_models.words_of(tokenizer, PROBE)
    if words is not None and "pre_tokenizer" in stored:
        _require_words(preset, stored, PROBE, words, type(tokenizer).__name__)


def _require_words(preset: str, stored: dict, probe: str, expected: list[str], kind: str) -> None:
    parts = {name: stored.get(name) for name in ("normalizer", "pre_tokenizer")}
    try:
        made = tokenizers.Tokenizer.from_str(json.dumps(NO_PIECES | parts))
    except Exception as error:  # tokenizers raises nothing more special
        raise DataError(
            f"preset {preset}: tokenizer.json is damaged ({first_line(error)}); download the model "
            "again"
        ) from error
    if hub_models.words_by(made.normalizer, made.pre_tokenizer, probe) != expected:
        named = " and ".join(f"{name} {_kinds(part)}" for name, part in parts.items())
        raise DataError(
            f"preset {preset}: its tokenizer.json ({named}) splits texts into other words than "
            f"KerasHub's {kind}; choose a model with the tokenizer of its family"
        )


def _kinds(part) -> str:
    """Returns the types of a part of a `tokenizer.json` and of its own parts."""
    found = re.findall(r'"type": "(\w+)"', json.dumps(part))
    return ", ".join(kind for kind in found if kind != "Sequence") or "none"


def dropout_of(preset: str) -> float | None:
    """Returns the dropout of a model of which KerasHub does not read it; None for the others."""
    content = config_of(preset)
    if content.get("model_type") not in WITHOUT_DROPOUT:
        return None
    return content.get("hidden_dropout_prob")


def require_same_operations(preset: str) -> None:
    """Rejects a model that KerasHub would convert to one with other outputs.

    Raises:
        DataError: with the setting of its `config.json`.
    """
    content = config_of(preset)
    kind = content.get("model_type", "")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if isinstance(rope, dict):  # otherwise damaged, which KerasHub tells
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        content = {"rope_type": rope_type} | rope | content
    settings = ENCODERS if kind in HEADS else SETTINGS.get(kind, {})
    for name, allowed in settings.items():
        if content.get(name, allowed[0]) not in allowed:
            raise DataError(
                f"preset {preset}: {name} is {content[name]}, and KerasHub's {kind} has "
                f"{allowed[0]}"
            )
    if kind == "gemma2":
        _require_gemma_scale(preset, content)
    if kind == "bart":
        _require_bart(preset, content)
    if kind == "llama":
        stored = _read_json(preset, "tokenizer.json")
        is_bytes = "ByteLevel" in json.dumps([stored.get("pre_tokenizer"), stored.get("decoder")])
        if stored and not is_bytes:
            raise DataError(
                f"preset {preset}: its tokenizer is SentencePiece's, as Llama 2's, and KerasHub "
                "would read it as Llama 3's"
            )
    if content.get("model_type") not in HEADS:
        return
    for name in ("hidden_act", "activation"):
        if "gelu" not in str(content.get(name, "gelu")):
            raise DataError(
                f"preset {preset}: {name} is {content[name]}, and KerasHub's encoders have gelu"
            )
    positions = content.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise DataError(
            f"preset {preset}: position_embedding_type is {positions}, and KerasHub's encoders "
            "have absolute"
        )


def _require_bart(preset: str, content: dict) -> None:
    """Rejects a BART with another decoder than encoder, or with a bias of its logits."""
    for name in ("layers", "attention_heads", "ffn_dim"):
        encoder, decoder = (content.get(f"{part}_{name}") for part in ("encoder", "decoder"))
        if encoder != decoder:
            raise DataError(
                f"preset {preset}: encoder_{name} is {encoder} and decoder_{name} {decoder}, and "
                "KerasHub's bart has as many of both"
            )
    stored = _files_by_tensor(preset)
    if (
        "final_logits_bias" in stored
        and _tensor(stored["final_logits_bias"], "final_logits_bias").any()
    ):
        raise DataError(
            f"preset {preset}: final_logits_bias is not zero, and KerasHub's bart has none; choose "
            "another BART"
        )


def _require_gemma_scale(preset: str, content: dict) -> None:
    """Rejects a Gemma 2 that divides its attention's products by another root than KerasHub's."""
    names = ("query_pre_attn_scalar", "head_dim", "hidden_size", "num_attention_heads")
    values = [content.get(name) for name in names]
    numbers = [value for value in values if isinstance(value, int | float) and value > 0]
    if len(numbers) < len(names):
        return  # KerasHub tells what is missing
    scalar, head_dim, width, heads = numbers
    allowed = (head_dim, width // heads)
    if scalar not in allowed:
        raise DataError(
            f"preset {preset}: query_pre_attn_scalar is {scalar}, and KerasHub's gemma2 has "
            f"{allowed[0]} or {allowed[1]}"
        )


def classes_of(preset: str) -> list[str]:
    """Returns names of the classes of a classifier's head; LABEL_0, ... if it does not name them.

    Args:
        preset: a model in this format.
    """
    content = config_of(preset)
    names = content.get("id2label") or {}
    count = len(names) or content.get("num_labels", 2)
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(count)]


def has_several_labels(preset: str) -> bool | None:
    """Tells whether a classifier's head is for several labels of a text; None if it is not said.

    Args:
        preset: a model in this format.
    """
    problem_type = config_of(preset).get("problem_type")
    return None if problem_type is None else problem_type == "multi_label_classification"


def has_head(preset: str, task: str) -> bool:
    """Tells whether a model in this format has a head that `load_head` reads.

    Args:
        preset: a folder or a handle.
        task: "MaskedLM" or "TextClassifier".
    """
    content = config_of(preset)
    if task == "MaskedLM" and not content.get("tie_word_embeddings", True):
        return False  # KerasHub's heads are tied
    return _has_weights(preset, task) and (task == "MaskedLM" or other_head(preset) is None)


def _has_weights(preset: str, task: str) -> bool:
    layers = HEADS.get(config_of(preset).get("model_type", ""), {}).get(task)
    if not layers:
        return False
    stored = _files_by_tensor(preset)
    return all({f"{module}.bias", f"{module}.beta"} & set(stored) for module in layers.values())


def other_head(preset: str) -> str | None:
    """Returns why the weights with the names of a classifier's head are not one; None if they are.

    Models of tokens and of multiple choice have a `classifier`, too.

    Args:
        preset: a folder or a handle.
    """
    if not _has_weights(preset, "TextClassifier"):
        return None
    content = config_of(preset)
    kinds = content.get("architectures") or []
    if kinds and not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        return f"is of {kinds[0]}"
    name = HEADS[content["model_type"]]["TextClassifier"]["logits"] + ".weight"
    with safetensors.safe_open(_files_by_tensor(preset)[name], framework="np") as file:
        rows = file.get_slice(name).get_shape()[0]
    count = len(classes_of(preset))
    return None if rows == count else f"is for {rows} classes, and its config.json names {count}"


def load_head(model: keras.Model, preset: str, task: str) -> None:
    """Loads the weights of a head into a model whose backbone is loaded already.

    Args:
        model: a task of KerasNLP; a `keras.layers.Rescaling` as its activation is divided out, so
            that its answers are those of the head.
        preset: a model in this format for which `has_head` is true.
        task: "MaskedLM" or "TextClassifier".
    """
    layers = HEADS[config_of(preset)["model_type"]][task]
    stored = _files_by_tensor(preset)
    in_backbone = {id(weight) for weight in model.backbone.weights}
    for weight in model.weights:
        if id(weight) in in_backbone:
            continue
        owner, _, parameter = weight.path.removeprefix("mlm_head/").rpartition("/")
        names = [f"{layers[owner]}.{name}" for name in PARAMETERS[parameter]]
        (name,) = [name for name in names if name in stored]
        value = _tensor(stored[name], name)
        weight.assign(value.T if parameter == "kernel" else value)
    scale = getattr(model, "activation", None)
    if isinstance(scale, keras.layers.Rescaling):
        head = model.get_layer("logits")
        head.kernel.assign(head.kernel / scale.scale)
        head.bias.assign((head.bias - scale.offset) / scale.scale)


def lacks_pooler(preset: str) -> bool:
    """Tells whether a BERT or ALBERT has no pooler, as one that fills in masked words."""
    if config_of(preset).get("model_type") not in WITH_POOLER:
        return False
    stored = _files_by_tensor(preset)
    return bool(stored) and not any("pooler" in name for name in stored)


def pools_means(preset: str) -> bool:
    """Tells whether a BERT is of sentence-transformers, trained on the means of its tokens."""
    is_bert = config_of(preset).get("model_type") == "bert"
    pooling = _read_json(preset, "1_Pooling/config.json") if is_bert else {}
    return pooling.get("pooling_mode_mean_tokens") is True


def add_segments(backbone: keras.Model, preset: str) -> None:
    """Adds the embedding of RoBERTa's only segment, which KerasHub's has not, to its positions.

    It is zero in the published models; fine-tuning with `transformers` changes it.
    """
    name = "roberta.embeddings.token_type_embeddings.weight"
    if config_of(preset).get("model_type") != "roberta" or name not in _files_by_tensor(preset):
        return
    positions = backbone.embeddings.position_embedding.position_embeddings
    positions.assign(positions + _tensor(_files_by_tensor(preset)[name], name)[:1])


def _tensor(path: Path, name: str) -> np.ndarray:
    with safetensors.safe_open(path, framework="np") as file:
        return np.asarray(file.get_tensor(name), np.float32)


def parameters_of(preset: str) -> int | None:
    """Returns the number of parameters of a folder in this format; None if it has no weights."""
    stored = _files_by_tensor(preset) if config_of(preset) else {}
    count = 0
    for path in set(stored.values()):
        with safetensors.safe_open(path, framework="np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return count or None


def _files_by_tensor(preset: str) -> dict[str, Path]:
    """Returns the file of each tensor; empty if a file is missing or damaged."""
    found: dict[str, Path] = {}
    for path in [file_of(preset, name) for name in sorted(_shards(preset))]:
        try:
            with safetensors.safe_open(path, framework="np") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (TypeError, OSError, safetensors.SafetensorError):
            return {}
    return found


def missing_weights(preset: str) -> str | None:
    """Returns a problem of the weights' files of a model in this format, and a remedy; or None."""
    content = config_of(preset)
    for name in sorted(_shards(preset)) if content else ():
        path = file_of(preset, name)
        if path is None and file_of(preset, "pytorch_model.bin") is not None:
            return f"has no {WEIGHTS}, only pytorch_model.bin; {_saved_again(content)} writes it"
        if path is None:
            return f"{name} is missing; download the model again"
        try:
            with safetensors.safe_open(path, framework="np"):
                pass
        except (OSError, safetensors.SafetensorError) as error:
            return f"{name} is damaged ({first_line(error)}); download the model again"
    return None


def not_converted(preset: str, error: Exception) -> str | None:
    """Returns why KerasHub could not convert a model in this format, and a remedy.

    Args:
        preset: a folder or a handle.
        error: what KerasHub raised.

    Returns:
        None for presets in other formats, and where the error says enough.
    """
    content, line = config_of(preset), first_line(error)
    if not content:
        return None
    if "no converter for" in line:
        return (
            f"KerasHub does not convert models of type {content['model_type']}; pass one of "
            "another type, for instance bert, distilbert or roberta"
        )
    tensor = re.search(r"File does not contain tensor (\S+)", line)
    if tensor and tensor[1].startswith(("roberta.", "distilbert.")):  # of an encoder alone
        remedy = _saved_again({"architectures": ["AutoModelForMaskedLM"]})
        return f"its weights have no {tensor[1]}, which KerasHub needs; {remedy} writes it"
    if tensor:
        return f"its weights have no {tensor[1]}, which KerasHub needs"
    if isinstance(error, KeyError):
        return f"its config.json or tokenizer_config.json has no {line}, which KerasHub needs"
    return missing_weights(preset)


def _saved_again(content: dict) -> str:
    """Returns the Python that loads a model with `transformers` and saves it."""
    (kind, *_) = content.get("architectures") or ["AutoModel"]
    return f"transformers.{kind}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
