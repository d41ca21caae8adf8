"""Windows of steps, without servers: what is scheduled, and when it is joined."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import parameter_server
from distribution.parameter_server import bound_adam, largest_adam_step


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
    step = types.SimpleNamespace(strategy=strategy, update=None, evaluate=None)
    parameter_server.use_coordinator(
        model, step, window=4, steps_per_epoch=6, total_steps=9, **more
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
    # Metrics are read when nothing is under way; each batch is trained on once. The window in
    # which the run resumes ends where it would have without a stop.
    assert windows == [
        [1, 2, 3, "join", "read"],
        [4, 5, "join", "read"],
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
    with pytest.raises(StopIteration):
        test(batches)


BETAS = [(0.9, 0.98), (0.9, 0.999), (0.5, 0.9)]


def train(gradients, betas, bounded, between=lambda optimizer: None):
    """The weights after each step."""
    weight = keras.Variable(np.zeros(gradients.shape[1]), dtype="float64")
    optimizer = keras.optimizers.AdamW(0.1, beta_1=betas[0], beta_2=betas[1], epsilon=1e-12)
    optimizer.build([weight])
    if bounded:
        bound_adam(optimizer)
    seen = [np.zeros(gradients.shape[1])]
    for gradient in gradients:
        between(optimizer)
        optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")])
        seen.append(keras.ops.convert_to_numpy(weight))
    return np.array(seen)


@pytest.mark.long
@pytest.mark.parametrize("betas", BETAS)
def test_a_single_writer_never_reaches_the_bound(betas):
    """Gradients that come rarely, grow, and keep their sign make Adam's longest steps."""
    rng = np.random.default_rng(0)
    keras.config.set_floatx("float64")
    time = np.arange(60)[:, None]
    gradients = np.concatenate(
        [
            rng.normal(size=(60, 20)) * 10.0 ** rng.uniform(-6, 3, (60, 20)),
            (rng.random((60, 20)) < 0.05) * 1.0,
            # b1 / b2 to the power of the age: the equality of the bound.
            (betas[1] / betas[0]) ** (time * np.linspace(0, 2, 20)),
        ],
        axis=1,
    )
    stock = train(gradients, betas, bounded=False)
    np.testing.assert_array_equal(stock, train(gradients, betas, bounded=True))
    longest = np.abs(np.diff(stock, axis=0)).max() / 0.1
    limit = largest_adam_step(*betas)
    assert limit / 10 < longest <= limit * 1.01


def test_a_mean_without_its_square_moves_no_weight_far():
    """Imitates another worker's half-written update: m is there, v is not."""

    def half_written(optimizer):
        index = [v.path.split("/")[-1] for v in optimizer.variables]
        momentum = next(i for i, name in enumerate(index) if "momentum" in name)
        optimizer.variables[momentum].assign(np.ones(3))

    gradients = np.full((1, 3), 1e-6)
    stock = train(gradients, (0.9, 0.98), False, half_written)
    bounded = train(gradients, (0.9, 0.98), True, half_written)
    assert np.abs(stock).max() > 1000
    assert np.abs(bounded).max() <= 1.02 * 0.1 * largest_adam_step(0.9, 0.98)


def test_what_has_no_bound():
    assert largest_adam_step(0.99, 0.9) == np.inf
    for optimizer in (keras.optimizers.Adam(beta_1=0.99, beta_2=0.9), keras.optimizers.SGD()):
        stock = type(optimizer)
        bound_adam(optimizer)
        assert type(optimizer) is stock
    optimizer = keras.optimizers.AdamW()
    bound_adam(optimizer)
    assert type(optimizer) is not keras.optimizers.AdamW


@pytest.mark.parametrize(
    ("cores", "chosen", "expected"), [(1, "", "4"), (1, "1", "4"), (2, "8", "8"), (6, "", "6")]
)
def test_a_single_core_has_threads_that_may_wait(cores, chosen, expected, monkeypatch):
    """With one thread a process waits forever for the others."""
    monkeypatch.setattr(parameter_server.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", chosen)
    chief = types.SimpleNamespace(task_type="chief", task_id=0)
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TFConfigClusterResolver", lambda: chief)
    found = []

    def strategy(resolver):
        found.append(parameter_server.os.environ["TF_NUM_INTEROP_THREADS"])
        return resolver

    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", strategy)
    assert parameter_server.make_strategy() is chief
    assert found == [expected]
