"""Processes of the launcher: tasks, logs, output, several hosts. No TensorFlow in them."""

import os
import re
import signal
import time

import pytest

from distribution.launch import cluster, processes
from tests.support import processes as starting
from tests.support.launched import COUNTS_SIGNALS, find_ports

# --- One machine ---


def test_workers_get_their_tasks_and_logs(runs):
    status, out, err = runs.run(
        "ready()\nprint('hello from', name)",
        "--nproc-per-node",
        "3",
        arguments=["--run-dir", "here", "--", "-x", "-m", "a b"],
    )
    assert status == 0, err
    notes = [runs.note(f"worker-{i}.0") for i in range(3)]
    clusters = [note["config"]["cluster"] for note in notes]
    assert clusters[0] == clusters[1] == clusters[2]
    assert list(clusters[0]) == ["worker"]
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"localhost:\d+", address) for address in addresses)
    assert [note["config"]["task"] for note in notes] == [
        {"type": "worker", "index": i} for i in range(3)
    ]
    assert notes[2]["arguments"] == ["--run-dir", "here", "--", "-x", "-m", "a b"]
    assert notes[0]["launched"] == "1" and notes[0]["gpus"] is None
    logs = runs.folder / "here"
    assert sorted(path.name for path in logs.iterdir()) == [f"worker-{i}.log" for i in range(3)]
    assert (logs / "worker-2.log").read_text() == "hello from worker-2\n"
    assert out == "hello from worker-0\n"  # the chief's output alone


def test_parameter_servers(runs):
    # The coordinator ends; servers and workers never do by themselves.
    code = """
ready()
print("I am", name)
if task == "chief":
    wait_for("ps-0.0", "worker-0.0", "worker-1.0")
else:
    time.sleep(60)
"""
    status, out, err = runs.run(
        code, "--nproc-per-node=2", "--ps=1", "--log-dir", "logs", CUDA_VISIBLE_DEVICES="4,7"
    )
    assert status == 0, err
    assert out == "I am chief-0\n"
    cluster = runs.note("chief-0.0")["config"]["cluster"]
    assert {task: len(found) for task, found in cluster.items()} == {
        "worker": 2,
        "chief": 1,
        "ps": 1,
    }
    assert len({address for found in cluster.values() for address in found}) == 4
    gpus = {n: runs.note(f"{n}.0")["gpus"] for n in ("worker-0", "worker-1", "ps-0", "chief-0")}
    assert gpus == {"worker-0": "4", "worker-1": "7", "ps-0": "-1", "chief-0": "-1"}
    assert sorted(path.name for path in (runs.folder / "logs").iterdir()) == [
        "chief.log",
        "ps-0.log",
        "worker-0.log",
        "worker-1.log",
    ]


def test_default_run_dir(runs):
    status, _, err = runs.run("ready()", "--nproc-per-node", "2")
    assert status == 0
    given = [runs.note(f"worker-{i}.0")["arguments"] for i in range(2)]
    assert given[0] == given[1]
    assert given[0][0] == "--run-dir"
    assert re.fullmatch(r"runs/fake/\d{8}-\d{6}", given[0][1])
    assert (runs.folder / given[0][1] / "worker-1.log").exists()
    assert given[0][1] in err


def test_output_arrives_while_the_run_continues(runs):
    process = runs.start("ready()\nprint('first')\nwait_for('go', kind='txt')\nprint('last')")
    assert process.stdout.readline() == "first\n"
    (runs.notes / "go.txt").touch()
    assert runs.end(process)[:2] == (0, "last\n")


def test_first_failure_is_shown_and_ends_the_run(runs):
    code = """
ready()
if index == 1:
    wait_for("worker-0.0", "worker-2.0")
    for i in range(30):
        print("line", i)
    sys.exit(7)
time.sleep(60)
"""
    began = time.monotonic()
    status, out, err = runs.run(code, "--nproc-per-node", "3")
    assert status == 7 and out == ""
    assert "worker 1 ended with exit status 7" in err
    assert "[worker 1] line 29" in err and "[worker 1] line 10\n" in err
    assert "line 9\n" not in err  # the last twenty only
    assert time.monotonic() - began < 50  # they would sleep for a minute


def test_death_by_a_signal(runs):
    code = "ready()\nif index == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    status, _, err = runs.run(code, "--nproc-per-node", "2")
    assert status == 128 + signal.SIGKILL
    assert "worker 1 was killed by SIGKILL" in err


def test_survivors_that_do_not_listen_are_killed(runs):
    code = """
if index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    time.sleep(60)
wait_for("worker-0.0")
sys.exit(3)
"""
    status, _, _ = runs.run(code, "--nproc-per-node=2", patch="supervision.STOP_SECONDS = 0.5")
    assert status == 3
    assert not runs.alive()


# --- Logs that cannot be written ---


def test_a_foreign_folder_is_left_alone(runs):
    """By a recipe; another module may have there what it likes."""
    mine = runs.folder / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    launcher = ("-m", "distribution.launch", "--nproc-per-node", "1", "-m", "recipes.mnist")
    said = starting.run(*launcher, "--run-dir", str(mine), status=2)
    assert "holds no run, but notes.txt" in said
    assert os.listdir(mine) == ["notes.txt"]
    assert runs.run("ready()", arguments=["--run-dir", "mine"])[0] == 0


@pytest.mark.parametrize(
    ("log_dir", "named"),
    [
        ("a-file", "a-file"),
        ("a-file/below", "a-file/below"),
        ("d" * 300, "File name too long"),
        ("/proc/self", "/proc/self/worker-0.log"),  # no new file there, not even for root
        ("has-a-folder", "has-a-folder/worker-1.log: it is there and is no file"),
    ],
)
def test_logs_that_cannot_be_written(runs, log_dir, named):
    (runs.folder / "a-file").touch()
    (runs.folder / "has-a-folder" / "worker-1.log").mkdir(parents=True)
    status, out, err = runs.run("ready()", "--nproc-per-node=2", "--log-dir", log_dir)
    assert (status, out) == (2, "")
    assert named in err and "Traceback" not in err
    assert not runs.pids()
    assert not (runs.folder / "has-a-folder" / "worker-0.log").exists()


# --- Cores ---


needs_two_cores = pytest.mark.skipif(
    len(cluster.usable_cores()) < 2, reason="needs two cores that a process can choose"
)


@needs_two_cores
def test_each_worker_has_cores_of_its_own(runs):
    status, _, err = runs.run("ready()", "--nproc-per-node=2", OMP_NUM_THREADS="7")
    assert status == 0, err
    notes = [runs.note(f"worker-{i}.0") for i in range(2)]
    cores = [set(note["cores"]) for note in notes]
    assert not cores[0] & cores[1]
    each = len(cluster.usable_cores()) // 2
    assert [len(own) for own in cores] == [each, each]
    assert notes[0]["threads"] == [str(each), str(each), "7"]  # what the user has set stays
    assert err.count("pinned to cores of its own") == 1


@needs_two_cores
@pytest.mark.parametrize("words", [["--no-pin-cores", "--nproc-per-node=2"], []])
def test_workers_that_share_all_cores(runs, words):
    status, _, err = runs.run("ready()", *words)
    assert status == 0
    note = runs.note("worker-0.0")
    assert note["cores"] == sorted(cluster.usable_cores())
    assert note["threads"] == [os.environ.get(name) for name in processes.THREADS]
    assert "pinned" not in err


# --- Several hosts ---


def test_two_hosts(runs):
    # Loopback has many addresses: two launchers, each with an address of its own.
    code = """
server = listen()
ready()
wait_for(*[f"worker-{i}.0" for i in range(4)])
time.sleep(1)
"""
    base = find_ports(2)
    options = ["--hosts=127.0.0.1,127.0.0.2", "--nproc-per-node=2", f"--base-port={base}"]
    launchers = [
        runs.start(code, *options, f"--node-rank={rank}", arguments=["--run-dir=shared"])
        for rank in range(2)
    ]
    assert [runs.end(process)[0] for process in launchers] == [0, 0]
    notes = [runs.note(f"worker-{i}.0")["config"] for i in range(4)]
    expected = [f"127.0.0.{host}:{base + i}" for host in (1, 2) for i in (0, 1)]
    assert all(note["cluster"] == {"worker": expected} for note in notes)
    assert sorted(path.name for path in (runs.folder / "shared").iterdir()) == [
        f"worker-{i}.log" for i in range(4)
    ]


def test_a_host_that_does_not_come_is_named(runs):
    base = find_ports(1)
    status, _, err = runs.run(
        "server = listen()\nready()\ntime.sleep(60)",
        "--hosts=127.0.0.1,127.0.0.2",
        "--node-rank=0",
        f"--base-port={base}",
        "--start-timeout=2",
        "--max-restarts=3",
    )
    assert status == 1
    assert f"no answer within 2 s from 127.0.0.2:{base}" in err
    assert f"127.0.0.1:{base}" not in err
    assert len(runs.pids()) <= 1  # and no restart


def test_a_request_is_heard_while_hosts_are_waited_for(runs):
    process = runs.start(
        COUNTS_SIGNALS + "sys.exit(75)",
        "--hosts=127.0.0.1,127.0.0.2",
        "--node-rank=0",
        f"--base-port={find_ports(1)}",
    )
    runs.wait_for("worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    assert runs.end(process)[0] == 75


def test_workers_away_from_the_coordinator_end_with_it(runs):
    code = """
if task != "chief":
    server = listen()
ready()
if task == "chief":
    wait_for("ps-0.0", "worker-0.0", "worker-1.0")
    time.sleep(3)
    sys.exit(0)
time.sleep(60)
"""
    options = ["--hosts=127.0.0.1,127.0.0.2", "--ps=1", f"--base-port={find_ports(3)}"]
    patch = "processes.WATCH_SECONDS = 0.2; processes.GONE_SECONDS = 1"
    launchers = [runs.start(code, *options, f"--node-rank={i}", patch=patch) for i in range(2)]
    (first, out, _), (second, _, err) = [runs.end(process) for process in launchers]
    assert (first, second) == (0, 0)
    assert "the run is over" in err
