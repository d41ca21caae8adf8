"""How fast a device can be: the rate of a large matrix product, measured here and now."""

import time

import tensorflow as tf

SIDE = 2048  # of the matrices
REPEATS = 3


def matrix_product():
    """A function that multiplies two float32 matrices of `SIDE` x `SIDE`, and waits for it."""
    matrix = tf.fill([SIDE, SIDE], 0.5)
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)))
    float(product())  # traces
    return lambda: float(product())


def operations_per_second() -> float:
    """Floating-point operations a second of such a product; the best of some.

    It takes some tenths of a second, with the threads that this process has, on the device that
    TensorFlow takes first.
    """
    product = matrix_product()
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - begun)
    return 2 * SIDE**3 / min(seconds)


def devices_like_it(replicas: int, workers: int) -> int:
    """How many devices a run has of the kind that `operations_per_second` measures.

    Args:
        replicas: of all workers together; those of one CPU, or of one GPU, share it.
        workers: processes that train.
    """
    gpus = len(tf.config.list_physical_devices("GPU"))
    return workers * max(1, min(gpus, replicas // workers))
