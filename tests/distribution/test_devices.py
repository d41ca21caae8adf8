"""Devices that this machine does not have, as TensorFlow would name them."""

import pytest
import tensorflow as tf

from distribution import devices
from distribution.errors import DistributionError


def test_more_replicas_than_gpus(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"])
    with pytest.raises(DistributionError, match="--replicas 3 is more than the 2 GPUs here"):
        devices.make_logical_devices(3)


def test_the_peak_is_a_rate_of_this_machine():
    """Between a hundred million and a quadrillion operations a second: units, not speed."""
    from distribution import peak

    assert 1e8 < peak.operations_per_second() < 1e15
    assert peak.devices_like_it(replicas=4, workers=1) == 1  # logical CPUs share one
    assert peak.devices_like_it(replicas=4, workers=2) == 2
