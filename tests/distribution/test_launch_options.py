"""The launcher's command line, and what each process gets of a machine. No TensorFlow here."""

import os
import socket
import subprocess
import sys

import pytest

from distribution.launch import cluster, options
from distribution.launch.plan import LaunchPlan
from tests.support.launched import ROOT


def test_parameter_servers_live_on_the_first_host(tmp_path):
    plan = LaunchPlan(
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
        cores=[],
    )
    assert cluster.build_cluster(plan) == {
        "worker": ["a:1000", "a:1001", "b:1000", "b:1001"],
        "chief": ["a:1002"],
        "ps": ["a:1003"],
    }
    assert plan.tasks() == [("worker", 2), ("worker", 3)]
    assert [cluster.assign_gpus(plan, *task) for task in plan.tasks()] == ["0,1", "2,3"]
    plan.rank = 0
    assert plan.tasks() == [("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)]


def test_hardware_threads_of_a_core_stand_together(tmp_path, monkeypatch):
    # As Linux numbers them: 0 to 3 the first threads of four cores, 4 to 7 the second ones.
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{number % 4}\n")
    monkeypatch.setattr(cluster, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cluster.usable_cores() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    ("words", "cores", "gpus", "expected"),
    [
        ([], 5, "-1", [[0, 1], [2, 3]]),  # equally many; the last one is left over
        (["--no-pin-cores"], 5, "-1", [None, None]),
        ([], 1, "-1", [None, None]),  # fewer cores than workers
        ([], 5, "0,1", [None, None]),
        (["--ps=1"], 5, "-1", [None, [0, 1], [2, 3], None]),  # nor servers, nor the coordinator
    ],
)
def test_cores(words, cores, gpus, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    plan = options.read_options(["--nproc-per-node=2", *words, "-m", "distribution.launch"])
    assert [cluster.assign_cores(plan, *task) for task in plan.tasks()] == expected


def test_all_problems_at_once(runs):
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
    ("words", "named"),
    [
        (["-m", "distribution.no_such_thing"], "distribution.no_such_thing"),
        (["-m", "distribution"], "-m distribution"),
        ([], "-m MODULE is missing"),
        (["--node-rank", "0", "-m", "distribution.launch"], "--node-rank needs --hosts"),
        (["--hosts", "a,b", "--node-rank", "2", "-m", "distribution.launch"], "from 0 to 1"),
        (["--nproc-per-node", "9", "--base-port", "65530", "-m", "distribution.launch"], "65538"),
        (["--nproc-per-node", "3", "-m", "distribution.launch"], "only 2 GPUs"),
        (["-m", "distribution.launch", "--run-dir"], "--run-dir names no folder"),
        (["--log-dir", "", "-m", "distribution.launch"], "--log-dir names no folder"),
        (["-m", "m" * 300], "mmm... (300 characters): no such module"),
        (["--hosts", "h" * 300, "--node-rank", "0", "-m", "distribution.launch"], "300 characters"),
    ],
)
def test_problems(words, named, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit) as error:
        options.read_options(words)
    assert error.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["--nproc-per-node", "--ps", "--base-port", "--node-rank", "--max-restarts", "--start-timeout"],
)
def test_a_number_of_any_size_ends_in_a_short_line(name, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    words = ["--hosts=a,b", "--node-rank=0", name, str(10**400), "-m", "distribution.launch"]
    with pytest.raises(SystemExit) as error:
        options.read_options(words)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"launch: {name} 1000") and len(line) < 160


def test_a_package_that_raises_is_no_module(tmp_path, capsys, monkeypatch):
    (tmp_path / "raises").mkdir()
    (tmp_path / "raises" / "__init__.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit):
        options.read_options(["-m", "raises.inside"])
    assert "raises.inside: no such module" in capsys.readouterr().err


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
    words = ["-m", "distribution.launch", "--run-dir", "x"]
    if named is None:
        assert str(options.read_options(words).log_dir) == "x"
        return
    with pytest.raises(SystemExit) as error:
        options.read_options(words)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert named in message and "python -m distribution.launch ..." in message


def test_a_port_that_is_taken(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit):
            options.read_options(["--base-port", str(port), "-m", "distribution.launch"])
    assert f"localhost:{port} is taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("", []), ("-1", []), ("0,1", ["0", "1"]), ("2,-1,3", ["2"]), ("GPU-ab", ["GPU-ab"])],
)
def test_visible_gpus(listed, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert cluster.visible_gpus() == expected


def test_gpus_are_counted_by_the_driver_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A100 (UUID: GPU-x)'\necho 'GPU 1: A100'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cluster.visible_gpus() == ["0", "1"]


def test_help_needs_no_tensorflow():
    code = "import sys, distribution.launch.__main__; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "distribution.launch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert "two machines" in result.stdout and "--start-timeout" in result.stdout


def test_a_module_is_found_without_tensorflow():
    code = (
        "import sys; from distribution.launch.options import check_module as check; "
        "assert not check('recipes.mnist') and check('recipes.none') and check('none.mnist'); "
        "assert not {'tensorflow', 'keras', 'recipes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
