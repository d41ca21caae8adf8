"""One launcher on each of two hosts that are joined by nothing but a link."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import processes, strategy_run

pytest_plugins = ["tests.support.namespaces"]
pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Worker 1 sends what worker 0 asks for.
EXCHANGE = """
import json, os, socket, time
config = json.loads(os.environ["TF_CONFIG"])
index, workers = config["task"]["index"], config["cluster"]["worker"]
host, port = workers[index].split(":")
server = socket.create_server((host, int(port)))
if index == 0:
    other, port = workers[1].split(":")
    while True:
        try:
            link = socket.create_connection((other, int(port)), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    link.sendall(b"20000")
    link.shutdown(socket.SHUT_WR)
    received = b""
    while chunk := link.recv(65536):
        received += chunk
    print("received", len(received), "bytes from", other)
else:
    while True:  # the launcher of the other host knocks and hangs up
        link, sender = server.accept()
        asked = link.recv(100)
        if asked:
            break
    link.sendall(b"x" * int(asked))
    link.close()
    print("sent to", sender[0])
"""


def start_launcher(two_hosts, rank, folder, *options) -> subprocess.Popen:
    """Starts the launcher of one of the hosts, in a folder that both see."""
    return two_hosts[rank].start(
        [
            *[sys.executable, "-m", "distribution.launch"],
            *["--hosts", ",".join(host.address for host in two_hosts), "--node-rank", str(rank)],
            *options,
            *["-m", "exchange", "--run-dir", "run"],
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_bytes_cross_the_link(two_hosts, tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    before = two_hosts[0].received_bytes()
    launchers = [start_launcher(two_hosts, rank, tmp_path) for rank in range(2)]
    (out, err), (other_out, other_err) = [p.communicate(timeout=600) for p in launchers]
    assert [process.returncode for process in launchers] == [0, 0], err + other_err
    assert out == f"received 20000 bytes from {two_hosts[1].address}\n"
    assert other_out == f"sent to {two_hosts[0].address}\n"
    assert two_hosts[0].received_bytes() - before > 20000
    assert (tmp_path / "run" / "worker-0.log").read_text() == out
    assert (tmp_path / "run" / "worker-1.log").read_text() == other_out
    assert not two_hosts[0].processes() and not two_hosts[1].processes()


def test_the_other_host_does_not_come(two_hosts, tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    process = start_launcher(two_hosts, 0, tmp_path, "--start-timeout", "3")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert f"no answer within 3 s from {two_hosts[1].address}:22200" in err
    assert not two_hosts[0].processes()


def test_training_over_the_link_ends_with_identical_weights(two_hosts, tmp_path):
    """One worker on each host; every step's all-reduce crosses the cable."""
    strategy_run.write_data(tmp_path)
    runs = ["bert_lines", "mnist", "dna", "text"]
    chosen = json.dumps({"strategy": "multi_worker", "runs": runs})
    before = two_hosts[0].received_bytes()
    launchers = [
        host.start(
            [
                *[sys.executable, "-m", "distribution.launch"],
                *["--hosts", ",".join(host.address for host in two_hosts)],
                *["--node-rank", str(rank), "--log-dir", str(tmp_path / "logs")],
                *["-m", "strategy_run", chosen, str(tmp_path / "runs")],
            ],
            cwd=tmp_path,
            env=os.environ | processes.ENVIRONMENT | {"STRATEGY_RUN_PRINT": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(two_hosts)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    sums = [
        [line.split() for line in output.splitlines() if line.split()[:1] == [run]][-1][-1]
        for output in outputs
        for run in runs
    ]
    assert sums[: len(runs)] == sums[len(runs) :], outputs
    assert two_hosts[0].received_bytes() - before > 1_000_000
    assert not two_hosts[0].processes() and not two_hosts[1].processes()
