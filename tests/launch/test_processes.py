"""The launcher: its options, and what it does while processes run and end. No TensorFlow here."""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest

from launch import processes as launch
from tests.support.launched import COUNTS_SIGNALS, find_ports
from tests.support.processes import ROOT

SLEEPS = "ready()\ntime.sleep(60)"


@pytest.fixture
def bare(monkeypatch):
    """Leaves no cluster in the environment of this process; any name is that of a module."""
    monkeypatch.setattr(launch, "module_problem", lambda module: None)
    for name in ("TF_CONFIG", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def read(*words, tmp_path):
    return launch.read_options([*words, "-m", "fake", "--run-dir", str(tmp_path)])


# --- Options ---


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node: expected a whole number from 1 to 1024"),
        (["--max-restarts", "1" + "0" * 400], "found '1000"),
        (["--hosts", "a,a", "--node-rank", "0"], "--hosts: expected different names"),
        (["--hosts", "a,b:1", "--node-rank", "0"], "without ports"),
        (["--hosts", "a,b", "--node-rank", "2"], "--node-rank 2: --hosts has 2 names"),
        (["--nproc-per-node", "3"], "only 2 GPUs"),
    ],
)
def test_problems(words, named, tmp_path, capsys, bare):
    bare.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit) as error:
        read(*words, tmp_path=tmp_path / "run")
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert named in said and max(map(len, said.splitlines())) < 250
    assert not (tmp_path / "run").exists()


def test_problems_that_belong_together_are_named_at_once(capsys, bare):
    bare.setenv("TF_CONFIG", "{}")
    with pytest.raises(SystemExit):
        launch.read_options(["--hosts=a,b", "--ps=1", "-m", "fake"])
    said = capsys.readouterr().err
    for part in ("--node-rank", "--ps runs", "--run-dir ...", "TF_CONFIG is set", "python -m fake"):
        assert part in said
    with pytest.raises(SystemExit):
        launch.read_options([])
    assert "-m MODULE is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module, problem",
    [
        *((name, None) for name in ("recipes.mnist", "launch.doctor", "recipes", "timeit")),
        ("own", None),
        *((name, "no such module; looked here") for name in ("ownn", "recipes.mnits", "own.x")),
        *((name, "no such module; write its name") for name in ("own.py", "./own.py")),
        ("parts", "a package without __main__.py"),
        ("mine.recipes.train", None),  # folders without an __init__.py, for which Python needs none
        ("mine.recipes.tain", "no such module; looked here"),
        ("mine.recipes", "a package without __main__.py"),
    ],
)
def test_a_module_that_python_does_not_find(module, problem, tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "mine" / "recipes").mkdir(parents=True)
    (tmp_path / "mine" / "recipes" / "train.py").touch()
    (tmp_path / "own.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    expected = None if problem is None else f"-m {module}: {problem}"
    found = launch.module_problem(module)
    assert found is None if expected is None else found.startswith(expected)


HOSTS = "--hosts HOST0,HOST1,... with all hosts, the same list on each; leave it out on one machine"


@pytest.mark.parametrize(
    ("line", "hints"),
    [
        (
            "--nproc_per_node 2 -m recipes.mnist",
            ["--nproc_per_node: did you mean --nproc-per-node?"],
        ),
        ("--node_rank=1 -m recipes.mnist", ["--node_rank: did you mean --node-rank?"]),
        (
            "--num_processes=4 --num_machines 2 --master-port 9 -m recipes.mnist",
            [
                "--num_processes: --nproc-per-node P, the workers on each host",
                f"--num_machines: {HOSTS}",
                "--master-port: the first of --hosts runs the chief; --base-port N is its port",
            ],
        ),
        (
            "--rdzv_backend c10d --rdzv-id=7 recipes/mnist.py --epochs 3 --dataset 'a b'",
            [
                "--rdzv_backend: leave it out: hosts find one another by --hosts and --base-port",
                "--rdzv-id: leave it out: hosts find one another by --hosts and --base-port",
                "recipes/mnist.py: a module comes after -m: -m recipes.mnist --epochs 3 --dataset "
                "'a b'",
            ],
        ),
        ("./recipes/mnist.py", ["./recipes/mnist.py: a module comes after -m: -m recipes.mnist"]),
        (
            "--nproc-per-node 2 recipes.mnist",
            ["recipes.mnist: a module comes after -m: -m recipes.mnist"],
        ),
        ("--epochs 3 -m recipes.mnist", ["options of recipes.mnist come after -m recipes.mnist"]),
        ("--zzz", []),
    ],
)
def test_names_of_other_launchers_are_answered_by_ours(line, hints, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        launch.read_options(shlex.split(line))
    usage, first, *others = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and others == [f"  {hint}" for hint in hints]
    assert first.startswith("python -m launch: error: unrecognized arguments: ")


def test_hints_name_options_of_the_launcher():
    texts = " ".join(launch.ELSEWHERE.values())
    named = set(re.findall("--[a-z-]+", texts)) - {"--run-dir", "--precision"}  # of recipes
    assert named <= set(launch.OWN_OPTIONS)


@pytest.mark.parametrize(
    "path, name", [("recipes/mnist.py", "recipes.mnist"), ("recipes/mnits.py", None)]
)
@pytest.mark.parametrize("absolute", [False, True])
def test_the_file_of_a_module_is_answered_by_its_name(path, name, absolute, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = str(ROOT / path) if absolute else path
    with pytest.raises(SystemExit):
        launch.read_options(["-m", path])
    named = "" if name is None else f": -m {name}"
    expected = f"launch: -m {path}: no such module; write its name, not its file's{named}\n"
    assert capsys.readouterr().err == expected


def test_a_mistyped_module_leaves_no_folder(tmp_path):
    words = [sys.executable, "-m", "launch", "--max-restarts", "3", "-m", "recipes.mnits"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 2 and not os.listdir(tmp_path)
    assert found.stderr == (
        "launch: -m recipes.mnits: no such module; looked here and in PYTHONPATH\n"
    )


def test_help_of_the_module_makes_no_folder(tmp_path):
    words = [sys.executable, "-m", "launch", "--nproc-per-node=2", "-m", "timeit", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.startswith("Tool for measuring execution time")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("module", ["recipes.mnist", "fake"])
def test_a_folder_whose_name_no_disk_takes(module, tmp_path, capsys, bare):
    folder = tmp_path / ("x" * 300)
    with pytest.raises(SystemExit) as error:
        launch.read_options(["-m", module, "--run-dir", str(folder)])
    assert error.value.code == 2
    assert capsys.readouterr().err == f"launch: --run-dir {folder}: File name too long\n"


def test_a_folder_that_holds_something_else(tmp_path, capsys, bare):
    """It is left alone by a recipe; another module may have there what it likes."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit) as error:
        launch.read_options(["-m", "recipes.mnist", "--run-dir", str(tmp_path)])
    assert error.value.code == 2
    assert "not a run directory (contains notes.txt)" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert read(tmp_path=tmp_path).run_dir == tmp_path


# --- What each process gets ---


def test_hosts_may_be_separated_by_spaces(tmp_path, bare):
    assert read("--hosts", "a, b", "--node-rank=0", tmp_path=tmp_path).hosts == ["a", "b"]


def test_a_connection_to_an_ipv6_address(monkeypatch):
    connect = mock.MagicMock()
    monkeypatch.setattr(launch.socket, "create_connection", connect)
    assert launch.connection_error("[fd00::5]:21000") is None
    connect.assert_called_once_with(("fd00::5", 21000), timeout=2)


def test_hosts_share_ports_and_count_workers_on(tmp_path, bare):
    bare.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    words = ["--hosts=127.0.0.1,a", "--nproc-per-node=2", "--base-port=1500"]
    options = read(*words, "--node-rank=1", tmp_path=tmp_path)
    cluster = launch.build_cluster(options)
    assert cluster == {"worker": ["127.0.0.1:1500", "127.0.0.1:1501", "a:1500", "a:1501"]}
    assert launch.own_tasks(options) == [("worker", 2), ("worker", 3)]
    found = [launch.environment_of(options, cluster, *t) for t in launch.own_tasks(options)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["0,1", "2,3"]  # the last one stays idle
    assert json.loads(found[1]["TF_CONFIG"])["task"] == {"type": "worker", "index": 3}


@pytest.mark.parametrize(
    ("words", "cores", "gpus", "expected"),
    [
        ([], 5, "-1", [[0, 1], [2, 3]]),  # equally many; the last one is left over
        ([], 1, "-1", [[], []]),  # fewer cores than workers
        ([], 5, "0,1", [[], []]),
        (["--ps=1"], 5, "-1", [[], [0, 1], [2, 3], []]),  # nor servers, nor the coordinator
    ],
)
def test_cores(words, cores, gpus, expected, tmp_path, bare):
    bare.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    bare.setenv("CUDA_VISIBLE_DEVICES", gpus)
    bare.setenv("OMP_NUM_THREADS", "7")
    bare.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    options = read("--nproc-per-node=2", *words, tmp_path=tmp_path)
    tasks = launch.own_tasks(options)
    assert [launch.equal_share(options.cores, options, *task) for task in tasks] == expected
    environment = launch.environment_of(options, {}, "worker", 0)
    assert environment["OMP_NUM_THREADS"] == "7"  # what the user has set stays
    if expected[-1] == [2, 3]:
        assert environment["TF_NUM_INTRAOP_THREADS"] == "2"


def test_threads_of_a_core_stay_together(tmp_path, bare):
    """Linux numbers them far apart: 0 to 3 are four cores here, and 4 to 7 their second threads."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    bare.setattr(launch, "CPUS", tmp_path)
    bare.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert launch.own_cores() == [0, 4, 1, 5, 2, 6, 3, 7]
    bare.setattr(launch, "CPUS", tmp_path / "missing")
    assert launch.own_cores() == list(range(8))


@pytest.mark.parametrize("name", launch.OWN_OPTIONS)
def test_options_of_the_launcher_after_the_module(name, tmp_path, capsys, bare):
    bare.chdir(tmp_path)
    assert f" {name} " in launch.make_parser().format_help()
    with pytest.raises(SystemExit) as error:
        launch.read_options(["-m", "recipes.mnist", f"{name}=1"])
    assert error.value.code == 2
    assert capsys.readouterr().err == f"launch: {name}: goes before -m\n"
    spelled = name[2:].replace("-", "_")
    with pytest.raises(SystemExit):
        launch.read_options(["-m", "recipes.mnist", f"--{spelled}", "1"])
    assert capsys.readouterr().err == f"launch: --{spelled}: goes before -m\n"
    assert not list(tmp_path.iterdir())
    assert launch.read_options(["-m", "fake", f"{name}=1"]).arguments[0] == f"{name}=1"


def test_a_broken_slurm_variable_is_one_line(capsys, bare):
    bare.setenv("SLURM_PROCID", "x")
    bare.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(SystemExit) as error:
        launch.read_options(["-m", "fake"])
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.startswith("launch: SLURM_PROCID 'x'")
    assert said.count("\n") == 1


def test_gpus_are_counted_by_the_driver_tool(tmp_path, bare):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A100 (UUID: GPU-x)'\necho 'GPU 1: A100'\n")
    tool.chmod(0o755)
    bare.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch.visible_gpus() == ["0", "1"]


# --- Processes on one machine ---


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
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"localhost:\d+", address) for address in addresses)
    assert [note["config"]["task"]["index"] for note in notes] == [0, 1, 2]
    assert notes[2]["arguments"] == ["--run-dir", "here", "--", "-x", "-m", "a b"]
    assert notes[0]["launched"] == "1" and notes[0]["gpus"] is None
    logs = runs.folder / "here"
    assert sorted(path.name for path in logs.iterdir()) == [f"worker-{i}.log" for i in range(3)]
    assert (logs / "worker-2.log").read_text() == "hello from worker-2\n"
    assert out == "hello from worker-0\n"  # the chief's output alone
    cores = [set(note["cores"]) for note in notes]
    assert len(os.sched_getaffinity(0)) < 3 or not cores[0] & cores[1]


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
    options = ["--nproc-per-node=2", "--ps=1"]
    words = ["--run-dir", "logs"]
    status, out, err = runs.run(code, *options, arguments=words, CUDA_VISIBLE_DEVICES="4,7")
    assert status == 0, err
    assert out == "I am chief-0\n"
    cluster = runs.note("chief-0.0")["config"]["cluster"]
    assert [len(cluster[task]) for task in ("worker", "chief", "ps")] == [2, 1, 1]
    assert len({address for found in cluster.values() for address in found}) == 4
    gpus = {n: runs.note(f"{n}.0")["gpus"] for n in ("worker-0", "worker-1", "ps-0", "chief-0")}
    assert gpus == {"worker-0": "4", "worker-1": "7", "ps-0": "-1", "chief-0": "-1"}
    names = ["chief-0.log", "ps-0.log", "worker-0.log", "worker-1.log"]
    assert sorted(path.name for path in (runs.folder / "logs").iterdir()) == names


def test_output_arrives_while_the_run_continues(runs):
    process = runs.start("ready()\nprint('first')\nwait_for('go', kind='txt')\nprint('last')")
    assert process.stdout.readline() == "first\n"
    (runs.notes / "go.txt").touch()
    assert runs.end(process)[:2] == (0, "last\n")


def test_a_reader_that_leaves_does_not_end_the_run(runs):
    code = "ready()\nfor i in range(20):\n    print(i)\n    time.sleep(0.05)"
    process = runs.start(code, arguments=["--run-dir", "r"])
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert (runs.folder / "r" / "worker-0.log").read_text().splitlines()[-1] == "19"


def test_unread_output_does_not_hold_a_request_back(runs):
    """As of a terminal that is stopped by Ctrl-S, or a pager."""
    code = "print('x' * 200_000, flush=True)\n" + COUNTS_SIGNALS + "sys.exit(75)"
    patch = "launch.OUTPUT_SECONDS = 0.5"
    process = runs.start(code, arguments=["--run-dir=r"], patch=patch)
    runs.wait_for("worker-0.0.json")
    time.sleep(0.5)  # until the pipe is full
    process.send_signal(signal.SIGTERM)
    runs.wait_for("worker-0.got", seconds=10)
    assert process.wait(timeout=10) == 75
    assert len(process.stdout.read()) >= 4096


def test_output_that_is_read_late_is_complete(runs):
    process = runs.start("ready()\nprint('x' * 200_000)")
    runs.wait_for("worker-0.0.json")
    time.sleep(1)
    assert process.poll() is None
    assert runs.end(process)[:2] == (0, "x" * 200_000 + "\n")


# --- Failures ---


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("print('disk full'); sys.exit(7)", 7, "worker 1 ended with exit status 7 (disk full)"),
        ("os.kill(os.getpid(), 9)", 137, "worker 1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), 40)", 168, "worker 1 was killed by signal 40"),  # has no name
    ],
)
def test_a_death_is_one_line_without_the_survivors_traceback(runs, end, status, said):
    """The survivor notices the death by itself, and complains before it is stopped."""
    code = f"""
if index == 0:
    ready()
    print("epoch 1")
    wait_for("dies", kind="txt")
    dead = json.loads((here / "worker-1.0.json").read_text())["pid"]
    try:
        while pathlib.Path(f"/proc/{{dead}}/stat").read_text().rpartition(")")[2][1] != "Z":
            time.sleep(0.001)
    except OSError:
        pass  # the launcher has seen it already
    print("Traceback: connection lost", flush=True)
    time.sleep(0.5)  # TensorFlow takes longer to end
    sys.exit(1)
ready()
wait_for("worker-0.0")
time.sleep(0.5)
note("dies.txt", "")
{end}
"""
    found, out, err = runs.run(code, "--nproc-per-node=2", arguments=["--run-dir", "r"])
    assert found == status
    assert out in ("epoch 1\n", "")  # on a busy machine the death may be seen first
    (line,) = [line for line in err.splitlines() if "worker 1" in line]
    assert line == f"launch: {said}; its log: r/worker-1.log"
    assert "Traceback" not in err and "Resume" not in err


def test_the_shown_worker_s_error_is_shown_once(runs):
    """All workers refuse the same options, and one of them is faster."""
    code = """
ready()
if index == 0: time.sleep(0.7)
print("first problem\\nsecond problem")
sys.exit(2)
"""
    status, out, _ = runs.run(code, "--nproc-per-node=2", "--max-restarts=5")
    assert status == 2 and out == "first problem\nsecond problem\n"
    assert len(runs.pids()) == 2  # no restart


class TestRefusedOptions:
    """A mistyped option leaves no folder of logs; whatever else is there stays."""

    CODE = "ready()\nprint('no such option', flush=True)\nsys.exit(2)"

    @pytest.mark.parametrize("arguments", [[], ["--run-dir", "runs/fake/r"]])
    def test_leave_no_folder(self, runs, arguments):
        status, out, err = runs.run(self.CODE, "--nproc-per-node=2", arguments=arguments)
        assert (status, out) == (2, "no such option\n")
        assert not (runs.folder / "runs").exists()
        assert err.splitlines()[-1].endswith(": removed, it held only the logs of this error")

    def test_leave_no_lock(self, runs):
        """As the chief of a run, which is refused once it has read the data."""
        code = f"pathlib.Path('r/.lock').touch()\n{self.CODE}"
        assert runs.run(code, arguments=["--run-dir", "r"])[0] == 2
        assert not (runs.folder / "r").exists()

    def test_leave_a_folder_that_was_there(self, runs):
        (runs.folder / "r").mkdir()
        status, _, err = runs.run(self.CODE, arguments=["--run-dir", "r"])
        assert (status, os.listdir(runs.folder / "r")) == (2, ["worker-0.log"])
        assert "removed" not in err

    def test_leave_the_folder_of_another_launch(self, runs):
        """Both found no folder, and made it; the run of the other one holds the lock."""
        (runs.folder / "r").mkdir()
        options = launch.read_options(["-m", "timeit", "--run-dir", str(runs.folder / "r")])
        refused, folder = launch.Launch(options), runs.folder / "r"
        log = folder / "worker-0.log"
        log.touch()
        refused.made, refused.children = [folder], [mock.Mock(log=log, status=2)]
        with open(folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused.remove_logs()
            assert log.exists()
        refused.remove_logs()
        assert not folder.exists()

    def test_leave_what_the_run_wrote(self, runs):
        code = f"pathlib.Path('r/options.json').touch()\n{self.CODE}"
        assert runs.run(code, arguments=["--run-dir", "r"])[0] == 2
        assert sorted(os.listdir(runs.folder / "r")) == ["options.json", "worker-0.log"]

    def test_leave_the_logs_of_another_end(self, runs):
        """A process that was killed or failed may have written the reason."""
        code = "ready()\nwait_for('worker-1.0')\ntime.sleep(0.7 * index)\nsys.exit(2 + index)"
        assert runs.run(code, "--nproc-per-node=2", arguments=["--run-dir", "r"])[0] == 2
        assert sorted(os.listdir(runs.folder / "r")) == ["worker-0.log", "worker-1.log"]


def test_a_log_that_is_moved_ends_no_run(runs):
    code = "ready()\nwhile not (here / 'go').exists():\n    time.sleep(0.02)\nprint('end')"
    process = runs.start(code, "--nproc-per-node=2", arguments=("--run-dir", "run"))
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    os.rename(runs.folder / "run" / "worker-0.log", runs.folder / "elsewhere.log")
    time.sleep(0.5)
    (runs.notes / "go").touch()
    assert runs.end(process)[0] == 0


@pytest.mark.parametrize(
    ("run_dir", "named"),
    [("a-file", "a-file"), ("has-a-folder", "has-a-folder/worker-1.log")],
)
def test_logs_that_cannot_be_written(runs, run_dir, named):
    (runs.folder / "a-file").touch()
    (runs.folder / "has-a-folder" / "worker-1.log").mkdir(parents=True)
    status, out, err = runs.run("ready()", "--nproc-per-node=2", arguments=["--run-dir", run_dir])
    assert (status, out) == (2, "")
    assert named in err and "Traceback" not in err


def test_a_port_in_use(runs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, _, err = runs.run("ready()", "--base-port", str(port))
    assert status == 2 and f"localhost:{port} is in use" in err
    assert not runs.pids() and not (runs.folder / "runs").exists()


def test_launches_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, bare):
    bare.chdir(tmp_path)
    seconds = iter(["20260101-000000"] * 2 + ["20260101-000001"])
    bare.setattr(time, "strftime", lambda _: next(seconds))
    bare.setattr(time, "sleep", lambda _: None)
    for name in ("20260101-000000", "20260101-000001"):
        options = launch.read_options(["-m", "recipes.fake", "--epochs=1"])
        launch.make_folder(options)
        folder = options.run_dir
        assert folder.is_dir() and str(folder) == f"runs/fake/{name}"
        assert options.arguments == ["--epochs=1", "--run-dir", str(folder)]
        assert options.command[-3:] == options.arguments


def test_nothing_outlives_a_killed_launcher(runs):
    process = runs.start(SLEEPS, "--nproc-per-node", "2", "--ps", "1")
    runs.wait_for(*[f"{n}.0.json" for n in ("worker-0", "worker-1", "ps-0", "chief-0")])
    assert len(runs.alive()) == 4
    process.kill()
    process.wait()
    runs.wait_until_gone()


def test_children_of_children_end_too(runs):
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "fake"])
ready()
note("child.0.json", json.dumps({"pid": child.pid}))
"""
    assert runs.run(code)[0] == 0
    runs.wait_until_gone()


# --- Restarts ---


def test_restart_after_a_death(runs):
    code = """
server = listen()
print("turn", turn)
ready()
if turn == 0:
    if index == 1:
        wait_for("worker-0.0")
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
    status, out, err = runs.run(
        code, "--nproc-per-node=2", "--max-restarts=2", arguments=["--run-dir=r", "--steps=3"]
    )
    assert status == 0, err
    assert "restart 1 of 2" in err and "restart 2" not in err
    assert out in ("turn 0\nturn 1\n", "turn 1\n")  # on a busy machine the death is seen first
    assert (runs.folder / "r" / "worker-1.log").read_text() == "turn 0\nturn 1\n"  # appended
    first, second = runs.note("worker-0.0"), runs.note("worker-0.1")
    assert first["arguments"] == second["arguments"] == ["--run-dir=r", "--steps=3"]
    assert first["config"]["cluster"] != second["config"]["cluster"]  # new ports


@pytest.mark.parametrize("had_run", [False, True])
def test_a_restart_may_resume_the_run_of_its_launch(had_run, runs):
    """Whatever `--resume never` says of a run that was there before."""
    code = """
run_dir = pathlib.Path("r")
note(f"restarted.{turn}", os.environ.get("KERAS_RECIPES_RESTARTED", ""))
ready()
(run_dir / "options.json").touch()
sys.exit(1 if turn < 2 else 0)
"""
    if had_run:
        (runs.folder / "r").mkdir()
        (runs.folder / "r" / "options.json").touch()
    assert runs.run(code, "--max-restarts=2", arguments=["--run-dir=r"])[0] == 0
    said = [(runs.notes / f"restarted.{turn}").read_text() for turn in range(3)]
    assert said == (["", "", ""] if had_run else ["", "1", "1"])


def test_no_restart_after_a_save(runs):
    code = "ready()\nprint('why')\nsys.exit(75)"
    status, _, err = runs.run(code, "--max-restarts", "5")
    assert status == 75 and len(runs.pids()) == 1
    run_dir = re.search(r"--max-restarts 5 -m fake --run-dir (runs/fake/\d{8}-\d{6})$", err.strip())
    assert (runs.folder / run_dir[1] / "worker-0.log").exists()  # named by the launcher


# --- Requests to stop ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_request_is_passed_on_once(number, runs):
    code = COUNTS_SIGNALS + "time.sleep(index)\nnote(f'{name}.saved', '')\nsys.exit(75)"
    process = runs.start(code, "--nproc-per-node", "2", "--max-restarts", "3")
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(number)
    process.send_signal(number)  # the same request, delivered twice
    status, _, err = runs.end(process)
    assert status == 75 and "stopped. Resume with:" in err
    got = [json.loads((runs.notes / f"worker-{i}.got").read_text()) for i in range(2)]
    assert got == [[signal.SIGTERM]] * 2
    assert (runs.notes / "worker-1.saved").exists()  # the slower one was waited for
    assert len(runs.pids()) == 2  # nothing was started again


@pytest.mark.parametrize("words", [["--resume", "never"], ["--resume=never"]])
def test_the_command_that_resumes_does_not_refuse_the_run(words):
    command = ["python", "-m", "launch", "-m", "recipes.mnist", *words, "--dataset", "a b"]
    assert launch.resuming(command) == "python -m launch -m recipes.mnist --dataset 'a b'"
    command[-1] = "--resume never"  # one word
    assert launch.resuming([*command, "--resume", "extend"]).endswith(
        "'--resume never' --resume extend"
    )


def test_a_second_request_kills(runs):
    code = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
    process = runs.start(code + SLEEPS, "--nproc-per-node", "2", "--max-restarts", "3")
    runs.wait_for("worker-0.0.json", "worker-1.0.json")
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if "asking the processes" in line:
            break
    time.sleep(launch.SAME_REQUEST_SECONDS + 0.1)
    assert process.poll() is None and len(runs.alive()) == 2
    process.send_signal(signal.SIGINT)
    assert runs.end(process, seconds=120)[0] == 128 + signal.SIGINT
    assert not runs.alive()


def test_only_the_coordinator_is_asked(runs):
    # A parameter server would die of it, and the coordinator could save nothing.
    code = (
        'if task == "chief":' + COUNTS_SIGNALS.replace("\n", "\n    ") + f"sys.exit(75)\n{SLEEPS}"
    )
    process = runs.start(code, "--ps", "1")
    runs.wait_for("chief-0.0.json", "ps-0.0.json", "worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == 75, err
    assert "ps 0" not in err


@pytest.mark.parametrize("servers", [0, 1])
def test_a_request_before_the_workers_handle_signals(runs, servers):
    process = runs.start(SLEEPS, f"--ps={servers}", "--max-restarts=3")
    runs.wait_for("worker-0.0.json", *["chief-0.0.json", "ps-0.0.json"][: 2 * servers])
    process.send_signal(signal.SIGINT)
    status, _, err = runs.end(process)
    assert status == 75, err
    assert re.search(r"stopped\. Resume with:\n  \S*python\S* -m launch -", err)
    assert len(runs.pids()) == 1 + 2 * servers


def test_a_request_after_the_run_has_finished(runs):
    """Its results are written, and the process is about to end."""
    code = "pathlib.Path('r', 'results.json').write_text('{}')\n" + SLEEPS
    process = runs.start(code, arguments=["--run-dir", "r"])
    runs.wait_for("worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == 0 and "stopped" not in err and "Resume" not in err
    # An older run's results say nothing about this one.
    process = runs.start(SLEEPS, arguments=["--run-dir", "r"])
    runs.wait_for("worker-0.1.json")
    process.send_signal(signal.SIGTERM)
    assert runs.end(process)[0] == 75


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
    logs = sorted(path.name for path in (runs.folder / "shared").iterdir())
    assert logs == [f"worker-{i}.log" for i in range(4)]


def test_a_host_that_does_not_come_is_named(runs):
    base = find_ports(1)
    options = ["--hosts=127.0.0.1,127.0.0.2", "--node-rank=0", f"--base-port={base}"]
    options += ["--max-restarts=3"]
    code = f"server = listen()\n{SLEEPS}"
    patch = "launch.START_SECONDS = 2"
    status, _, err = runs.run(code, *options, arguments=["--run-dir=r"], patch=patch)
    assert status == 2
    assert f"no answer within 2 s from 127.0.0.2:{base}" in err
    assert f"127.0.0.1:{base}" not in err
    assert len(runs.pids()) <= 1  # and no restart


def test_a_request_while_another_host_is_missing(runs):
    """TensorFlow waits for it in native code, in which Python handles no signal."""
    base = find_ports(1)
    options = ["--hosts=127.0.0.1,127.0.0.2", "--node-rank=0", f"--base-port={base}"]
    code = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nserver = listen()\n{SLEEPS}"
    patch = "launch.UNCONNECTED_SECONDS = 1"
    process = runs.start(code, *options, arguments=["--run-dir=r"], patch=patch)
    runs.wait_for("worker-0.0.json")
    process.send_signal(signal.SIGTERM)
    status, _, err = runs.end(process)
    assert status == 75 and "stopped. Resume with:" in err
    assert not runs.alive()


# --- Workers beside parameter servers ---


WORKER_DIES = """
if task == "worker":
    server = listen()
ready()
if task == "worker" and index == 0 and turn == 0:
    wait_for("chief-0.0", "ps-0.0")
    os.kill(os.getpid(), 9)
if task == "chief":
    wait_for(*EXPECTED)
    time.sleep(0.5)
    print("trained")
    sys.exit(0)
time.sleep(60)
"""


def test_a_run_with_servers_continues_without_a_worker(runs):
    code = WORKER_DIES.replace("EXPECTED", "['worker-0.0', 'worker-1.0']")
    status, out, err = runs.run(code, "--ps=1", "--nproc-per-node=2")
    assert status == 0, err
    assert "worker 0 was killed by SIGKILL" in err and "the run continues without it" in err
    assert out == "trained\n"


def test_without_any_worker_the_run_ends(runs):
    status, _, err = runs.run(WORKER_DIES.replace("EXPECTED", "['never']"), "--ps=1")
    assert status == 128 + signal.SIGKILL
    assert "worker 0 was killed by SIGKILL" in err


@pytest.mark.parametrize("task", ["ps", "chief"])
def test_no_run_survives_its_server_or_coordinator(runs, task):
    code = f"if task == {task!r}:\n    wait_for('worker-0.0')\n    sys.exit(9)\n{SLEEPS}"
    status, _, err = runs.run(code, "--ps=1")
    assert status == 9
    assert f"{task} 0 ended with exit status 9" in err
