"""Which of our repairs of Keras the installed Keras still needs: `make check-upstream`.

    python -m distribution.check_upstream            every check, each in processes of its own
    python -m distribution.check_upstream NAME       one check, in this process

A check is a minimal piece of Keras without the repair; its failure shows that the repair is still
needed. With the repair (`--repaired`) the same piece must work, which the tests hold. Exit status
0 whatever was found, 1 if a check could not run. Takes two to three minutes, on the CPU.
"""

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable

from distribution import doctor, launch

CHECK_SECONDS = 90  # for one check; on an idle machine each takes 5 to 20
LEAVE_SECONDS = 20  # how long a worker that is done waits for the other


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.check_upstream",
        description="Which of our repairs of Keras the installed Keras still needs.",
    )
    parser.add_argument("name", nargs="?", choices=list(CHECKS), help="run one check, here")
    parser.add_argument("--repaired", action="store_true", help="with the repair in place")
    parser.add_argument("--run-dir", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.name and (options.run_dir or CHECKS[options.name].workers == 1):
        return run_here(options.name, options.repaired, options.run_dir)
    failed = False
    for name in [options.name] if options.name else CHECKS:
        line, ran = check(name, options.repaired)
        failed = failed or not ran
        print(line, flush=True)
    return int(failed)


def check(name: str, repaired: bool) -> tuple[str, bool]:
    """Runs a check in processes of its own.

    Returns:
        A line that says what was found, and whether the check could run.
    """
    environ = doctor.bare_environment() | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    module = ["distribution.check_upstream", name, *(["--repaired"] if repaired else [])]
    with tempfile.TemporaryDirectory(prefix="check-upstream-") as folder:
        workers = CHECKS[name].workers
        status, text = doctor.run_processes(workers, module, folder, environ, CHECK_SECONDS)
        try:
            found = json.loads(pathlib.Path(folder, "found-0.json").read_text())
        except (OSError, ValueError):
            found = None
    if status != 0 or found is None:
        end = f"no end within {CHECK_SECONDS} s" if status is None else f"exit status {status}"
        last = " / ".join(text.strip().splitlines()[-3:])
        return f"could not run: {name} ({end}: {last})", False
    return describe(name, found["fault"]), True


def describe(name: str, fault: str | None) -> str:
    """The line of a check that ran."""
    about = CHECKS[name].about
    if fault is None:
        return f"no longer needed: {name}, {about}"
    return f"still needed: {name}, {about} ({fault})"


def run_here(name: str, repaired: bool, folder: pathlib.Path | None) -> int:
    """Runs a check in this process, which may be one of two workers."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    if CHECKS[name].workers == 1:  # two replicas in this process
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
    fault = CHECKS[name].run(repaired)
    if folder is None:
        print(describe(name, fault))
        return 0
    config = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')
    part = folder / f"part-{config['task']['index']}.json"
    part.write_text(json.dumps({"fault": fault}))
    part.rename(folder / f"found-{config['task']['index']}.json")
    # Who leaves first cuts the other off, and that would be what the other finds.
    end = time.monotonic() + LEAVE_SECONDS
    while len(list(folder.glob("found-*"))) < CHECKS[name].workers and time.monotonic() < end:
        time.sleep(0.1)
    return 0


# --- What the checks share ---


def repair(name: str) -> Callable:
    """A function of `distribution.keras_compat`, which is imported only where it is used."""
    return getattr(importlib.import_module("distribution.keras_compat"), name)


def attempt(run: Callable[[], object]) -> str | None:
    """Runs a piece of Keras; its error in one line, or None."""
    try:
        run()
    except Exception as fault:  # whatever Keras raises is what we want to know
        text = re.sub("\x1b\\[[0-9;]*m", "", str(fault))  # Keras writes in bold
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        while len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
            lines.pop(0)
        return f"{type(fault).__name__}: {lines[0] if lines else ''}"[:120]
    return None


def two_replicas():
    """MirroredStrategy over the two logical CPUs of this process."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def numbers():
    """Inputs (16, 3) and targets (16, 1): two batches of 8, different on each replica."""
    import numpy as np

    x = (np.arange(48).reshape(16, 3) * 7 % 11 - 4.0).astype("float32")
    y = (np.arange(16)[:, None] % 5 + 1.0).astype("float32")
    return x, y


def batches(x, y):
    """The data set of global batches of 8, of which each replica takes its part."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)


def linear_model(optimizer, loss="mse", **compile_options):
    """The model y = x w with w = 0 in the beginning. Call it under the strategy's scope."""
    import keras

    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    return model


def weights_of(model):
    """The weights w, shape (3,)."""
    import keras

    return keras.ops.convert_to_numpy(model.trainable_variables[0])[:, 0]


def gradient(x, y, w):
    """The true gradient of the mean of (x w - y)^2 over a global batch; shape (3,)."""
    return 2 * ((x @ w[:, None] - y) * x).mean(0)


def differs(what: str, found, true) -> str | None:
    """A line if a value is not the true one."""
    import numpy as np

    if np.allclose(found, true, rtol=1e-4, atol=1e-6):
        return None
    show = [np.array2string(np.asarray(value), precision=3) for value in (found, true)]
    return f"{what} {show[0]} instead of {show[1]}"


# --- The checks: None, or how Keras fails ---


def two_workers_fit(build: bool, average_logs: bool) -> str | None:
    """Two steps of `fit` on two workers, against the same steps by hand."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if average_logs:
        repair("average_logs")()
    x, y = numbers()
    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(0.01))
    data, logs = batches(x, y), {}

    def fit():
        if build:
            repair("build")(model, data)
        logs.update(model.fit(data, verbose=0, shuffle=False).history)

    fault = attempt(fit)
    if fault:
        return fault
    w, losses = np.zeros(3), []
    for part in (slice(0, 8), slice(8, 16)):
        losses.append(((x[part] @ w[:, None] - y[part]) ** 2).mean())
        w = w - 0.01 * gradient(x[part], y[part], w)
    return differs("weights", weights_of(model), w) or differs(
        "loss", logs["loss"][0], np.mean(losses)
    )


def build_on_two_workers(repaired: bool) -> str | None:
    """The first batch of `fit`, from which a model is built."""
    return two_workers_fit(build=repaired, average_logs=True)


def average_logs(repaired: bool) -> str | None:
    """What `fit` logs."""
    return two_workers_fit(build=True, average_logs=repaired)


def central_storage():
    """CentralStorageStrategy over the two logical CPUs of this process."""
    import tensorflow as tf

    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )


def add_in_place(repaired: bool) -> str | None:
    """A metric over two batches, where all replicas share one copy of its sums."""
    import keras

    strategy = central_storage()
    if repaired:
        repair("add_in_place")()
    x, y = numbers()
    with strategy.scope():
        metrics = [keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")]
        model = linear_model(keras.optimizers.SGD(0.0), metrics=metrics)
    found = {}

    def evaluate():
        found.update(model.evaluate(batches(x, y), verbose=0, return_dict=True))

    fault = attempt(evaluate)
    return fault or differs("mean", found["error"], (y**2).mean())


def leave_data_on_coordinator(repaired: bool) -> str | None:
    """The batches that `fit` takes from a data set beside a parameter server."""
    import keras
    import tensorflow as tf

    ports = launch.find_free_ports(2)
    cluster = {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]}
    servers = [tf.distribute.Server(cluster, job_name=task, task_index=0) for task in cluster]
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
    )
    if repaired:
        repair("leave_data_on_coordinator")()
    taken = []

    def take_batch(iterator):  # in place of a step that a worker would do
        taken.append(next(iterator))
        return {"loss": 0.0}

    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(0.01))
        model.make_train_function = lambda force=False: setattr(model, "train_function", take_batch)
    data = batches(*numbers())
    repair("build")(model, data)
    fault = attempt(lambda: model.fit(data, steps_per_epoch=2, verbose=0))
    del servers
    return fault or differs("number of batches:", len(taken), 2)


def share_dropout_seeds(repaired: bool) -> str | None:
    """A step with dropout."""
    import keras

    strategy = central_storage()
    if repaired:
        repair("share_dropout_seeds")()
    x, y = numbers()
    with strategy.scope():
        layers = [keras.layers.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(optimizer="sgd", loss="mse")
    return attempt(lambda: model.fit(batches(x, y), verbose=0))


def clip_after_reduction(repaired: bool) -> str | None:
    """The length of a step whose gradient was clipped."""
    import keras
    import numpy as np

    x, y = numbers()
    y[4:8] *= -1  # so that the replicas' gradients point in different directions
    with two_replicas().scope():
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.1)
        if repaired:
            repair("reduce_before_all_else")(optimizer)
        model = linear_model(optimizer)
    fault = attempt(lambda: model.fit(batches(x[:8], y[:8]), verbose=0))
    true = gradient(x[:8], y[:8], np.zeros(3))
    true *= -0.1 / np.linalg.norm(true)
    return fault or differs("a step clipped to 0.1:", weights_of(model), true)


def overflow_on_replica_1(repaired: bool) -> str | None:
    """A step in which replica 1 alone overflows, in half precision."""
    import keras
    import numpy as np

    keras.config.set_dtype_policy("mixed_float16")
    x, y = numbers()
    x, y = x[:8] / 100, y[:8] / 100  # far from an overflow, under the first loss scale of 2^15 too
    with two_replicas().scope():
        optimizer = keras.optimizers.SGD(0.01)
        if repaired:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            repair("reduce_before_all_else")(optimizer)
        model = linear_model(optimizer)
    fault = attempt(lambda: model.fit(batches(x, y), verbose=0))
    before = weights_of(model)
    if not fault and (not np.isfinite(before).all() or not before.any()):
        raise RuntimeError(f"a step without an overflow should change the weights: {before}")
    x[4:] = 60000.0
    fault = fault or attempt(lambda: model.fit(batches(x, y), verbose=0))
    return fault or differs("weights after a step to skip:", weights_of(model), before)


def repeated_rows(repaired: bool) -> str | None:
    """Adam's first step for a row of an embedding that a batch looks up twice."""
    import keras
    import numpy as np
    import tensorflow as tf

    table = keras.Variable(np.zeros((2, 1)), dtype="float32")
    optimizer = keras.optimizers.Adam(0.1)
    if repaired:
        repair("reduce_before_all_else")(optimizer)
    gradient = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([2, 1]))
    fault = attempt(lambda: optimizer.apply([gradient], [table]))
    return fault or differs("a step", keras.ops.convert_to_numpy(table)[:, 0], [-0.1, 0.0])


def start_in_mid_epoch(repaired: bool) -> str | None:
    """A run that is killed after 6 of 8 batches, and goes on."""
    import keras
    import numpy as np
    import tensorflow as tf

    seen = []

    class KillAfterSix(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    class StartAtSix(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            repair("start_in_mid_epoch")(6)

    ones = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices(ones).batch(1).repeat()

    def fit(data, *callbacks):
        model = linear_model(keras.optimizers.SGD(0.01))
        model.fit(data, steps_per_epoch=8, shuffle=False, verbose=0, callbacks=list(callbacks))

    def fit_again(folder):
        if repaired:  # the repair counts on endless data that begin where the run stands
            fit(data.skip(6), StartAtSix(), Note())
        else:
            fit(data, keras.callbacks.BackupAndRestore(folder, save_freq=1), Note())

    with tempfile.TemporaryDirectory(prefix="check-upstream-") as folder:
        try:
            fit(data, keras.callbacks.BackupAndRestore(folder, save_freq=1), KillAfterSix())
        except KeyboardInterrupt:
            pass
        fault = attempt(lambda: fit_again(folder))
    return fault or differs("number of batches after 6 of 8:", len(seen), 2)


def build(repaired: bool) -> str | None:
    """What a checkpoint's numbers could be put into when `fit` begins, without a strategy."""
    import keras

    data = batches(*numbers())
    metrics = [keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")]
    model = linear_model(keras.optimizers.Adam(0.01), metrics=metrics)
    counts = []

    class Count(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if repaired:
                repair("build")(model, data)
            self.count()

        def on_train_end(self, logs=None):
            self.count()

        def count(self):
            counts.append(len(model.metrics_variables) + len(model.optimizer.variables))

    fault = attempt(lambda: model.fit(data, verbose=0, callbacks=[Count()]))
    return fault or differs("number of variables when fit begins:", *counts)


def accumulate(repaired: bool) -> str | None:
    """Two batches on two replicas, one update."""
    import keras
    import numpy as np

    x, y = numbers()
    made = []

    def fit():
        options = {} if repaired else {"gradient_accumulation_steps": 2}
        loss = "mse"
        if repaired:
            global_loss = importlib.import_module("distribution.global_loss")
            loss = global_loss.GlobalMean(keras.losses.MeanSquaredError())
        with two_replicas().scope():
            model = linear_model(keras.optimizers.SGD(0.01, **options), loss=loss)
            if repaired:
                importlib.import_module("distribution.accumulate").accumulate(model, 2)
        steps = {"steps_per_epoch": 1} if repaired else {}
        model.fit(batches(x, y), verbose=0, shuffle=False, **steps)
        made.append(model)

    fault = attempt(fit)
    if fault:
        return fault
    return differs("weights", weights_of(made[0]), -0.01 * gradient(x, y, np.zeros(3)))


@dataclasses.dataclass
class Check:
    """A check.

    Attributes:
        run: takes whether the repair is in place; None, or how Keras fails.
        about: what cannot work without the repair.
        workers: processes that it takes.
    """

    run: Callable[[bool], str | None]
    about: str
    workers: int = 1


CHECKS = {
    "build_on_two_workers": Check(build_on_two_workers, "build: fit on two workers", workers=2),
    "average_logs": Check(average_logs, "logs of two workers", workers=2),
    "add_in_place": Check(add_in_place, "metrics under central storage"),
    "leave_data_on_coordinator": Check(
        leave_data_on_coordinator, "a data set beside a parameter server"
    ),
    "share_dropout_seeds": Check(share_dropout_seeds, "dropout under central storage"),
    "clip_after_reduction": Check(
        clip_after_reduction, "reduce_before_all_else: clipping on two replicas"
    ),
    "overflow_on_replica_1": Check(
        overflow_on_replica_1, "reduce_before_all_else: an overflow on replica 1 only"
    ),
    "repeated_rows": Check(
        repeated_rows, "reduce_before_all_else: a row of an embedding that is looked up twice"
    ),
    "start_in_mid_epoch": Check(start_in_mid_epoch, "going on in mid-epoch"),
    "build": Check(build, "metrics and optimizer that exist when fit begins"),
    "accumulate": Check(accumulate, "gradient accumulation on two replicas"),
}


if __name__ == "__main__":
    sys.exit(main())
