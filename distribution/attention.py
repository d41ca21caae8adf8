"""Computes attention by cuDNN on GPUs, in what XLA compiles.

Keras's attention on TensorFlow writes the matrix of all scores to memory, and computes the products
with queries, keys and values one by one. cuDNN has attention in one kernel that never writes the
scores ("flash attention": Dao et al., arXiv 2205.14135), which XLA calls by name; JAX calls it so,
TensorFlow has no function for it. `works()` compares it with the plain computation on this machine
before a run uses it.
"""

import functools
import json
import logging
import math

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

log = logging.getLogger("recipes")

# cuDNN's names of the precisions.
PRECISIONS = {tf.bfloat16: "BF16", tf.float16: "F16"}
# What is added to the score of a masked key; cuDNN subtracts such numbers, so none is the least.
MASKED = {tf.bfloat16: -(2.0**40), tf.float16: -(2.0**15)}
LARGEST_HEAD = 128  # columns of a head
# Which dimensions of its two factors each product sums and goes through, where B is the batch, T
# and S are the places of queries and keys, N the heads and H a head's columns.
FORWARD = {
    "bmm1_dot_dimension_numbers": ((3, 3), ((0, 2), (0, 2))),  # BTNH, BSNH -> BNTS
    "bmm2_dot_dimension_numbers": ((3, 1), ((0, 1), (0, 2))),  # BNTS, BSNH -> BTNH
}
BACKWARD = {
    "bmm1_grad_gemm1_dot_dimension_numbers": ((2, 1), ((0, 1), (0, 2))),  # BNTS, BTNH -> BSNH
    "bmm1_grad_gemm2_dot_dimension_numbers": ((3, 1), ((0, 1), (0, 2))),  # BNTS, BSNH -> BTNH
    "bmm2_grad_gemm1_dot_dimension_numbers": ((2, 1), ((0, 1), (0, 2))),  # BNTS, BTNH -> BSNH
    "bmm2_grad_gemm2_dot_dimension_numbers": ((3, 3), ((0, 2), (0, 2))),  # BTNH, BSNH -> BNTS
}
# Largest difference from float32 that counts as equal, of the largest number. On an H200 it was
# 0.6% (bfloat16, 128 places).
TOLERANCE = 0.02


def has_hopper_gpus() -> bool:
    """Tells whether there are GPUs and all are of the compute capability 9 (H100, H200, GH200).

    They have 80 GB and more, unless one is split in parts. What is done for them alone was tried on
    no others.
    """
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    capabilities = {each.get("compute_capability", (0,))[0] for each in details}
    return capabilities == {9}


def takes(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, mask: tf.Tensor | None = None
) -> bool:
    """Tells whether `attention` can compute this: half precision, fixed shapes, as many keys.

    That is what it was tried on.
    """
    shape = query.shape
    if shape.rank != 4 or None in shape or not shape == key.shape == value.shape:
        return False
    if mask is not None and (
        mask.dtype != tf.bool
        or mask.shape.rank != 4
        or None in mask.shape
        or mask.shape[1] != 1  # one for all heads
    ):
        return False
    places, columns = shape[1], shape[3]
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in PRECISIONS
        and columns % 8 == 0
        and columns <= LARGEST_HEAD
        and places % 2 == 0
    )


def attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    scale: float | None = None,
    mask: tf.Tensor | None = None,
    is_causal: bool = False,
) -> tf.Tensor:
    """Computes softmax(scale x query key^T) value within what XLA compiles for a GPU.

    Args:
        query: of shape (batch, places, heads, columns).
        key: likewise.
        value: likewise.
        scale: of the scores; None for 1 / sqrt(columns).
        mask: which keys a query sees, bool, of a shape that broadcasts to (batch, 1, places,
            places), or None for all. A query that sees none sees all alike.
        is_causal: whether a query also sees no key behind its own place.

    Returns:
        A tensor of the query's shape and dtype. Gradients go to query, key and value.
    """
    batch, places, heads, columns = query.shape
    scale = 1 / math.sqrt(columns) if scale is None else scale
    dtype, kind, bias = query.dtype, "Softmax", []
    if mask is not None:
        if is_causal:
            mask = mask & tf.linalg.band_part(tf.ones([places, places], tf.bool), -1, 0)
            is_causal = False
        kind = "ScaleBiasSoftmax"
        sees = tf.reduce_any(mask, axis=-1, keepdims=True)
        query = tf.where(_heads_third(sees), query, tf.zeros([], dtype))
        mask = mask | ~sees  # of a query of zeros: all keys alike
        added = tf.where(mask, tf.zeros([], dtype), tf.constant(MASKED[dtype], dtype))
        bias = [tf.broadcast_to(added, [batch, 1, places, places])]

    by_head = [batch, heads, places, columns]

    def call(products: dict, operands: list, dtypes: list) -> list[tf.Tensor]:
        suffix = "" if products is FORWARD else "Backward"
        found = gen_xla_ops.xla_custom_call_v2(
            operands=operands,
            call_target_name=f"__cudnn$fmha{kind}{suffix}",
            backend_config=_config(by_head, dtype, scale, is_causal, products),
            has_side_effect=False,
            result_dtypes=[*dtypes, tf.uint8],
            # What a head's softmax needs again is of float32, a number for each place; the last
            # is cuDNN's room to work in.
            result_shapes=[by_head[:3] if each == tf.float32 else by_head for each in dtypes]
            + [[0]],
        )
        return found[:-1]

    @tf.custom_gradient
    def attend(query, key, value):
        found, statistics = call(FORWARD, [query, key, value, *bias], [dtype, tf.float32])
        found = _heads_third(found)

        @tf.custom_gradient
        def gradient(query, key, value, d_found):
            operands = [query, key, value, statistics, d_found, *bias, found]
            parts = [_heads_third(part) for part in call(BACKWARD, operands, [dtype] * 3)]

            def second(*d_parts):  # of a penalty of gradients: what `plain` has
                wide = [tf.cast(each, tf.float32) for each in (query, key, value, d_found)]
                q, k, v, d = wide
                with tf.GradientTape() as outer:
                    outer.watch(wide)
                    with tf.GradientTape() as inner:
                        inner.watch([q, k, v])
                        again = plain(q, k, v, scale, mask, is_causal)
                    first = inner.gradient(again, [q, k, v], d)
                d_first = [tf.cast(each, tf.float32) for each in d_parts]
                return [tf.cast(each, dtype) for each in outer.gradient(first, wide, d_first)]

            return parts, second

        return found, lambda d_found: gradient(query, key, value, d_found)

    return attend(query, key, value)


def _heads_third(tensor: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tensor, [0, 2, 1, 3])


def _config(by_head: list[int], dtype, scale: float, is_causal: bool, products: dict) -> str:
    """Returns what XLA reads of such a call: a `GpuBackendConfig` as JSON.

    Args:
        by_head: batch, heads, places and columns.
        dtype: of query, key and value.
        scale: of the scores.
        is_causal: whether no query sees a key behind its own place.
        products: `FORWARD` or `BACKWARD`.
    """
    numbers = {
        name: {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(each) for each in of_left],
            "rhs_batch_dimensions": [str(each) for each in of_right],
        }
        for name, ((left, right), (of_left, of_right)) in products.items()
    }
    scores = {
        "element_type": PRECISIONS[dtype],
        "dimensions": [str(size) for size in (*by_head[:3], by_head[2])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    config = {
        "algorithm": algorithm,
        "fmha_scale": scale,
        "dropout_rate": 0.0,
        "seed": 42,  # of the dropout that there is none of
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if is_causal else "NO_MASK",
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **numbers,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def plain(query, key, value, scale: float, mask=None, is_causal: bool = False) -> tf.Tensor:
    """Computes what `attention` does, in float32, by two products and a softmax."""
    query, key, value = (tf.cast(tensor, tf.float32) for tensor in (query, key, value))
    scores = scale * tf.einsum("btnh,bsnh->bnts", query, key)
    seen = tf.ones_like(scores, tf.bool) if mask is None else mask
    if is_causal:
        seen &= tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
    scores = tf.where(seen, scores, scores.dtype.min)
    return tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), value)


@functools.cache
def works(precision: str) -> bool:
    """Tells whether cuDNN's attention is right on this machine: compares it with the plain one.

    Takes some seconds at the first call, where the GPUs are of the kind that it was tried on. If it
    fails there, or differs, that is said in one line.

    Args:
        precision: `bfloat16` or `float16`; for any other the answer is no.
    """
    dtype = tf.as_dtype(precision)
    if dtype not in PRECISIONS or not has_hopper_gpus():
        return False
    batch, places, columns = 4, 64, 64
    drawn = tf.random.stateless_normal([4, batch, places, 2, columns], [0, 0])
    query, key, value, d_found = (tf.cast(part, dtype) for part in tf.unstack(drawn))
    mask = tf.sequence_mask([places, places // 2, 1, 0], places)[:, None, None]

    def with_gradients(function) -> list[tf.Tensor]:
        parts = []
        for named in ({"mask": mask}, {"is_causal": True}):
            with tf.GradientTape() as tape:
                tape.watch([query, key, value])
                found = function(query, key, value, 1 / math.sqrt(columns), **named)
            of_found = tf.cast(d_found, found.dtype)
            parts += [found, *tape.gradient(found, [query, key, value], of_found)]
        return [tf.cast(part, tf.float32) for part in parts]

    compiled = tf.function(lambda: with_gradients(attention), jit_compile=True, autograph=False)
    try:
        differences = [
            float(tf.reduce_max(tf.abs(found - expected)) / tf.reduce_max(tf.abs(expected)))
            for found, expected in zip(compiled(), with_gradients(plain), strict=True)
        ]
        problem = None
        if not max(differences) < TOLERANCE:  # also where it is not a number
            problem = f"it differs from the plain one by {max(differences):.1%}"
    except tf.errors.OpError as error:
        problem = str(error).partition("\n")[0]
    if problem:
        log.warning("cuDNN's attention does not work here, so steps take longer: %s", problem[:200])
    return problem is None
