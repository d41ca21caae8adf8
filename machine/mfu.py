"""Measures the peak rate for the model FLOPs utilisation (`mfu`) of training.

`mfu` is the operations of a step, divided by its time and by the devices' peak rate (Chowdhery et
al., "PaLM", arXiv 2204.02311, appendix B). The peak is measured, not the data sheet's: the rate of
a large matrix product in the run's precision.
"""

import timeit
from collections.abc import Callable

import tensorflow as tf

# Side of the square matrices, and number of queued products. The first is enough for a small GPU;
# on a large one the launch of a 2048^3 product takes longer than the product, and only the last
# keeps the device busy.
SIZES = {"CPU": ((512, 1), (2048, 1)), "GPU": ((2048, 4), (4096, 8), (8192, 20))}
LONG_ENOUGH = 0.1  # seconds, after which no larger product is tried


def measure_peak(dtype: str) -> float:
    """Measures the rate of a large matrix product, in operations per second.

    It is the best of three measurements of each size: what else the machine does then lowers it.
    Takes up to a second on a CPU, with the threads of this process, and a few seconds on a GPU.
    Uses smaller matrices if the device has too little free memory.

    Args:
        dtype: of the matrices, such as "bfloat16".
    """
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    rates = []
    for side, products in SIZES[kind]:
        try:
            multiply = matrix_products(side, products, dtype)
            seconds = min(timeit.repeat(multiply, number=1, repeat=3))
        except tf.errors.ResourceExhaustedError:
            break
        rates.append(products * 2 * side**3 / seconds)
        if seconds > LONG_ENOUGH:
            break
    return max(rates)


def matrix_products(side: int, products: int, dtype: str) -> Callable[[], float]:
    """Returns a function that multiplies matrices in a chain, and waits for the result.

    Args:
        side: of the square matrices.
        products: length of the chain.
        dtype: of the matrices.
    """
    # Random numbers: a power-limited GPU is faster on constants.
    matrix = tf.cast(tf.random.stateless_normal([side, side], seed=(0, 0)), dtype)
    matrix /= tf.cast(side**0.5, dtype)  # so that the products neither vanish nor overflow

    @tf.function
    def multiply():
        product = matrix
        for _ in range(products):
            product = tf.matmul(product, matrix)
        return tf.reduce_sum(product)

    float(multiply())  # traces
    return lambda: float(multiply())


def count_devices(replicas: int, workers: int) -> int:
    """Counts the devices of a run, in the unit of `measure_peak`.

    Args:
        replicas: of all workers together; those of one CPU, or of one GPU, share it.
        workers: number of training processes.
    """
    gpus = len(tf.config.list_physical_devices("GPU"))
    return workers * max(1, min(gpus, replicas // workers))
