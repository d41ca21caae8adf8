"""Starts a recipe on a Ray cluster, with as many workers as the cluster has room for.

    python -m launch.on_ray --workers 1:4 --gpus-per-worker 1 --cpus-per-worker 4 \
        -m recipes.bert_mlm --run-dir /shared/runs/first

Each worker is an actor, which starts the recipe as a process. If one is lost, the run resumes
from its last checkpoint with the others; a node that returns joins at the next checkpoint.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time

from distribution.cluster import LAUNCHED, PLANNED_WORKERS, RESTARTED
from launch import processes as launch
from launch.processes import WRONG_OPTIONS, whole_number
from training.errors import SAVED_AND_STOPPED
from training.options import interpreter

try:
    import ray
    from ray._private.state import available_resources_per_node, state
    from ray.autoscaler.sdk import request_resources
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:  # an extra; `main` says so
    ray = None

PASSED_ON = (
    "PYTHONPATH",
    "KERAS_",
    "RECIPES_",
    "TF_",
    "XLA_",
)  # environment variables
SETTLE_SECONDS = 5  # to wait for more workers, once there are enough to start
SAY_SECONDS = 30  # between two messages while there are too few places
POLL_SECONDS = 0.5  # how long an actor waits for the end of its process before it returns
START_SECONDS = 60  # for the actors to start
FAIL_SECONDS = 5  # for the other workers to end by themselves; Ray reports a lost worker after 3
HOLD_SECONDS = 10  # to hold a traceback back: after a failure the process ends sooner
LOCK_TRIES = 200  # of POLL_SECONDS each; NFS 4 keeps a lost node's lock for 90 seconds
GONE_SECONDS = 20  # to wait for a lost head of the cluster
LOST = 128 + signal.SIGKILL  # the status of a worker whose actor is lost
BLAME = {
    0: 0,
    SAVED_AND_STOPPED: 1,
    WRONG_OPTIONS: 3,
    LOST: 4,
}  # the largest is blamed; others: 2
ENDED_WELL = (None, 0, SAVED_AND_STOPPED)
say = functools.partial(launch.say, speaker="on_ray")


class Worker:
    """A worker of the recipe: an actor on a node, which starts the recipe as a process."""

    def __init__(self, options: argparse.Namespace, index: int):
        self.options, self.index = options, index
        self.held_since: float | None = None  # when a traceback was first held back

    def prepare(self, mark: str, count: int) -> tuple[str, str]:
        """Returns the node's id and HOST:PORT; raises OSError if the log lacks the mark."""
        log = self.options.run_dir / "worker-0.log"
        if not log.exists() or mark not in log.read_text(errors="replace"):
            raise OSError(f"the nodes do not share --run-dir {self.options.run_dir}")
        ports = launch.FREE_PORTS[self.index :: count]  # no two workers get the same one
        free = (p for p in random.sample(ports, len(ports)) if launch.can_listen("", p))
        address = f"{ray.util.get_node_ip_address()}:{next(free)}"
        return ray.get_runtime_context().get_node_id(), address

    def start(self, addresses: list[str]) -> None:
        """Starts the recipe; it dies with this actor."""
        options, task = self.options, {"type": "worker", "index": self.index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment = os.environ | options.environment | {"TF_CONFIG": config}
        if os.path.isdir(options.folder):
            os.chdir(options.folder)
        words = ["-m", options.module, *options.arguments]
        log = options.run_dir / f"worker-{self.index}.log"
        self.child = launch.start_process("worker", self.index, words, log, environment, [])
        self.position = self.child.log_start

    def poll(self) -> tuple[int | None, str]:
        """Waits a moment; returns the process's exit status and its new output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.process.wait(POLL_SECONDS)
        status, shown = self.child.status, b""
        if self.index == 0:
            shown = launch.read_log(self.child.log, self.position, status is not None)
            if status is None and b"Traceback (most" in shown:
                # Wait until the cause is known: another worker may have failed.
                self.held_since = self.held_since or time.monotonic()
                if time.monotonic() - self.held_since < HOLD_SECONDS:
                    shown = b""
            if shown:
                self.held_since = None
            self.position += len(shown)
        end = "" if status in ENDED_WELL else f"{self.child.describe_end()}\n"
        return status, end + shown.decode(errors="replace")

    def stop(self) -> None:
        """Asks the process to save and stop."""
        self.child.process.terminate()


class RayRun(launch.Requests):
    """A run on a Ray cluster, from its first process to its last."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.least, self.most = options.workers
        cpus, gpus = options.cpus_per_worker, options.gpus_per_worker
        self.bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})  # the resources of a worker
        self.worker = ray.remote(num_cpus=cpus, num_gpus=gpus)(Worker)
        self.actors: list = []
        self.head = ray.get_runtime_context().gcs_address

    def run(self) -> int:
        """Trains until the run is over; returns its exit status."""
        failures, status = 0, SAVED_AND_STOPPED
        is_new = not (self.options.run_dir / "options.json").exists()
        request_resources(bundles=[self.bundle] * self.most)  # for the autoscaler
        while self.reserve():
            before = self.checkpoint()
            status = self.start() or self.supervise(before)  # type: ignore[assignment]
            self.release()
            if is_new:  # from now on the run in the folder is this launch's
                self.options.environment[RESTARTED] = "1"
            if self.request or status in (0, SAVED_AND_STOPPED, WRONG_OPTIONS):
                break
            if status is None:
                continue
            failures = 1 if self.checkpoint() > before else failures + 1
            if failures == self.options.max_failures:
                say(f"{failures} failures without a checkpoint between them: giving up")
                break
        request_resources(bundles=[])
        # None: the processes have saved, to be started again.
        stopped = status in (None, SAVED_AND_STOPPED) or status == LOST and self.request
        return self.say_how_to_resume() if stopped else status

    def say_how_to_resume(self) -> int:
        """Prints how to resume a stopped run; returns its exit status."""
        say(f"stopped. Resume with:\n  {launch.resuming(self.options.command)}")
        return SAVED_AND_STOPPED

    def await_head(self) -> None:
        """Waits for the head of the cluster; without it Ray would abort this process."""
        end = time.monotonic() + GONE_SECONDS
        while launch.connection_error(self.head):
            if time.monotonic() > end:
                say(f"the head of the cluster, {self.head}, does not answer")
                os._exit(self.say_how_to_resume())
            time.sleep(POLL_SECONDS)

    def reserve(self) -> bool:
        """Reserves slots for as many workers as possible; returns False if asked to stop."""
        enough = next_line = time.monotonic() + SETTLE_SECONDS
        while self.request is None:
            self.await_head()
            slots, now = self.free_slots(), time.monotonic()
            count = self.largest(len(slots))
            if count == self.most or count and now > enough:
                nodes = {"ray.io/node-id": f"in({','.join(set(slots))})"}
                group = {"bundles": [self.bundle] * count, "bundle_label_selector": [nodes] * count}
                self.group = ray.util.placement_group(strategy="SPREAD", **group)
                if self.group.wait(SETTLE_SECONDS):
                    return True
                self.release()
            elif not count and now > next_line:
                next_line, needed = now + SAY_SECONDS, self.counts()[0]
                say(f"slots for {len(slots)} of at least {needed} workers; waiting for nodes")
            time.sleep(1)
        return False

    def free_slots(self) -> list[str]:
        """Lists the node of each worker that fits into the free resources."""
        nodes: list[str] = []
        free, draining = available_resources_per_node(), state.get_draining_nodes()
        for node in ray.nodes():
            name, port = node["NodeID"], node["NodeManagerPort"]
            address = f"{node['NodeManagerAddress']}:{port}"
            have = free.get(name, {})
            fits = min(int(have.get(kind, 0) / count) for kind, count in self.bundle.items())
            # A node that does not answer is lost; Ray reports that after a quarter of a minute.
            if fits and name not in draining and not launch.connection_error(address):
                nodes += [name] * fits
        return nodes

    def shares(self) -> int:
        """Returns what the workers share: global batch, divided by the replicas of a worker."""
        shares = self.most  # until options.json exists
        with contextlib.suppress(OSError, ValueError, KeyError):
            run = json.loads((self.options.run_dir / "options.json").read_text(encoding="utf-8"))
            shares = run["resolved"]["global_batch_size"] // run["replicas_per_worker"]
        return shares

    def counts(self) -> list[int]:
        """Lists the numbers of workers that can share the global batch, smallest first."""
        shares = self.shares()
        return [count for count in range(self.least, self.most + 1) if shares % count == 0]

    def largest(self, slots: int) -> int:
        """Returns the largest number of workers that can share the global batch; 0 for none."""
        return max((count for count in self.counts() if count <= slots), default=0)

    def batch_problem(self) -> str | None:
        """Returns a line if no number of workers can share the global batch, or None."""
        if self.counts():
            return None
        shares = self.shares()
        return (
            f"--workers {self.least}:{self.most}: no such number of workers can share the run's "
            f"global batch of {shares} examples per replica of a worker; include a divisor of "
            f"{shares}"
        )

    def checkpoint(self) -> str:
        """Returns the name of the newest checkpoint."""
        folder = self.options.run_dir / "checkpoints"
        names = (path.name for path in folder.glob("step-*"))
        return max((name for name in names if name[5:].isdecimal()), default="")  # else a copy

    def release(self) -> None:
        """Ends all actors and their processes; releases the reserved slots."""
        self.await_head()
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self.group)
        self.actors = []
        with open(self.options.run_dir / ".lock", "a") as lock:
            for _ in range(LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(POLL_SECONDS)

    def start(self) -> int | None:
        """Starts a worker in each slot; returns an exit status if that fails."""
        options, count = self.options, self.group.bundle_count
        mark = f"starting {count} workers, {time.time_ns():x}"
        with open(options.run_dir / "worker-0.log", "a") as log:
            log.write(f"{mark}\n")
        for index in range(count):
            place = PlacementGroupSchedulingStrategy(self.group, index)
            actor = self.worker.options(scheduling_strategy=place).remote(options, index)
            self.actors.append(actor)
        try:
            prepared = [actor.prepare.remote(mark, count) for actor in self.actors]
            self.hosts = ray.get(prepared, timeout=START_SECONDS)  # (node, HOST:PORT) per worker
            addresses = [address for _, address in self.hosts]
            say(f"{mark}: {', '.join(addresses)}")
            started = [actor.start.remote(addresses) for actor in self.actors]
            ray.get(started, timeout=START_SECONDS)
        except ray.exceptions.RayTaskError as error:
            say(f"cannot start: {error.cause}")
            return WRONG_OPTIONS
        except ray.exceptions.RayError:  # an actor or its slot is lost
            say("cannot start: a worker is lost")
            return LOST
        return None

    def supervise(self, before: str) -> int | None:
        """Waits for the end of the processes; returns their status, None to start them again."""
        polls = {actor.poll.remote(): index for index, actor in enumerate(self.actors)}
        ended: list[tuple[int, int, str]] = []  # worker, exit status, output to show
        reason, deadline = None, float("inf")
        while polls and time.monotonic() < deadline:
            for reference in ray.wait(list(polls), num_returns=len(polls), timeout=1)[0]:
                index = polls.pop(reference)
                try:
                    status, text = ray.get(reference)
                except ray.exceptions.RayError:
                    status, text = LOST, f"worker {index}, {self.hosts[index][1]}, is lost"
                if reason and status == 128 + signal.SIGTERM:  # it was importing: no step is lost
                    status = SAVED_AND_STOPPED
                elif status in ENDED_WELL:
                    with contextlib.suppress(OSError):  # a closed terminal does not end a run
                        print(text, end="", flush=True)
                if status is None:
                    polls[self.actors[index].poll.remote()] = index
                else:
                    ended.append((index, status, text))
            ends = {status for _, status, _ in ended} - {0}
            if ends:
                seconds = launch.SAVE_SECONDS if ends == {SAVED_AND_STOPPED} else FAIL_SECONDS
                # The lost worker is the cause; the others end as a consequence.
                deadline = min(deadline, time.monotonic() + (0 if LOST in ends else seconds))
            elif reason is None:
                reason = self.why_stop(before)
                if reason:
                    say(f"{reason}: asking the processes to save")
                    for actor in self.actors:
                        actor.stop.remote()
            if self.killed_by:
                return 128 + self.killed_by
        _, status, text = max(sorted(ended), key=lambda end: BLAME.get(end[1], 2))
        if status not in ENDED_WELL:
            say(text)
        return None if status == SAVED_AND_STOPPED and reason and not self.request else status

    def why_stop(self, before: str) -> str | None:
        """Returns why the processes should save and stop; None to continue."""
        if self.request:
            return f"{signal.Signals(self.request).name} (again kills)"
        self.await_head()
        draining, now = state.get_draining_nodes(), len(self.actors)
        leaving = [address for node, address in self.hosts if node in draining]
        if leaving:
            return f"Ray is draining the node of {', '.join(leaving)}"
        if now == self.most or self.checkpoint() <= before:
            return None
        count = self.largest(now + len(self.free_slots()))
        return f"slots for {count} workers" if count > now else None


def worker_counts(text: str) -> tuple[int, int]:
    """Parses N or MIN:MAX; a type for argparse."""
    counts = [whole_number(1, 1024)(part) for part in text.split(":")]
    if len(counts) > 2 or counts[0] > counts[-1]:
        raise argparse.ArgumentTypeError(f"expected N or MIN:MAX, found {text!r}")
    return counts[0], counts[-1]


def read_options(argv: list[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `SystemExit` with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.on_ray",
        usage="python -m launch.on_ray [options] -m MODULE [options of the module]",
        description="Start a recipe on a Ray cluster, with as many workers as there is room for.",
        epilog="Ctrl-C (or SIGTERM) asks the processes to save and stop, a second one kills them."
        " Ports are neither encrypted nor protected by a password: private networks only.",
        allow_abbrev=False,
    )
    add, number = parser.add_argument, whole_number
    add(
        "--workers",
        type=worker_counts,
        required=True,
        help="Required: N workers, or MIN:MAX.",
    )
    add("--cpus-per-worker", type=number(1, 1024), default=1, help="Cores per worker (default 1).")
    add("--gpus-per-worker", type=number(0, 1024), default=0, help="GPUs per worker (default 0).")
    add(
        "--address",
        default="auto",
        help="HOST:PORT of the head (default: RAY_ADDRESS, or local).",
    )
    add(
        "--max-failures",
        type=number(1, 1024),
        default=3,
        help="End the run after this many failures without a checkpoint between them (default 3).",
    )
    add(
        "-m",
        metavar="MODULE",
        help="Module to run; it gets all arguments after it, among them --run-dir, an absolute "
        "path on a disk that all nodes share.",
    )
    options, run_dir = launch.split_options(parser, argv)
    if run_dir is None or not run_dir.is_absolute():
        parser.error("--run-dir after the module must be an absolute path, on a shared disk")
    options.run_dir, options.folder = run_dir, os.getcwd()
    options.command = [interpreter(), "-m", "launch.on_ray", *argv]
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    options.environment = passed_on | {
        "PYTHONUNBUFFERED": "1",
        LAUNCHED: "1",
        PLANNED_WORKERS: str(options.workers[1]),
    }
    if not options.gpus_per_worker:
        threads = dict.fromkeys(launch.THREADS, str(options.cpus_per_worker))
        options.environment = {"CUDA_VISIBLE_DEVICES": "-1"} | threads | options.environment
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status. A Ray job may call it as a function."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    try:
        if ray is None:
            raise ConnectionError("Ray is not installed: pip install -e '.[ray]'")
        if ":" in options.address and launch.connection_error(options.address):
            raise ConnectionError(f"--address {options.address}: no Ray cluster answers")
        for line in launch.run_dir_problems(options.module, options.run_dir):
            raise ValueError(line)
        options.run_dir.mkdir(parents=True, exist_ok=True)
        ray.init(options.address, ignore_reinit_error=True, log_to_driver=False, logging_level=40)
    except (OSError, RuntimeError, ValueError) as error:
        say(str(error))
        return WRONG_OPTIONS
    kinds = {kind for kind in ray.cluster_resources() if kind.startswith("accelerator_type:")}
    if options.gpus_per_worker and len(kinds) > 1:
        say(f"the cluster has GPUs of several types, whose results differ: {', '.join(kinds)}")
        return WRONG_OPTIONS
    run = RayRun(options)
    problem = run.batch_problem()
    if problem is not None:
        say(problem)
        return WRONG_OPTIONS
    run.listen()
    return run.run()


if __name__ == "__main__":
    sys.exit(main())
