"""Windows of steps, without servers: what is scheduled, and when it is joined."""

import types

import tensorflow as tf

from distribution import parameter_server


class Coordinator:
    """Notes what is scheduled; nothing is run."""

    def __init__(self, strategy):
        self.events = []
        Coordinator.made = self

    def schedule(self, function, args):
        self.events.append(args[0])

    def join(self):
        self.events.append("join")


def functions(monkeypatch, **more):
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", Coordinator)
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    model = types.SimpleNamespace(optimizer=None, get_metrics_result=dict)
    model.get_metrics_result = lambda: Coordinator.made.events.append("read")
    parameter_server.use_coordinator(
        model, strategy, window=4, steps_per_epoch=6, total_steps=9, **more
    )
    return model


def events():
    found, Coordinator.made.events = Coordinator.made.events, []
    return found


def test_windows_end_where_the_epoch_and_the_run_do(monkeypatch):
    train = functions(monkeypatch, steps_done=1).train_function
    batches = iter(range(1, 100))
    windows = []
    for _ in range(3):
        train(batches)
        windows.append(events())
    # Metrics are read when nothing is under way; each batch is trained on once.
    assert windows == [
        [1, 2, 3, 4, "join", "read"],
        [5, "join", "read"],
        [6, 7, 8, "join", "read"],
    ]


def test_an_evaluation_takes_each_batch_once(monkeypatch):
    test = functions(monkeypatch, steps_done=0).test_function
    batches = iter(range(6))
    seen = []
    for _ in range(2):
        test(batches)
        seen += events()
    assert seen == [0, 1, 2, 3, "join", "read", 4, 5, "join", "read"]
    try:
        test(batches)
    except StopIteration:
        return
    raise AssertionError("it did not end")
