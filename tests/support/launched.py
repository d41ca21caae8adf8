"""Launches small modules instead of recipes: no TensorFlow in these processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from launch import processes as launch

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The beginning of every module: `ready()` writes a file named after its task and its start (0, 1,
# ...) with its process id and its TF_CONFIG.
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
        "cores": sorted(os.sched_getaffinity(0)),
        "launched": os.environ.get("KERAS_RECIPES_LAUNCHED")}))
"""


class Runs:
    """Starts launchers and reads the notes of their processes."""

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
        program = ["-m", "launch"]
        if patch:
            start = "sys.exit(launch.main())"
            code = f"import sys; from launch import processes as launch; {patch}; {start}"
            program = ["-c", code]
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

    def wait_for(self, *names, seconds=60) -> None:
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

    def wait_until_gone(self, seconds=5) -> None:
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.alive()

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


NEVER_GIVEN = iter(range(12000, 12400, 10))


def find_ports(count: int) -> int:
    """Returns the first of N free consecutive ports, never the same ones twice.

    Every test process has 400 separate ports: otherwise another process could get the same ones
    before the launcher listens on them.
    """
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    for first in NEVER_GIVEN:
        base = first + 400 * own
        if all(launch.can_listen("", base + i) for i in range(count)):
            return base
    raise AssertionError("no free ports")


# A module that notes the signals it receives.
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
