"""Stands for the GPU: computes XLA's calls of cuDNN's attention on a CPU, as cuDNN defines them."""

import json
import math

import tensorflow as tf


def product(left, right, numbers: dict) -> tf.Tensor:
    """Multiplies as the dimension numbers say: XLA's dot, of one contracted dimension."""
    names = [list("abcd"), list("efgh")]
    pairs = [(numbers[f"lhs_{kind}"], numbers[f"rhs_{kind}"]) for kind in
             ("contracting_dimensions", "batch_dimensions")]  # fmt: skip
    for of_left, of_right in pairs:
        for one, other in zip(of_left, of_right, strict=True):
            names[1][int(other)] = names[0][int(one)]
    (contracted,), batch = pairs[0][0], [names[0][int(each)] for each in pairs[1][0]]
    contracted = names[0][int(contracted)]
    free = [name for part in names for name in part if name not in (contracted, *batch)]
    equation = f"{''.join(names[0])},{''.join(names[1])}->{''.join([*batch, *free])}"
    return tf.einsum(equation, left, right)


def custom_call(
    operands, call_target_name, backend_config, has_side_effect, result_dtypes, result_shapes
):
    """Computes what the call of this name returns, in float32; takes what XLA takes.

    Reads which operands there are, and how they are multiplied, from name and configuration alone.
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
        assert bias.shape == (batch, 1, places, keys)

    def numbers(product: str) -> dict:
        return config[f"{product}_dot_dimension_numbers"]

    # The backward pass is not told of the first product.
    scores = config["fmha_scale"] * tf.einsum("btnh,bsnh->bnts", query, key) + bias
    if not backward:
        told = product(query, key, numbers("bmm1"))
        scores = config["fmha_scale"] * told + bias
    if config["mask_type"] == "CAUSAL":
        seen = tf.linalg.band_part(tf.ones([places, keys], tf.bool), -1, 0)
        scores = tf.where(seen, scores, -math.inf)
    else:
        assert config["mask_type"] == "NO_MASK"
    if not backward:
        assert not left
        found = product(tf.nn.softmax(scores), value, numbers("bmm2"))
        results = [found, tf.reduce_logsumexp(scores, -1)]
    else:
        (found,) = left
        assert found.shape == query.shape == d_found.shape
        shares = tf.exp(scores - statistics[..., None])
        d_shares = product(d_found, value, numbers("bmm2_grad_gemm2"))
        total = tf.einsum("btnh,btnh->bnt", d_found, found)[..., None]
        d_scores = config["fmha_scale"] * shares * (d_shares - total)
        results = [
            product(d_scores, key, numbers("bmm1_grad_gemm2")),
            product(d_scores, query, numbers("bmm1_grad_gemm1")),
            product(shares, d_found, numbers("bmm2_grad_gemm1")),
        ]
    results.append(tf.zeros([0]))
    assert [list(result.shape) for result in results] == [list(shape) for shape in result_shapes]
    return [tf.cast(r, dtype) for r, dtype in zip(results, result_dtypes, strict=True)]
