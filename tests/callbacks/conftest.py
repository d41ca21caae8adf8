import types

import pytest


class Listener:
    """Keeps the records that it is handed."""

    def __init__(self):
        self.records = []

    def on_record(self, record):
        self.records.append(record)


@pytest.fixture
def listener():
    return Listener()


class OnDevice:
    """Makes numbers that a device has computed; `reads` are the names of those read.

    `seconds`, if set, are added to `clock[0]` when a number is read; `wait`, if set, is called
    before.
    """

    def __init__(self):
        self.reads = []
        self.clock, self.seconds = [0.0], 0.0
        self.wait = lambda: None

    def __call__(self, name, value, on="/job:localhost/replica:0/task:0/device:CPU:0"):
        device = self

        class Number:
            device = on

            def __float__(self):
                device.wait()
                device.reads.append(name)
                device.clock[0] += device.seconds
                return value

        return Number()


@pytest.fixture
def on_device():
    return OnDevice()


class FakeModel:
    """Stands in for the model that a callback uses."""

    def __init__(self):
        self.stop_training = False
        self.optimizer = types.SimpleNamespace()
        self.non_trainable_variables = []
        self.distribute_strategy = types.SimpleNamespace(num_replicas_in_sync=2)
        self.metrics_were_reset = 0
        self.metrics = []

    def reset_metrics(self):
        self.metrics_were_reset += 1

    def save_weights(self, path):
        path.write_bytes(b"weights")

    def _flatten_layers(self):
        return []


@pytest.fixture
def fake_model():
    return FakeModel()
