"""Devices that this machine does not have, as TensorFlow would name them."""

import pytest
import tensorflow as tf

from distribution import devices
from distribution.errors import DistributionError


def test_more_replicas_than_gpus(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"])
    with pytest.raises(DistributionError, match="--replicas 3 is more than the 2 GPUs here"):
        devices.make_logical_devices(3)
