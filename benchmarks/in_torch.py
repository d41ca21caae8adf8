"""Copies weights of KerasNLP's DistilBERT and GPT-2 into the models of `transformers`."""

from pathlib import Path

import numpy as np

DISTILBERT_LAYER = {
    "self_attention_layer/query": "attention.q_lin",
    "self_attention_layer/key": "attention.k_lin",
    "self_attention_layer/value": "attention.v_lin",
    "self_attention_layer/attention_output": "attention.out_lin",
    "self_attention_layer_norm": "sa_layer_norm",
    "feedforward_intermediate_dense": "ffn.lin1",
    "feedforward_output_dense": "ffn.lin2",
    "feedforward_layer_norm": "output_layer_norm",
}
DISTILBERT = {
    "token_and_position_embedding/token_embedding": "distilbert.embeddings.word_embeddings",
    "token_and_position_embedding/position_embedding": "distilbert.embeddings.position_embeddings",
    "embeddings_layer_norm": "distilbert.embeddings.LayerNorm",
    "pooled_dense": "pre_classifier",
    "logits": "classifier",
}
GPT2_LAYER = {
    "self_attention_layer_norm": "ln_1",
    "self_attention/attention_output": "attn.c_proj",
    "feedforward_layer_norm": "ln_2",
    "feedforward_intermediate_dense": "mlp.c_fc",
    "feedforward_output_dense": "mlp.c_proj",
}
GPT2 = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "layer_norm": "transformer.ln_f",
}
PARAMETERS = {
    "kernel": "weight",
    "gamma": "weight",
    "embeddings": "weight",
    "bias": "bias",
    "beta": "bias",
}


def save_weights(model, path: Path) -> None:
    """Writes the weights of a KerasNLP model by their paths.

    Args:
        model: with the names of weights as KerasNLP gives them in a new process.
        path: of the `.npz`.
    """
    np.savez(
        path, **{weight.path.replace("/", "|"): np.asarray(weight) for weight in model.weights}
    )


def load_weights(path: Path) -> dict[str, np.ndarray]:
    """Returns what `save_weights` wrote; kernels as matrices (in, out), biases as vectors."""
    weights = {}
    with np.load(path) as stored:
        for name in stored:
            value, owner = stored[name], name.replace("|", "/").rpartition("/")[0]
            if name.endswith("kernel"):
                inputs = 2 if owner.endswith("attention_output") else 1
                value = value.reshape(int(np.prod(value.shape[:inputs])), -1)
            elif name.endswith("bias"):
                value = value.reshape(-1)
            weights[name.replace("|", "/")] = value
    return weights


def _owner_and_layer(path: str) -> tuple[str, str, str]:
    """Splits transformer_layer_3/query/kernel into its layer, owner and name."""
    owner, _, name = path.rpartition("/")
    layer = ""
    if owner.startswith("transformer_layer_"):
        layer, _, owner = owner.removeprefix("transformer_layer_").partition("/")
    return layer, owner, name


def fill_distilbert(model, weights: dict[str, np.ndarray]) -> None:
    """Copies `load_weights` of a DistilBertTextClassifier.

    Args:
        model: a `transformers.DistilBertForSequenceClassification`.
        weights: by path.
    """
    state = {}
    for path, value in weights.items():
        layer, owner, name = _owner_and_layer(path)
        module = DISTILBERT.get(owner)
        if layer:
            module = f"distilbert.transformer.layer.{layer}.{DISTILBERT_LAYER[owner]}"
        state[f"{module}.{PARAMETERS[name]}"] = value.T if name == "kernel" else value
    _load(model, state)


def fill_gpt2(model, weights: dict[str, np.ndarray]) -> None:
    """Copies `load_weights` of a GPT2CausalLM; its matrices are (in, out) there too.

    Args:
        model: a `transformers.GPT2LMHeadModel`.
        weights: by path.
    """
    state = {}
    for path, value in weights.items():
        layer, owner, name = _owner_and_layer(path)
        if owner.endswith(("query", "key", "value")):
            if owner.endswith("query"):
                parts = [path.replace("query", part) for part in ("query", "key", "value")]
                joined = np.concatenate([weights[part] for part in parts], axis=-1)
                state[f"transformer.h.{layer}.attn.c_attn.{PARAMETERS[name]}"] = joined
            continue
        module = f"transformer.h.{layer}.{GPT2_LAYER[owner]}" if layer else GPT2[owner]
        state[f"{module}.{PARAMETERS[name]}"] = value
    state["lm_head.weight"] = state["transformer.wte.weight"]
    _load(model, state)


def _load(model, state: dict[str, np.ndarray]) -> None:
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in state.items()}
    model.load_state_dict(tensors, strict=True)


def require_equal(ours: np.ndarray, theirs: np.ndarray, most: float = 1e-3) -> None:
    """Ends the program if logits differ.

    Args:
        ours: of the Keras model.
        theirs: of the same shape.
        most: the largest difference that is allowed.
    """
    difference = np.abs(ours - theirs).max()
    if not difference < most:
        raise SystemExit(f"the logits differ by {difference}, not the same model")
