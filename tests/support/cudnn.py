"""Stands for the GPU: computes XLA's calls of cuDNN's attention on a CPU, as cuDNN defines them."""

import json
import math

import tensorflow as tf


def custom_call(
    operands, call_target_name, backend_config, has_side_effect, result_dtypes, result_shapes
):
    """Computes what the call of this name returns, in float32; takes what XLA takes.

    Reads the layout of the operands and which of them there are from name and configuration alone.
    """
    assert not has_side_effect
    config = json.loads(backend_config)["cudnn_fmha_backend_config"]
    assert config["is_flash_attention"] and not config["dropout_rate"]
    batch, heads, places, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    dtypes = {tf.bfloat16: "BF16", tf.float16: "F16"}
    assert config["intermediate_tensor_shape"]["element_type"] == dtypes[operands[0].dtype]
    name = call_target_name.removeprefix("__cudnn$fmha")
    has_bias, backward = name.startswith("ScaleBias"), name.endswith("Backward")
    assert name == "ScaleBias" * has_bias + "Softmax" + "Backward" * backward
    left = [tf.cast(each, tf.float32) for each in operands]
    query, key, value = (left.pop(0) for _ in range(3))
    assert query.shape[:3] == (batch, places, heads) and key.shape[:3] == (batch, keys, heads)
    statistics, d_found = (left.pop(0), left.pop(0)) if backward else (None, None)
    bias = left.pop(0) if has_bias else tf.zeros([1, 1, 1, 1])
    if has_bias:
        assert bias.shape[0] == batch and bias.shape[2:] == (places, keys)
    scores = config["fmha_scale"] * tf.einsum("btnh,bsnh->bnts", query, key) + bias
    if config["mask_type"] == "CAUSAL":
        seen = tf.linalg.band_part(tf.ones([places, keys], tf.bool), -1, 0)
        scores = tf.where(seen, scores, -math.inf)
    else:
        assert config["mask_type"] == "NO_MASK"
    if not backward:
        assert not left
        found = tf.einsum("bnts,bsnh->bnth", tf.nn.softmax(scores), value)
        results = [found, tf.reduce_logsumexp(scores, -1)]
    else:
        (found,) = left
        assert found.shape == query.shape == d_found.shape
        shares = tf.exp(scores - statistics[..., None])
        d_shares = tf.einsum("btnh,bsnh->bnts", d_found, value)
        total = tf.einsum("btnh,btnh->bnt", d_found, found)[..., None]
        d_scores = config["fmha_scale"] * shares * (d_shares - total)
        results = [
            tf.einsum("bnts,bsnh->bnth", d_scores, key),
            tf.einsum("bnts,btnh->bnsh", d_scores, query),
            tf.einsum("bnts,btnh->bnsh", shares, d_found),
        ]
    results.append(tf.zeros([0]))
    assert [list(result.shape) for result in results] == [list(shape) for shape in result_shapes]
    return [tf.cast(r, dtype) for r, dtype in zip(results, result_dtypes, strict=True)]
