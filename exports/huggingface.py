"""Exports a BERT or a causal language model to Hugging Face's `transformers`.

KerasHub's masked language model has tanh GELU and an epsilon of 1e-12 in the encoder, but exact
GELU and an epsilon of 1e-5 in the head; a `config.json` has one of each. The export has those of
the encoder, so the logits differ by about 1e-3 until the head is set by hand (`SET_THE_HEAD`). A
classifier has no such head. Causal language models are written by KerasHub's exporter, for the
families that it supports.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import safetensors.numpy

from data import files
from data.errors import DataError
from data.templates import CHATS, Chat, Template, form_of
from data.word_pieces import INVISIBLE, OTHER_WHITE_SPACE, SPECIAL_TOKENS
from exports.chat_templates import jinja_of
from exports.comparison import Differs, random_inputs, require_equal
from models.decoders import stop_tokens

SET_THE_HEAD = """\
transform = model.cls.predictions.transform
transform.transform_act_fn = torch.nn.GELU()  # exact, as in the Keras model's head
transform.LayerNorm.eps = 1e-5"""

# Names in Keras and in `transformers`: within an encoder layer, then of the other layers.
ENCODER_LAYER = {
    "self_attention_layer/query": "attention.self.query",
    "self_attention_layer/key": "attention.self.key",
    "self_attention_layer/value": "attention.self.value",
    "self_attention_layer/attention_output": "attention.output.dense",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "feedforward_intermediate_dense": "intermediate.dense",
    "feedforward_output_dense": "output.dense",
    "feedforward_layer_norm": "output.LayerNorm",
}
OTHERS = {
    "token_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "segment_embedding": "bert.embeddings.token_type_embeddings",
    "embeddings_layer_norm": "bert.embeddings.LayerNorm",
    "pooled_dense": "bert.pooler.dense",
    "logits": "classifier",
    "mlm_head": "cls.predictions",
    "mlm_head/intermediate_dense": "cls.predictions.transform.dense",
    "mlm_head/intermediate_layer_norm": "cls.predictions.transform.LayerNorm",
}
PARAMETERS = {
    "kernel": "weight",
    "gamma": "weight",
    "embeddings": "weight",
    "bias": "bias",
    "beta": "bias",
    "output_bias": "bias",
}

ARCHITECTURES = {  # of causal language models, by type
    "gpt2": "GPT2LMHeadModel",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

SENTENCE = "It's one of 12 words, or of more."  # that tokenizers are compared by

# Separators of words, and characters that are words, in KerasHub's WordPieceTokenizer.
BETWEEN_WORDS = r"[ \t\n\r\f\p{Cc}\p{Cf}]"
PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
IDEOGRAPHS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}"
    r"\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)


def write(model: keras.Model, folder: Path, classes: Sequence[str], several: bool = False) -> str:
    """Writes weights, configuration and tokenizer.

    Args:
        model: a `BertMaskedLM` or a `BertTextClassifier` with its preprocessor.
        folder: does not exist yet.
        classes: names in the order of a classifier's logits; none for scores.
        several: whether a text has any number of the classes.

    Returns:
        Python that loads it, which `README.md` holds, too.
    """
    folder.mkdir()
    safetensors.numpy.save_file(
        named_tensors(model), folder / "model.safetensors", {"format": "pt"}
    )
    tokenizer = model.preprocessor.tokenizer
    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    files = {
        "config.json": config(model, classes, several),
        "tokenizer.json": json.loads(tokenizer_json(tokenizer)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
            "do_lower_case": tokenizer.lowercase,
            "strip_accents": tokenizer.strip_accents,
            "tokenize_chinese_chars": tokenizer.split_on_cjk,
            "model_max_length": model.preprocessor.sequence_length,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            # A classifier reads their names in a text as words, as Keras's tokenizer does.
            "split_special_tokens": not isinstance(model, keras_nlp.models.BertMaskedLM),
            **special,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    kind = files["config.json"]["architectures"][0]
    lines = [f"model = transformers.{kind}.from_pretrained(FOLDER)"]
    if kind == "BertForMaskedLM":
        lines.append(SET_THE_HEAD)  # the model's answers differ without it
    text = "\n".join(lines)
    (folder / "README.md").write_text(f"```python\n{text}\n```\n", encoding="utf-8")
    return text


def compare(model: keras.Model, folder: Path) -> float:
    """Loads the folder with `transformers`; returns its largest difference from the Keras model.

    Args:
        model: what was written.
        folder: where it was written.

    Raises:
        Differs: it gives other numbers.
    """
    import torch
    import transformers

    is_masked_lm = isinstance(model, keras_nlp.models.BertMaskedLM)
    kind = "BertForMaskedLM" if is_masked_lm else "BertForSequenceClassification"
    exported = getattr(transformers, kind).from_pretrained(folder).eval()
    if is_masked_lm:  # as SET_THE_HEAD
        transform = exported.cls.predictions.transform
        transform.transform_act_fn = torch.nn.GELU()
        transform.LayerNorm.eps = 1e-5
    inputs = random_inputs(model)
    names = {
        "input_ids": "token_ids",
        "attention_mask": "padding_mask",
        "token_type_ids": "segment_ids",
    }
    with torch.no_grad():
        tensors = {name: torch.tensor(inputs[ours]).long() for name, ours in names.items()}
        logits = exported(**tensors).logits.numpy()
    if is_masked_lm:
        logits = np.take_along_axis(logits, inputs["mask_positions"][:, :, np.newaxis], axis=1)
    return require_equal([logits], model(inputs, training=False))


def write_causal_lm(
    model: keras_nlp.models.CausalLM, folder: Path, template: str | None = None
) -> str:
    """Writes a causal language model with KerasHub's exporter: weights, configuration, tokenizer.

    Args:
        model: a causal language model with its preprocessor, in float32.
        folder: does not exist yet.
        template: of the prompts that it was trained on, or None.

    Returns:
        Python that loads it, which `README.md` holds, too.

    Raises:
        DataError: KerasHub has no exporter for the family, or not for the shapes of its attention.
    """
    _require_shapes(model.backbone)
    try:
        model.export_to_transformers(str(folder))
    except ValueError as error:
        if "not implemented" not in str(error):
            raise
        family = type(model).__name__.removesuffix("CausalLM")
        raise DataError(
            f"{family} cannot be exported to transformers; KerasHub {keras_nlp.__version__} "
            "exports Gemma, GPT2, Llama3, Mistral, Qwen and some of their successors"
        ) from error
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["model_type"] in ARCHITECTURES:  # KerasHub, which writes none of these, needs them
        content.setdefault("architectures", [ARCHITECTURES[content["model_type"]]])
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    stop = stop_tokens(model.preprocessor.tokenizer)
    if template:
        stop.add(Template(template, model.preprocessor.tokenizer).end)
    _update(folder / "generation_config.json", {"eos_token_id": sorted(stop)})
    longest = getattr(model.backbone, "max_sequence_length", None)
    length = min(model.preprocessor.sequence_length, longest or math.inf)
    _update(folder / "tokenizer_config.json", {"model_max_length": length})
    chat = None if template is None else CHATS.get(template)
    if chat is not None:
        _write_chat(folder / "tokenizer_config.json", chat, model.preprocessor.tokenizer)
    # KerasHub's tokenizer splits a text into no words, unless `split_words` made it do so.
    splits_words = getattr(model.preprocessor.tokenizer, files.SPLITS_WORDS, False)
    text = json.dumps({files.SPLITS_WORDS: splits_words})  # for runs from this folder
    (folder / files.METADATA).write_text(text, encoding="utf-8")
    path = folder / "tokenizer.json"
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        content["model"]["ignore_merges"] = splits_words  # as Llama 3's
        if not splits_words:
            parts = content["pre_tokenizer"]["pretokenizers"]
            parts[:] = [part for part in parts if part["type"] == "ByteLevel"]
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    start = model.preprocessor.tokenizer.start_token
    lines = [
        "model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)",
        "tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)",
    ]
    if chat is not None:
        lines += [
            'messages = [{"role": "user", "content": PROMPT}]',
            "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
            f"# Trained on turns in this form, which that writes: {form_of(chat, start)!r}",
        ]
    elif start:
        lines.append(f"# Begin a text with {start}")
    else:
        lines.append("# A text has no token at its beginning")
    if template is not None and chat is None:
        lines.append(
            f"# Trained on prompts in this form, which recipes.predict fills: {template!r}"
        )
    text = "\n".join(lines)
    (folder / "README.md").write_text(f"```python\n{text}\n```\n", encoding="utf-8")
    return text


def _require_shapes(backbone: keras.Model) -> None:
    """Refuses attention that KerasHub's exporter would write in other shapes than it has.

    Raises:
        DataError: with the numbers.
    """
    name = type(backbone).__name__.removesuffix("Backbone")
    if name == "Gemma" and backbone.num_key_value_heads > 1:  # it writes the first one
        raise DataError(
            f"this Gemma cannot be exported to transformers: it has {backbone.num_key_value_heads} "
            "key and value heads, and KerasHub exports Gemmas with one"
        )
    if name == "Mistral" and backbone.head_dim is not None:
        exported = backbone.hidden_dim // backbone.num_query_heads
        if backbone.head_dim != exported:
            raise DataError(
                f"this Mistral cannot be exported to transformers: its heads have "
                f"{backbone.head_dim} columns, and KerasHub exports those with {exported}, the "
                "width divided by the heads"
            )


def _write_chat(path: Path, chat: Chat, tokenizer) -> None:
    """Adds the template of a chat and its special tokens to `tokenizer_config.json`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    special = content.get("added_tokens_decoder", {})
    # Those of byte pairs are words of the vocabulary; transformers would read their names as text.
    for name in chat.markers:
        special[str(tokenizer.token_to_id(name))] = {
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    template = jinja_of(chat, tokenizer.start_token)
    _update(path, {"added_tokens_decoder": special, "chat_template": template})


def _update(path: Path, values: dict) -> None:
    """Sets values of a JSON file, which need not exist."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps(content | values, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def compare_causal_lm(model: keras_nlp.models.CausalLM, folder: Path) -> float:
    """Loads the folder with `transformers`; returns its largest difference from the Keras model.

    Args:
        model: what was written.
        folder: where it was written.

    Raises:
        Differs: it gives other numbers, or its tokenizer other tokens.
    """
    import torch
    import transformers

    tokenizer = model.preprocessor.tokenizer
    expected = [int(token) for token in tokenizer(SENTENCE)]
    there = transformers.AutoTokenizer.from_pretrained(folder)
    found = there(SENTENCE, add_special_tokens=False)["input_ids"]
    # transformers has its own rules for SentencePiece.
    is_byte_pairs = isinstance(tokenizer, keras_nlp.tokenizers.BytePairTokenizer)
    if not found or (is_byte_pairs and found != expected):
        raise Differs(
            f"its tokenizer makes the tokens {found[:5]} of a sentence, the Keras model's "
            f"{expected[:5]}"
        )
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    length = min(8, getattr(model.backbone, "max_sequence_length", None) or 8)
    tokens = rng.integers(0, model.backbone.vocabulary_size, (2, length)).astype("int32")
    with torch.no_grad():
        logits = exported(input_ids=torch.tensor(tokens).long()).logits.numpy()
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return require_equal([logits], model(inputs, training=False))


def named_tensors(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights with the names and shapes of `transformers`, float32.

    The matrix of the word embeddings, which also computes the logits, is written once. A masked
    language model's pooler, which `BertForMaskedLM` lacks, is written for users of the encoder. The
    last layer of a model of scores contains their scale.
    """
    tensors = {}
    for weight in model.weights:
        value = np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        owner, name = weight.path.rsplit("/", 1)
        layer = re.fullmatch(r"transformer_layer_(\d+)/(.+)", owner)
        if layer:
            module = f"bert.encoder.layer.{layer[1]}.{ENCODER_LAYER[layer[2]]}"
        else:
            module = OTHERS[owner]
        if name == "kernel":
            # (width, heads, columns) of queries or (heads, columns, width) of the output becomes
            # a matrix (out, in).
            inputs = 2 if owner.endswith("attention_output") else 1
            value = value.reshape(int(np.prod(value.shape[:inputs])), -1).T
        elif name == "bias":
            value = value.reshape(-1)
        tensors[f"{module}.{PARAMETERS[name]}"] = np.ascontiguousarray(value)
    scale = getattr(model, "activation", None)
    if isinstance(scale, keras.layers.Rescaling):
        tensors["classifier.weight"] *= scale.scale
        tensors["classifier.bias"] *= scale.scale
        tensors["classifier.bias"] += scale.offset
    return tensors


def config(model: keras.Model, classes: Sequence[str], several: bool = False) -> dict:
    """Returns the content of `config.json`."""
    backbone = model.backbone
    values = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": backbone.dropout,
        "attention_probs_dropout_prob": backbone.dropout,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "pad_token_id": model.preprocessor.tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if isinstance(model, keras_nlp.models.BertTextClassifier):
        values["architectures"] = ["BertForSequenceClassification"]
        values["classifier_dropout"] = model.dropout
        if not classes and model.num_classes > 1:  # of a recipe that does not name them
            classes = [f"LABEL_{number}" for number in range(model.num_classes)]
        elif not classes:
            values["problem_type"] = "regression"
            classes = ["score"]
        elif several:
            values["problem_type"] = "multi_label_classification"
        values["id2label"] = {str(number): name for number, name in enumerate(classes)}
        values["label2id"] = {name: number for number, name in enumerate(classes)}
    return values


def tokenizer_json(tokenizer) -> str:
    """Converts Keras's BERT tokenizer to the JSON of the `tokenizers` package.

    Keras splits words before it folds case, `tokenizers` folds first: a character whose fold holds
    several words ("…") may get other pieces.

    Args:
        tokenizer: a `keras_nlp.models.BertTokenizer`.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

    pieces = {piece: number for number, piece in enumerate(tokenizer.get_vocabulary())}
    made = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    # As `word_pieces.with_plain_spaces`, in training and in predictions.
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(OTHER_WHITE_SPACE), " "),
        normalizers.Replace(Regex(INVISIBLE), ""),
    ]
    if tokenizer.strip_accents:
        steps += [normalizers.NFD(), normalizers.Replace(Regex(r"\p{Mn}"), "")]
    if tokenizer.lowercase:
        steps += [normalizers.NFKC(), normalizers.Lowercase()]
        # Case folding changes more than lower case.
        steps += [normalizers.Replace("ß", "ss"), normalizers.Replace("ς", "σ")]
    made.normalizer = normalizers.Sequence(steps)
    alone = f"{PUNCTUATION}|{IDEOGRAPHS}" if tokenizer.split_on_cjk else PUNCTUATION
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BETWEEN_WORDS), "removed"),
            pre_tokenizers.Split(Regex(alone), "isolated"),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, pieces[name]) for name in ("[CLS]", "[SEP]")],
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made.to_str()
