"""What the launcher does when processes end or it is asked to stop. No TensorFlow in them."""

import json
import re
import signal
import time

import pytest

from distribution.launch import supervision
from tests.support.launched import COUNTS_SIGNALS

# --- Restarts ---


def test_restart_after_a_death(runs):
    code = """
server = listen()
print("turn", turn)
ready()
if turn == 0:
    if index == 1:
        wait_for("worker-0.0")
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
    status, out, err = runs.run(
        code, "--nproc-per-node=2", "--max-restarts=2", arguments=["--run-dir=r", "--steps=3"]
    )
    assert status == 0, err
    assert "restart 1 of 2" in err and "restart 2" not in err
    assert out == "turn 0\nturn 1\n"
    assert (runs.folder / "r" / "worker-1.log").read_text() == "turn 0\nturn 1\n"  # appended
    first, second = runs.note("worker-0.0"), runs.note("worker-0.1")
    assert first["arguments"] == second["arguments"] == ["--run-dir=r", "--steps=3"]
    assert first["config"]["cluster"] != second["config"]["cluster"]  # new ports


def test_restarts_end(runs):
    status, _, err = runs.run("ready()\nsys.exit(4)", "--max-restarts", "2")
    assert status == 4
    assert len(runs.pids()) == 3


@pytest.mark.parametrize("status", [2, 75])
def test_no_restart_where_it_is_no_use(runs, status):
    code = f"ready()\nprint('why')\nsys.exit({status})"
    found, out, err = runs.run(code, "--max-restarts", "5")
    assert found == status
    assert len(runs.pids()) == 1
    assert ("Resume with:" in err) == (status == 75)
    if status == 75:
        assert re.search(r"--max-restarts 5 -m fake --run-dir runs/fake/\S+$", err.strip())


def test_the_others_may_save_too(runs):
    code = """
ready()
if index == 0:
    wait_for("worker-1.0")
else:
    wait_for("worker-0.0")
    time.sleep(1.5)
    note("saved.txt", "late")
sys.exit(75)
"""
    status, _, _ = runs.run(code, "--nproc-per-node", "2", "--max-restarts", "1")
    assert status == 75
    assert (runs.notes / "saved.txt").exists()


# --- Requests to stop ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_is_passed_on_once(runs, number):
    code = COUNTS_SIGNALS + "sys.exit(75)"
    process = runs.start(code, "--nproc-per-node", "2", "--max-restarts", "3")
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(number)
    process.send_signal(number)  # the same request, delivered twice
    status, _, err = runs.end(process)
    assert status == 75, err
    assert [json.loads((runs.notes / f"worker-{i}.got").read_text()) for i in range(2)] == [
        [number]
    ] * 2
    assert len(runs.pids()) == 2  # nothing was started again


def test_a_second_request_kills(runs):
    code = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
time.sleep(60)
"""
    patch = "supervision.STOP_SECONDS = 600"  # for those who may save
    process = runs.start(code, "--nproc-per-node", "2", "--max-restarts", "3", patch=patch)
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(signal.SIGINT)
    time.sleep(supervision.SAME_REQUEST_SECONDS + 0.3)
    assert process.poll() is None and len(runs.alive()) == 2
    process.send_signal(signal.SIGINT)
    status, _, _ = runs.end(process, seconds=120)
    assert status == 128 + signal.SIGINT
    assert not runs.alive()


def test_only_the_coordinator_is_asked(runs):
    # A parameter server would die of it, and the coordinator could save nothing.
    code = (
        """
if task == "chief":
"""
        + COUNTS_SIGNALS.replace("\n", "\n    ")
        + """
    sys.exit(75)
ready()
time.sleep(60)
"""
    )
    process = runs.start(code, "--ps", "1")
    runs.wait_for("chief-0.0.json", "ps-0.0.json", "worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == 75, err
    assert "ps 0" not in err


def test_nothing_outlives_a_killed_launcher(runs):
    process = runs.start("ready()\ntime.sleep(60)", "--nproc-per-node", "2", "--ps", "1")
    names = [f"{name}.0.json" for name in ("worker-0", "worker-1", "ps-0", "chief-0")]
    runs.wait_for(*names)
    assert len(runs.alive()) == 4
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while runs.alive() and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs.alive()


def test_children_of_children_end_too(runs):
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "fake"])
ready()
note("child.0.json", json.dumps({"pid": child.pid}))
"""
    status, _, _ = runs.run(code)
    assert status == 0
    end = time.monotonic() + 5
    while runs.alive() and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs.alive()


def test_a_reader_that_leaves_does_not_end_the_run(runs):
    code = "ready()\nfor i in range(20):\n    print(i)\n    time.sleep(0.05)"
    process = runs.start(code, arguments=["--run-dir", "r"])
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert (runs.folder / "r" / "worker-0.log").read_text().splitlines()[-1] == "19"


IMPORTS_FOR_LONG = """
signal.signal(signal.SIGINT, signal.SIG_DFL)
ready()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_before_the_workers_handle_signals(runs, number):
    process = runs.start(IMPORTS_FOR_LONG, "--nproc-per-node=2", "--max-restarts=3")
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(number)
    status, _, err = runs.end(process)
    assert status == 75, err
    assert "stopped before training began. Resume with:\n  python -m distribution.launch" in err
    assert len(runs.pids()) == 2


@pytest.mark.parametrize(
    ("end", "expected", "said"),
    [
        ("sys.exit(75)", 75, "saved and stopped. Resume with:"),
        ("time.sleep(60)", 75, "Resume with:"),  # waits for the other worker, and is killed
        ("sys.exit(4)", 4, "worker 0 ended with exit status 4"),
        ("os.kill(os.getpid(), 9)", 137, "worker 0 was killed by SIGKILL"),
    ],
)
def test_a_request_when_only_some_handle_signals(runs, end, expected, said):
    code = f"""
if index == 0:
    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    ready()
    while not got: time.sleep(0.02)
    time.sleep(0.5)  # the other one is dead by now
    {end}
ready()
time.sleep(60)
"""
    wait = 2 if "sleep" in end else 20
    patch = f"supervision.SAVE_SECONDS = {wait}; supervision.STOP_SECONDS = 0.5"
    process = runs.start(code, "--nproc-per-node=2", patch=patch)
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == expected, err
    assert said in err
    assert ("Resume with:" in err) == (expected == 75)


def test_a_worker_that_was_killed_by_somebody_else_did_not_stop_early(runs):
    code = """
ready()
wait_for("worker-0.0", "worker-1.0")
if index == 1: os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    status, _, err = runs.run(code, "--nproc-per-node=2")
    assert status == 143 and "Resume" not in err


def test_a_coordinator_that_had_not_begun(runs):
    process = runs.start(IMPORTS_FOR_LONG, "--ps=1")
    runs.wait_for("chief-0.0.json", "ps-0.0.json", "worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == 75, err
    assert "Resume with:" in err


# --- Workers beside parameter servers ---


WORKER_DIES = """
if task == "worker":
    server = listen()
ready()
if task == "worker" and index == 0 and turn == 0:
    wait_for("chief-0.0", "ps-0.0")
    print("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
if task == "chief":
    wait_for(*EXPECTED)
    time.sleep(0.5)
    sys.exit(0)
time.sleep(60)
"""


def test_the_death_of_a_worker_is_tolerated(runs):
    code = WORKER_DIES.replace("EXPECTED", "['worker-0.0', 'worker-1.0']")
    status, _, err = runs.run(code, "--ps=1", "--nproc-per-node=2")
    assert status == 0, err
    assert "worker 0 was killed by SIGKILL" in err and "[worker 0] last words" in err
    assert "continues without worker 0" in err


def test_a_worker_is_started_again_alone(runs):
    code = WORKER_DIES.replace("EXPECTED", "['worker-0.1', 'ps-0.0']")
    status, _, err = runs.run(code, "--ps=1", "--nproc-per-node=1", "--max-restarts=1")
    assert status == 0, err
    assert "worker 0 is started again" in err
    first, second = runs.note("worker-0.0"), runs.note("worker-0.1")
    assert first["config"] == second["config"]  # the same port
    assert len(runs.pids()) == 4


def test_without_any_worker_the_run_ends(runs):
    code = WORKER_DIES.replace("EXPECTED", "['never']")
    status, _, err = runs.run(code, "--ps=1")
    assert status == 128 + signal.SIGKILL
    assert "[worker 0] last words" in err


@pytest.mark.parametrize("task", ["ps", "chief"])
def test_the_death_of_servers_and_coordinator_is_not_tolerated(runs, task):
    code = f"""
ready()
if task == {task!r}:
    wait_for("worker-0.0")
    sys.exit(9)
time.sleep(60)
"""
    status, _, err = runs.run(code, "--ps=1")
    assert status == 9
    assert f"{'chief' if task == 'chief' else 'ps 0'} ended with exit status 9" in err
