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
# What is added to the score of a masked key. The backward pass subtracts it again, in float32:
# where a query sees no key, a larger one would leave nothing of the other terms.
MASKED = -(2.0**14)
LARGEST_HEAD = 256  # columns of a head, on a GPU of the compute capability 9
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
# 0.5% (bfloat16, 128 places).
TOLERANCE = 0.02


def has_hopper_gpus() -> bool:
    """Tells whether there are GPUs and all are of the compute capability 9 (H100, H200, GH200).

    They have 80 GB and more. What is done for them alone was tried on no others.
    """
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    capabilities = {each.get("compute_capability", (0,))[0] for each in details}
    return capabilities == {9}


def takes(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, mask: tf.Tensor | None = None
) -> bool:
    """Tells whether `attention` can compute this: half precision, fixed and suitable shapes."""
    if mask is not None and (mask.dtype != tf.bool or mask.shape.rank != 4):
        return False
    shapes = [tensor.shape for tensor in (query, key, value)]
    if any(shape.rank != 4 or None in shape for shape in shapes):
        return False
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    (_, places, *heads), (_, keys, *of_key), (_, _, *of_value) = shapes
    return (
        len(dtypes) == 1
        and query.dtype in PRECISIONS
        and heads == of_key == of_value
        and heads[1] % 8 == 0
        and heads[1] <= LARGEST_HEAD
        and places % 2 == keys % 2 == 0
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
        key: of shape (batch, keys, heads, columns).
        value: likewise.
        scale: of the scores; None for 1 / sqrt(columns).
        mask: which keys a query sees, bool, of a shape that broadcasts to (batch, heads, places,
            keys), or None for all. A query that sees none sees all alike.
        is_causal: whether a query also sees no key behind its own place.

    Returns:
        A tensor of the query's shape and dtype. Gradients go to query, key and value.
    """
    batch, places, heads, columns = query.shape
    keys = key.shape[1]
    scale = 1 / math.sqrt(columns) if scale is None else scale
    dtype, kind, bias = query.dtype, "Softmax", []
    if mask is not None:
        if is_causal:
            mask = mask & tf.linalg.band_part(tf.ones([places, keys], tf.bool), -1, 0)
            is_causal = False
        kind = "ScaleBiasSoftmax"
        # All keys alike, if none is seen.
        sees = _heads_third(tf.reduce_any(mask, axis=-1, keepdims=True))
        query = tf.where(sees, query, tf.zeros([], dtype))
        added = tf.where(mask, tf.zeros([], dtype), tf.constant(MASKED, dtype))
        of_heads = heads if mask.shape[1] == heads else 1
        bias = [tf.broadcast_to(added, [batch, of_heads, places, keys])]

    def call(backward: bool, operands, shapes, dtypes) -> list[tf.Tensor]:
        suffix = "Backward" if backward else ""
        found = gen_xla_ops.xla_custom_call_v2(
            operands=operands,
            call_target_name=f"__cudnn$fmha{kind}{suffix}",
            backend_config=_config(
                (batch, heads, places, keys),
                dtype,
                scale,
                is_causal,
                BACKWARD if backward else FORWARD,
            ),
            has_side_effect=False,
            result_dtypes=[*dtypes, tf.uint8],
            result_shapes=[*shapes, [0]],
        )
        return found[:-1]  # the last is cuDNN's room to work in

    by_head = [batch, heads, places, columns]
    of_keys = [batch, heads, keys, columns]

    @tf.custom_gradient
    def attend(query, key, value):
        found, statistics = call(
            False, [query, key, value, *bias], [by_head, by_head[:3]], [dtype, tf.float32]
        )
        found = _heads_third(found)

        def gradient(d_found):
            return [
                _heads_third(part)
                for part in call(
                    True,
                    [query, key, value, statistics, d_found, *bias, found],
                    [by_head, of_keys, of_keys],
                    [dtype] * 3,
                )
            ]

        return found, gradient

    return attend(query, key, value)


def _heads_third(tensor: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tensor, [0, 2, 1, 3])


def _config(sizes, dtype, scale: float, is_causal: bool, products: dict) -> str:
    """Returns what XLA reads of such a call: a `GpuBackendConfig` as JSON.

    Args:
        sizes: batch, heads, places and keys.
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
        "dimensions": [str(size) for size in sizes],
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
