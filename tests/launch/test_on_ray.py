"""Runs on a Ray cluster of three nodes, on the loopback address: nodes come and go."""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from launch import on_ray
from tests.support import processes, strategy_run

ray_cluster = pytest.mark.ray
TIMEOUT = 400
STEPS = 24
OPTIONS = strategy_run.TINY_OLIGOS | dict(
    epochs=6, max_steps=STEPS, checkpoint_every=5, global_batch_size=12
)
del OPTIONS["base_learning_rate"], OPTIONS["lr_scaling"]
RATE = 0.0001  # small: Adam magnifies the rounding of gradients that are nearly zero


class Nodes:
    """A Ray cluster on this machine: a head without places, and nodes with one each."""

    NODE = dict(object_store_memory=80_000_000, node_ip_address="127.0.0.1")

    def __init__(self, folder: Path, count: int = 3):
        from ray.cluster_utils import Cluster

        self.folder, self.started, self.words = folder, [], []
        head = self.NODE | dict(num_cpus=0, include_dashboard=False)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(count)]

    def add(self):
        return self.cluster.add_node(num_cpus=1, **self.NODE)

    def remove(self, node) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    def start(self, *words, workers="3", options=(), **environ) -> subprocess.Popen:
        """Starts a driver, which runs a module."""
        address = ["--address", self.cluster.address, "--workers", workers, *options]
        process = processes.start(
            *("-m", "launch.on_ray", *address, "-m", *map(str, words)),
            PYTHONPATH=os.pathsep.join([str(self.folder), processes.ENVIRONMENT["PYTHONPATH"]]),
            **environ,
        )
        said = []
        reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
        reader.start()
        process.said, process.reader = said, reader
        self.started.append(process)
        return process

    def train(self, run: Path, workers: str = "1:3", options=(), **environ) -> subprocess.Popen:
        words = ["ray_recipe", "recipes.dna_melting", *data_of(run), "--strategy", "multi_worker"]
        words += ["--base-learning-rate", RATE, "--lr-scaling", "linear", "--run-dir", run]
        environ = {"RECIPES_TEST_STEP_SECONDS": "0.3"} | environ
        return self.start(*words, workers=workers, options=options, **environ)

    def close(self) -> None:
        for process in self.started:
            process.kill()
        self.cluster.shutdown()


def data_of(run: Path) -> list[str]:
    """The options of a run, but for its strategy and its rate."""
    data = strategy_run.data_options("dna_melting", run.parent)
    words = []
    for name, value in (OPTIONS | data | {"cache_dir": run.parent / "cache"}).items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@pytest.fixture
def nodes(request, tmp_path, monkeypatch):
    # Ray's own processes listen on the loopback address only where the nodes have that.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_ENABLE_METRICS_COLLECTION", "0")
    made = Nodes(tmp_path, getattr(request, "param", 3))
    try:
        yield made
    finally:
        made.close()
    assert not alive(tmp_path), "processes were left behind"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run on one device, from its first step to its last without a stop."""
    run = tmp_path_factory.mktemp("ray") / "whole"
    strategy_run.write_data(run.parent)
    train_whole(run)
    return run


def train_whole(run: Path) -> None:
    rate = ["--base-learning-rate", str(3 * RATE), "--lr-scaling", "none", "--strategy", "none"]
    processes.run("-m", "recipes.dna_melting", *data_of(run), *rate, "--run-dir", str(run))


def alive(folder: Path) -> list[str]:
    """The command lines of processes that have to do with a folder."""
    found = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if str(folder) in line]


def step_of(run: Path) -> int:
    """The newest step that was logged."""
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]).get("step", 0)
    except (OSError, ValueError, IndexError):
        return 0


def wait_for(condition, process, seconds=TIMEOUT) -> float:
    """Waits; returns after how many seconds it came true."""
    began = time.monotonic()
    while not condition():
        assert process.poll() is None and time.monotonic() - began < seconds, "".join(process.said)
        time.sleep(0.05)
    return time.monotonic() - began


def end(process, status=0, seconds=TIMEOUT) -> str:
    process.wait(timeout=seconds)
    process.reader.join(timeout=10)
    said = "".join(process.said)
    assert process.returncode == status, said[-5000:]
    return said


def says(process, text) -> bool:
    return any(text in line for line in list(process.said))


def parts(run: Path) -> list[int]:
    """The number of workers of each part of the run, in order."""
    return [part["workers"] for part in processes.results(run)["workers_by_step"]]


def assert_equal_runs(whole: Path, run: Path) -> None:
    processes.assert_equal_tensors(whole, run)
    ours, theirs = processes.results(whole), processes.results(run)
    assert theirs["steps"] == ours["steps"] == STEPS
    assert theirs["global_batch_size"] == 12
    assert theirs["learning_rate"] == pytest.approx(ours["learning_rate"], rel=1e-12)
    assert theirs["test"] == pytest.approx(ours["test"], rel=1e-9, abs=1e-9)
    losses, others = (
        [r["loss"] for r in processes.records(f) if r["event"] == "step"] for f in (whole, run)
    )
    assert others == pytest.approx(losses, rel=1e-9, abs=1e-9)


# --- Training ---


@ray_cluster
def test_three_workers_equal_one(nodes, whole):
    run = whole.parent / "three"
    said = end(nodes.train(run, "3", RECIPES_TEST_STEP_SECONDS="0"))
    assert_equal_runs(whole, run)
    assert parts(run) == [3] and f"step {STEPS}" in said
    assert (run / "worker-2.log").exists()


@ray_cluster
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_node_is_lost_in_mid_epoch(comes_back, nodes, whole):
    run = whole.parent / f"lost-{comes_back}"
    process = nodes.train(run)
    wait_for(lambda: step_of(run) >= 7, process)
    nodes.remove(nodes.nodes[1])
    seconds = wait_for(lambda: says(process, "starting 2 workers"), process)
    print(f"actors start again {seconds:.1f} s after the node's death")
    step = step_of(run)
    seconds += wait_for(lambda: step_of(run) > step, process)
    print(f"the next step came {seconds:.1f} s after the node's death")
    if comes_back:
        nodes.add()
    said = end(process)
    assert seconds < 120  # most of it imports TensorFlow: less than 60 where nothing else runs
    assert_equal_runs(whole, run)
    assert parts(run) == ([3, 2, 3] if comes_back else [3, 2])
    assert "Traceback" not in said and "is lost" in said
    assert ("slots for 3 workers: asking the processes to save" in said) == comes_back


@ray_cluster
def test_the_chief_dies_while_it_writes_a_checkpoint(nodes, whole):
    run = whole.parent / "saving"
    said = end(nodes.train(run, RECIPES_TEST_STEP_SECONDS="0", RECIPES_TEST_KILL_AT_SAVE="2"))
    assert "worker 0 was killed by SIGKILL" in said
    assert said.count("starting 3 workers") == 2
    assert_equal_runs(whole, run)
    assert parts(run) == [3]


@ray_cluster
@pytest.mark.parametrize("nodes", [1], indirect=True)
def test_too_few_places_are_waited_for(nodes, whole):
    run = whole.parent / "waits"
    process = nodes.train(run, "2:3", RECIPES_TEST_STEP_SECONDS="0")
    line = "slots for 1 of at least 3 workers; waiting for nodes"
    wait_for(lambda: "".join(process.said).count(line) == 1, process)
    between = wait_for(lambda: "".join(process.said).count(line) == 2, process)
    assert 25 < between < 40
    nodes.add(), nodes.add()
    end(process)
    assert_equal_runs(whole, run)


@ray_cluster
def test_a_cluster_that_is_gone_ends_with_the_command_that_resumes(nodes, whole):
    run = whole.parent / "gone"
    process = nodes.train(run, "3")
    wait_for(lambda: step_of(run) >= 7, process)
    for node in nodes.cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    said = end(process, 75)
    assert "does not answer" in said
    assert re.search(r"Resume with:\n  \S*python\S* -m launch.on_ray .*--run-dir \S+gone", said)


# --- Supervision, of small modules in place of recipes ---

NOTES = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
config = json.loads(os.environ["TF_CONFIG"])
index, count = config["task"]["index"], len(config["cluster"]["worker"])
(run / f"pid-{index}-{time.time_ns()}").write_text(f"{os.getpid()} {count}")
"""


def write_module(folder: Path, code: str) -> None:
    (folder / "fake.py").write_text(NOTES + code)


def starts(run: Path) -> list[int]:
    """The number of workers that each process knew of, in the order of their starts."""
    found = sorted(run.glob("pid-0-*"))
    return [int(path.read_text().split()[1]) for path in found]


@ray_cluster
@pytest.mark.parametrize("status, count", [(1, 2), (2, 1), (75, 1)])
def test_what_is_tried_again(status, count, nodes, tmp_path):
    """A failure, as often as it is allowed; neither wrong options nor a stop."""
    write_module(tmp_path, f"print('the last word', flush=True); sys.exit({status} * (index < 2))")
    options = ["--max-failures", "2"]
    process = nodes.start("fake", "--run-dir", tmp_path / "r", options=options)
    said = end(process, status, 120)
    assert len(starts(tmp_path / "r")) == count
    assert (status == 75) == ("Resume with" in said)
    assert (status == 1) == ("2 failures without a checkpoint" in said)
    if status != 75:
        assert f"worker 0 ended with exit status {status} (the last word)" in said


@pytest.mark.parametrize("when", ["release", "reserve"])
def test_a_request_between_two_starts_stops_the_run(when, monkeypatch, capsys, tmp_path):
    """The processes have saved, since a node leaves, and are not started again."""
    monkeypatch.setattr(on_ray, "request_resources", lambda bundles: None, raising=False)
    run = object.__new__(on_ray.RayRun)
    command = ["python", "-m", "launch.on_ray"]
    run.options = argparse.Namespace(command=command, run_dir=tmp_path, environment={})
    run.bundle, run.most, starts = {}, 2, []

    def ask():
        run.request = signal.SIGTERM

    def reserve():
        if starts and when == "reserve":
            ask()
        return run.request is None

    methods = {
        "reserve": reserve,
        "checkpoint": lambda: "",
        "start": lambda: starts.append(1),
        "supervise": lambda before: None,
        "release": ask if when == "release" else lambda: None,
    }
    for name, method in methods.items():
        monkeypatch.setattr(run, name, method, raising=True)
    assert run.run() == 75 and starts == [1]
    assert "Resume with:\n  python -m launch.on_ray" in capsys.readouterr().err
    assert run.options.environment == {"KERAS_RECIPES_RESTARTED": "1"}


@ray_cluster
def test_sigterm_asks_the_processes_and_a_second_one_kills_them(nodes, tmp_path):
    write_module(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: (run / f'asked-{index}').touch())\n"
        "(run / f'ready-{index}').touch()\n"
        "time.sleep(300)",
    )
    run = tmp_path / "r"
    process = nodes.start("fake", "--run-dir", run)
    wait_for(lambda: len(list(run.glob("ready-*"))) == 3, process)
    process.terminate()
    wait_for(lambda: len(list(run.glob("asked-*"))) == 3, process)
    assert alive(run)
    time.sleep(1)
    process.terminate()
    end(process, 128 + signal.SIGTERM, 60)
    assert not alive(run)


@ray_cluster
def test_a_node_that_ray_takes_away_saves_first(nodes, tmp_path):
    write_module(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "(run / f'ready-{index}').touch()\n"
        "time.sleep(300 if count == 3 else 0)",
    )
    run = tmp_path / "r"
    process = nodes.start("fake", "--run-dir", run, workers="1:3")
    wait_for(lambda: len(list(run.glob("ready-*"))) == 3, process)
    drain(nodes, nodes.nodes[0])
    said = end(process, 0, 120)
    assert "Ray is draining the node of 127.0.0.1:" in said
    assert starts(run) == [3, 1]  # whether 2 can share the global batch is not known


def drain(nodes, node) -> None:
    """Announces that a node will be preempted, as an autoscaler does."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = GcsClient(address=nodes.cluster.address).drain_node(
        node.node_id, reason, "spot", int(time.time() * 1000) + 60_000
    )
    assert accepted, why_not


@ray_cluster
def test_a_driver_that_is_killed_leaves_no_process_behind(nodes, tmp_path):
    write_module(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)")
    run = tmp_path / "r"
    process = nodes.start("fake", "--run-dir", run)
    wait_for(lambda: len(list(run.glob("pid-*"))) == 3, process)
    process.kill()
    began = time.monotonic()
    while alive(run) and time.monotonic() - began < 30:
        time.sleep(0.1)
    assert not alive(run)
    print(f"all processes ended {time.monotonic() - began:.1f} s after the driver")


# --- Without a cluster ---


def test_folders_that_are_not_shared(tmp_path):
    worker = on_ray.Worker(argparse.Namespace(run_dir=tmp_path), 1)
    for text in (None, "starting 2 workers, 1\n"):
        if text:
            (tmp_path / "worker-0.log").write_text(text)
        with pytest.raises(OSError, match="the nodes do not share --run-dir"):
            worker.prepare("starting 2 workers, 2", 2)


def test_a_lock_that_a_lost_node_holds_is_waited_for(tmp_path, monkeypatch):
    """An NFS server keeps it for a while."""
    monkeypatch.setattr(on_ray, "ray", mock.MagicMock())
    options = argparse.Namespace(
        run_dir=tmp_path, workers=(1, 2), cpus_per_worker=1, gpus_per_worker=0
    )
    run = on_ray.RayRun(options)
    run.await_head, run.group = mock.Mock(), None
    (tmp_path / ".lock").touch()
    with open(tmp_path / ".lock") as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = pool.submit(run.release)
        time.sleep(1)
        assert not release.done()
        fcntl.flock(held, fcntl.LOCK_UN)
        release.result(timeout=30)


@pytest.fixture
def ray_run(tmp_path, monkeypatch):
    """Returns a run of MIN:MAX workers, with the global batch of its options.json."""
    monkeypatch.setattr(on_ray, "ray", mock.MagicMock())

    def make(least, most, batch, replicas=1):
        content = {"resolved": {"global_batch_size": batch}, "replicas_per_worker": replicas}
        if batch is not None:
            (tmp_path / "options.json").write_text(json.dumps(content))
        options = argparse.Namespace(
            run_dir=tmp_path, workers=(least, most), cpus_per_worker=1, gpus_per_worker=0
        )
        return on_ray.RayRun(options)

    return make


@pytest.mark.parametrize(
    "least, most, batch, slots, largest, needed",
    [
        (2, 3, None, 2, 0, 3),  # a new run: divisors of 3
        (3, 4, 128, 3, 0, 4),
        (1, 4, 128, 3, 2, 1),
        (3, 3, 128, 3, 0, None),
        (3, 3, 129, 3, 3, 3),
    ],
)
def test_workers_that_can_share_the_batch(least, most, batch, slots, largest, needed, ray_run):
    run = ray_run(least, most, batch)
    assert run.largest(slots) == largest
    assert run.counts()[:1] == ([] if needed is None else [needed])
    assert (run.batch_problem() is None) == (needed is not None)


def test_a_batch_that_no_number_of_workers_shares(ray_run, monkeypatch, capsys):
    """It would be waited for: no number of nodes helps."""
    made = ray_run(3, 3, 128, replicas=2)
    monkeypatch.setattr(on_ray, "RayRun", lambda options: made)
    words = ["--workers", "3", "-m", "recipes.mnist", "--run-dir", str(made.options.run_dir)]
    assert on_ray.main(words) == 2
    said = capsys.readouterr().err
    assert "--workers 3:3: no such number of workers" in said and "a divisor of 64" in said


def test_a_folder_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_ray, "ray", mock.MagicMock())
    (tmp_path / "notes.txt").touch()
    words = ["--workers", "3", "-m", "recipes.mnist", "--run-dir", str(tmp_path)]
    assert on_ray.main(words) == 2
    assert "not a run directory (contains notes.txt)" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_traceback_is_held_back_for_some_seconds(tmp_path, monkeypatch):
    """A library may log one and continue."""
    monkeypatch.setattr(on_ray, "POLL_SECONDS", 0)
    now = [100.0]
    monkeypatch.setattr(on_ray.time, "monotonic", lambda: now[0])
    log = tmp_path / "worker-0.log"
    worker = on_ray.Worker(argparse.Namespace(run_dir=tmp_path), 0)
    worker.position, worker.child = 0, mock.Mock(log=log, status=None)
    log.write_text("step 1\n")
    assert worker.poll() == (None, "step 1\n")
    for count in (1, 2):
        text = f"Traceback (most recent call last): {count}\n"
        log.write_text(log.read_text() + text)
        assert worker.poll() == (None, "")
        now[0] += on_ray.HOLD_SECONDS
        assert worker.poll() == (None, text)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--workers 2", "-m MODULE is missing"),
        ("--workers 2 -m recipes.mnist", "--run-dir after the module must be an absolute path"),
        ("--workers 2 -m recipes.mnist --run-dir runs/a", "must be an absolute path"),
        ("--workers 0:2 -m recipes.mnist --run-dir /r", "expected a whole number from 1"),
        ("--workers 3:2 -m recipes.mnist --run-dir /r", "expected N or MIN:MAX, found '3:2'"),
        ("--workers 2 --retries 1 -m recipes.mnist --run-dir /r", "--retries"),
        (
            "--workers 2 --num_workers 4 -m recipes.mnist",
            "\n  --num_workers: did you mean --workers?\n",
        ),
        # Only `python -m launch` has --nproc-per-node.
        (
            "--workers 2 --num_processes 4 -m recipes.mnist",
            "--num_processes 4\n  options of recipes",
        ),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as left:
        on_ray.read_options(options.split())
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_what_the_processes_are_told(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "5")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    words = "--workers 2:4 --cpus-per-worker 3 -m recipes.mnist --run-dir /r --epochs 2".split()
    options = on_ray.read_options(words)
    assert options.workers == (2, 4) and options.run_dir == Path("/r")
    expected = {
        "KERAS_RECIPES_PLANNED_WORKERS": "4",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": "5",
        "KERAS_BACKEND": "tensorflow",
    }
    assert expected.items() <= options.environment.items()
    gpus = on_ray.read_options(["--gpus-per-worker", "1", *words])
    assert "CUDA_VISIBLE_DEVICES" not in gpus.environment


def test_no_cluster_at_the_address():
    words = "--address 127.0.0.1:1 --workers 1 -m fake --run-dir /r".split()
    output = processes.run("-m", "launch.on_ray", *words, status=2)
    assert re.search(r"no Ray cluster answers|Ray is not installed", output)
    assert sys.modules.get("ray") is None or "Traceback" not in output
