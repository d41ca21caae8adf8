"""A folder for Hugging Face's `transformers`: BertForMaskedLM, BertForSequenceClassification.

Two things in which KerasHub's masked language model differs from `transformers`' have no place in
its `config.json`. The encoder has tanh GELU and layer norms with an epsilon of 1e-12, the head
exact GELU and an epsilon of 1e-5, and the configuration has one of each. The encoder's are written.
So a masked language model's logits differ a little, until its head is set alike (`SET_THE_HEAD`);
a classifier has no such head and differs in nothing.
"""

import json
import re
from pathlib import Path

import keras
import keras_nlp
import numpy as np

from exports import compare
from exports.trained import Trained
from exports.word_piece_json import tokenizer_json
from models.bert import encode

ENCODER_EPSILON = 1e-12
HEAD_EPSILON = 1e-5
DIFFERENT_LINES = 0.02  # share of real lines that may be cut into other pieces

SET_THE_HEAD = """\
transform = model.cls.predictions.transform
transform.transform_act_fn = torch.nn.GELU()  # exact, as the Keras model's head
transform.LayerNorm.eps = 1e-5"""

# Keras's names within a layer, and what they are called there.
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
    "embeddings_layer_norm": "bert.embeddings.LayerNorm",
    "pooled_dense": "bert.pooler.dense",
    "logits": "classifier",
    "mlm_head/intermediate_dense": "cls.predictions.transform.dense",
    "mlm_head/intermediate_layer_norm": "cls.predictions.transform.LayerNorm",
}
EMBEDDINGS = {
    "token_embedding/embeddings": "bert.embeddings.word_embeddings.weight",
    "position_embedding/embeddings": "bert.embeddings.position_embeddings.weight",
    "segment_embedding/embeddings": "bert.embeddings.token_type_embeddings.weight",
    "mlm_head/output_bias": "cls.predictions.bias",
}


def write(trained: Trained, folder: Path) -> dict[str, float]:
    """Writes the folder, reads it again, and compares it with the Keras model.

    Args:
        trained: a run of `bert_mlm` or `text_classification`.
        folder: a folder that is not there yet.

    Returns:
        The largest differences of logits, by what was compared: "logits"; of a masked language
        model also "logits, head as in config.json" and "share of masks with another best fill",
        which hold until its head is set alike; and "share of lines cut into other word pieces".

    Raises:
        RunError: it is no BERT, or differs from the Keras model.
    """
    import safetensors.numpy

    folder.mkdir()
    tensors = named_tensors(trained.model)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    files = {"config.json": config(trained)} | tokenizer_files(trained)
    for name, content in files.items():
        (folder / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
    pieces = trained.tokenizer.get_vocabulary()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), "utf-8")
    return _compare(trained, folder)


def named_tensors(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights under the names and in the shapes of `transformers`, float32.

    The matrix that turns the head's output into logits is that of the word embeddings, and is not
    written twice. A masked language model's pooler, which `BertForMaskedLM` has none of, is for
    whoever reads the encoder alone, as KerasHub does.

    Args:
        model: a `BertMaskedLM` or a `BertTextClassifier` in float32.
    """
    found = {}
    for weight in model.weights:
        value = np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        if weight.path in EMBEDDINGS:
            found[EMBEDDINGS[weight.path]] = value
            continue
        owner, name = weight.path.rsplit("/", 1)
        layer = re.fullmatch(r"transformer_layer_(\d+)/(.+)", owner)
        if layer:
            prefix = f"bert.encoder.layer.{layer[1]}.{ENCODER_LAYER[layer[2]]}"
        else:
            prefix = OTHERS[owner]
        if name == "kernel":
            # (width, heads, columns) of queries, (heads, columns, width) of the output: a matrix
            # of (out, in) there.
            wide = 2 if owner.endswith("attention_output") else 1
            value = value.reshape(int(np.prod(value.shape[:wide])), -1).T
        elif name == "bias":
            value = value.reshape(-1)
        there = {"kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}[name]
        found[f"{prefix}.{there}"] = np.ascontiguousarray(value)
    return found


def config(trained: Trained) -> dict:
    """What `config.json` holds."""
    backbone = trained.model.backbone
    kind = "BertForSequenceClassification" if trained.classes else "BertForMaskedLM"
    found = {
        "architectures": [kind],
        "model_type": "bert",
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": ENCODER_EPSILON,
        "hidden_dropout_prob": backbone.dropout,
        "attention_probs_dropout_prob": backbone.dropout,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "pad_token_id": trained.tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if trained.classes:
        found["classifier_dropout"] = trained.model.dropout
        found["id2label"] = {str(i): name for i, name in enumerate(trained.classes)}
        found["label2id"] = {name: i for i, name in enumerate(trained.classes)}
    return found


def tokenizer_files(trained: Trained) -> dict[str, dict]:
    """`tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`."""
    tokenizer = trained.tokenizer
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")
    }
    return {
        "tokenizer.json": json.loads(tokenizer_json(tokenizer)),
        "tokenizer_config.json": {
            # Takes tokenizer.json as it is; BertTokenizer would build rules of its own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": trained.longest,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "do_lower_case": tokenizer.lowercase,
            "strip_accents": tokenizer.strip_accents,
            "tokenize_chinese_chars": tokenizer.split_on_cjk,
            **special,
        },
        "special_tokens_map.json": special,
    }


def _compare(trained: Trained, folder: Path) -> dict[str, float]:
    """Holds what was written against the model: the encoder through KerasHub's own reader.

    KerasHub reads a Hugging Face folder, but no head; that is computed here as `transformers` does.
    """
    import safetensors.numpy

    what = "huggingface"
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    encoder = keras_nlp.models.BertBackbone.from_preset(str(folder), dtype="float32")
    inputs = {name: trained.inputs[name] for name in encoder.input}
    states = {
        name: keras.ops.convert_to_numpy(value).astype(np.float64)
        for name, value in encoder(inputs, training=False).items()
    }
    found = {}
    if trained.classes:
        logits = _dense(states["pooled_output"], tensors, "classifier")
        found["logits"] = compare.require_same_logits(what, trained.outputs, logits)
    else:
        places = trained.inputs["mask_positions"][:, :, np.newaxis]
        state = np.take_along_axis(states["sequence_output"], places, axis=1)
        logits = _masked_lm_head(state, tensors, approximate=False, epsilon=HEAD_EPSILON)
        found["logits"] = compare.require_same_logits(what, trained.outputs, logits)
        stock = _masked_lm_head(state, tensors, approximate=True, epsilon=ENCODER_EPSILON)
        difference = compare.largest_difference(trained.outputs, stock)
        found["logits, head as in config.json"] = difference
        other = stock.argmax(axis=-1) != trained.outputs.argmax(axis=-1)
        found["share of masks with another best fill"] = float(other.mean())
    other = _differently_cut(trained, folder)
    found["share of lines cut into other word pieces"] = compare.require(
        "tokenizer.json (share of lines)", other, DIFFERENT_LINES
    )
    return found


def _dense(x: np.ndarray, tensors: dict, name: str) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors[f"{name}.bias"]


def _masked_lm_head(state: np.ndarray, tensors: dict, *, approximate: bool, epsilon: float):
    """`BertLMPredictionHead`: dense, GELU, layer norm, the embeddings' matrix, bias."""
    prefix = "cls.predictions.transform"
    x = keras.activations.gelu(_dense(state, tensors, f"{prefix}.dense"), approximate)
    x = keras.ops.convert_to_numpy(x)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    x = x * tensors[f"{prefix}.LayerNorm.weight"] + tensors[f"{prefix}.LayerNorm.bias"]
    embeddings = tensors["bert.embeddings.word_embeddings.weight"].astype(np.float64)
    return x @ embeddings.T + tensors["cls.predictions.bias"]


def _differently_cut(trained: Trained, folder: Path) -> float:
    """The share of the examples of which `tokenizer.json` makes other word pieces than Keras's."""
    import tokenizers

    there = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # WikiText's <unk> is [UNK] there.
    lines = [line.replace("<unk>", "[UNK]") for line in trained.sources or []]
    different = [
        there.encode(line).ids != encode(trained.tokenizer, line).tolist() for line in lines
    ]
    return sum(different) / len(different)


def how_to_load(trained: Trained) -> str:
    """Python that loads the folder it is run in, with `transformers`."""
    if trained.classes:
        return (
            "from transformers import pipeline\n\n"
            'classify = pipeline("text-classification", model=".")\n'
            'print(classify("a small miracle of a film"))'
        )
    return (
        "import torch\nfrom transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline\n\n"
        'model = AutoModelForMaskedLM.from_pretrained(".")\n'
        "# Without these three lines the logits differ by what is said above.\n"
        f"{SET_THE_HEAD}\n"
        'fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained("."))\n'
        'print(fill("the [MASK] of the year"))'
    )
