"""The peak of the model FLOPs utilisation, from given rates and clocks."""

import pytest
import tensorflow as tf

from machine import mfu as module
from machine.mfu import count_devices, measure_peak


class Device:
    """A device of a given rate that takes a millisecond to launch whatever is queued."""

    def __init__(self, rate, memory=float("inf")):
        self.rate, self.memory = rate, memory
        self.seen = []

    def matrix_products(self, side, products, dtype):
        if side > self.memory:
            raise tf.errors.ResourceExhaustedError(None, None, "too large")
        self.seen.append((side, products, dtype))

        def run():
            return 1e-3 + products * 2 * side**3 / self.rate

        return run


@pytest.mark.parametrize(
    ("kind", "rate", "memory", "largest"),
    [
        ("GPU", 8e14, 10**9, 8192),  # a large GPU: a single 2048^3 takes 0.02 ms
        ("GPU", 8e14, 5000, 4096),
        ("GPU", 4e11, 10**9, 2048),  # float64 on a small one
        ("CPU", 2e11, 10**9, 2048),
        ("CPU", 1e9, 10**9, 512),  # emulated float16
    ],
)
def test_the_product_is_sized_for_the_device(kind, rate, memory, largest, monkeypatch):
    device = Device(rate, memory)
    monkeypatch.setattr(module, "matrix_products", device.matrix_products)
    monkeypatch.setattr(module.timeit, "repeat", lambda call, **_: [call()])
    found = [kind] if kind == "GPU" else []
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: found)
    peak = measure_peak("bfloat16")
    assert device.seen[-1][0] == largest and device.seen[-1][2] == "bfloat16"
    if largest == 8192 or kind == "CPU":
        assert peak == pytest.approx(rate, rel=0.05)  # launching does not count


def test_the_peak_of_this_machine_is_a_plausible_rate():
    assert 1e8 < measure_peak("float32") < 1e15


def test_a_chain_of_products_stays_finite():
    assert abs(module.matrix_products(64, 20, "float16")()) < 1e4


@pytest.mark.parametrize(
    ("gpus", "replicas", "workers", "expected"),
    [(0, 4, 1, 1), (0, 4, 2, 2), (1, 2, 1, 1), (4, 4, 1, 4), (4, 2, 1, 2), (2, 4, 2, 4)],
)
def test_replicas_of_one_device_share_it(gpus, replicas, workers, expected, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU"] * gpus)
    assert count_devices(replicas, workers) == expected
