"""The launcher, with small modules in place of recipes: no TensorFlow in these processes."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from distribution import launch

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What every module here begins with: it says that it is there, by a file named after its task
# and its start (0, 1, ...), which holds its process id and its TF_CONFIG.
PRELUDE = """
import json, os, pathlib, signal, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task, index = config["task"]["type"], config["task"]["index"]
name = f"{task}-{index}"
here = pathlib.Path(os.environ["NOTES"])
turn = len(list(here.glob(f"{name}.*.json")))
def note(kind, text):
    (here / f"{kind}.part").write_text(text)
    os.replace(here / f"{kind}.part", here / kind)
def wait_for(*others, kind="json"):
    while not all((here / f"{other}.{kind}").exists() for other in others):
        time.sleep(0.02)
def listen():
    host, port = config["cluster"][task][index].split(":")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen()
    return server
def ready():
    note(f"{name}.{turn}.json", json.dumps({
        "pid": os.getpid(), "config": config, "arguments": sys.argv[1:],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "launched": os.environ.get("KERAS_RECIPES_LAUNCHED")}))
"""


class Runs:
    """Starts launchers and reads what their processes noted."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.notes, self.started = folder, folder / "notes", []
        self.notes.mkdir()

    def start(self, code, *options, arguments=(), patch="", **environment) -> subprocess.Popen:
        """Starts a launcher; `patch` changes its constants."""
        (self.folder / "fake.py").write_text(PRELUDE + code)
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES") and not key.startswith("SLURM")
        }
        paths = os.pathsep.join([str(ROOT), str(self.folder)])
        program = ["-m", "distribution.launch"]
        if patch:
            main = f"import sys; from distribution import launch; {patch}; sys.exit(launch.main())"
            program = ["-c", main]
        process = subprocess.Popen(
            [sys.executable, *program, *options, "-m", "fake", *arguments],
            cwd=self.folder,
            env=clean | {"PYTHONPATH": paths, "NOTES": str(self.notes)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, code, *options, **others) -> tuple[int, str, str]:
        return self.end(self.start(code, *options, **others))

    @staticmethod
    def end(process, seconds=30) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err

    def wait_for(self, *names, seconds=20) -> None:
        end = time.monotonic() + seconds
        while not all((self.notes / name).exists() for name in names):
            assert time.monotonic() < end, f"{names}: only {os.listdir(self.notes)}"
            time.sleep(0.02)

    def note(self, name):
        return json.loads((self.notes / f"{name}.json").read_text())

    def pids(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in self.notes.glob("*.json")]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_running(pid)]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return b"fake" in command and state != "Z"


@pytest.fixture
def runs(tmp_path):
    made = Runs(tmp_path)
    yield made
    left = made.alive()
    made.close()
    assert not left, "processes were left behind"


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


def test_output_arrives_while_the_run_goes_on(runs):
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
    assert time.monotonic() - began < 8


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
    status, _, _ = runs.run(code, "--nproc-per-node=2", patch="launch.STOP_SECONDS = 0.5")
    assert status == 3
    assert not runs.alive()


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
    assert ("this continues:" in err) == (status == 75)
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

COUNTS_SIGNALS = """
got = []
def handler(number, frame):
    got.append(number)
signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGINT, handler)
ready()
while not got:
    time.sleep(0.02)
time.sleep(0.7)
note(f"{name}.got", json.dumps(got))
"""


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
    process = runs.start(code, "--nproc-per-node", "2", "--max-restarts", "3")
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(signal.SIGINT)
    time.sleep(launch.SAME_REQUEST_SECONDS + 0.3)
    assert process.poll() is None and len(runs.alive()) == 2
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, _, _ = runs.end(process)
    assert status == 128 + signal.SIGINT
    assert time.monotonic() - began < 3
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


def test_the_death_of_a_worker_is_survived(runs):
    code = WORKER_DIES.replace("EXPECTED", "['worker-0.0', 'worker-1.0']")
    status, _, err = runs.run(code, "--ps=1", "--nproc-per-node=2")
    assert status == 0, err
    assert "worker 0 was killed by SIGKILL" in err and "[worker 0] last words" in err
    assert "goes on without worker 0" in err


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
def test_servers_and_coordinator_are_not_survived(runs, task):
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


# --- Several hosts ---


def find_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for base in range(12000, 19000, 50):
        if all(launch.can_listen("", base + i) for i in range(count)):
            return base
    raise AssertionError("no free ports")


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


def test_parameter_servers_live_on_the_first_host(tmp_path):
    plan = launch.Plan(
        command=[],
        module="fake",
        arguments=[],
        workers_per_host=2,
        parameter_servers=1,
        hosts=["a", "b"],
        rank=1,
        base_port=1000,
        max_restarts=0,
        start_timeout=1,
        log_dir=tmp_path,
        gpus=["0", "1", "2", "3", "4"],
    )
    cluster, tasks = launch.lay_out(plan)
    assert cluster == {
        "worker": ["a:1000", "a:1001", "b:1000", "b:1001"],
        "chief": ["a:1002"],
        "ps": ["a:1003"],
    }
    assert tasks == [("worker", 2), ("worker", 3)]
    assert [launch.deal_gpus(plan, *task) for task in tasks] == ["0,1", "2,3"]
    plan.rank = 0
    assert launch.lay_out(plan)[1] == [("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)]


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
    patch = "launch.WATCH_SECONDS = 0.2; launch.GONE_SECONDS = 1"
    launchers = [runs.start(code, *options, f"--node-rank={i}", patch=patch) for i in range(2)]
    (first, out, _), (second, _, err) = [runs.end(process) for process in launchers]
    assert (first, second) == (0, 0)
    assert "the run is over" in err


# --- Wrong options ---


def test_all_faults_at_once(runs):
    status, out, err = runs.run(
        "ready()",
        "--nproc-per-node=0",
        "--ps=x",
        "--hosts=a,a,b:1",
        "--base-port=80",
        "--max-restarts=-1",
        "--nonsense",
    )
    assert status == 2 and out == ""
    for part in ("--nproc-per-node 0", "--ps x", "a stands", "'b:1'", "--node-rank", "80", "-1"):
        assert part in err
    assert "--nonsense" in err and "Traceback" not in err
    assert not runs.pids()
    assert not (runs.folder / "runs").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-m", "distribution.no_such_thing"], "distribution.no_such_thing"),
        (["-m", "distribution"], "-m distribution"),
        ([], "-m MODULE is missing"),
        (["--node-rank", "0", "-m", "distribution.launch"], "--node-rank needs --hosts"),
        (["--hosts", "a,b", "--node-rank", "2", "-m", "distribution.launch"], "from 0 to 1"),
        (["--nproc-per-node", "9", "--base-port", "65530", "-m", "distribution.launch"], "65538"),
        (["--nproc-per-node", "3", "-m", "distribution.launch"], "only 2 GPUs"),
        (["-m", "distribution.launch", "--run-dir"], "--run-dir names no folder"),
    ],
)
def test_faults(options, named, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit) as error:
        launch.read_options(options)
    assert error.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"TF_CONFIG": "{}"}, "TF_CONFIG is set already"),
        ({"SLURM_NTASKS": "4"}, "SLURM runs 4 tasks"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "1"}, None),
    ],
)
def test_where_the_launcher_is_not_needed(variables, named, capsys, monkeypatch):
    for name in ("TF_CONFIG", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = ["-m", "distribution.launch", "--run-dir", "x"]
    if named is None:
        assert str(launch.read_options(options).log_dir) == "x"
        return
    with pytest.raises(SystemExit) as error:
        launch.read_options(options)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert named in message and "python -m distribution.launch ..." in message


def test_a_port_that_is_taken(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit):
            launch.read_options(["--base-port", str(port), "-m", "distribution.launch"])
    assert f"localhost:{port} is taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("", []), ("-1", []), ("0,1", ["0", "1"]), ("2,-1,3", ["2"]), ("GPU-ab", ["GPU-ab"])],
)
def test_visible_gpus(listed, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert launch.visible_gpus() == expected


def test_gpus_are_counted_by_the_driver_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A100 (UUID: GPU-x)'\necho 'GPU 1: A100'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch.visible_gpus() == ["0", "1"]


def test_help_needs_no_tensorflow():
    code = "import sys, distribution.launch; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "distribution.launch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert "two machines" in result.stdout and "--start-timeout" in result.stdout
