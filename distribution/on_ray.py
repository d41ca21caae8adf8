"""Starts a recipe on a Ray cluster, with as many workers as the cluster has places for.

    python -m distribution.on_ray --workers 1:4 --gpus-per-worker 1 --cpus-per-worker 4 \
        -m recipes.bert_mlm --run-dir /shared/runs/first

Each worker is an actor, which starts the recipe as a process with a `TF_CONFIG`. When a worker or
a node is lost, the others are stopped, and the run resumes from its last checkpoint with those that
are left; what comes back joins at the next checkpoint. Only short messages and the chief's log pass
through Ray.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distribution import launch
from distribution.launch import SAVED_AND_STOPPED, WRONG_OPTIONS, whole_number

try:
    import ray
    from ray._private.state import available_resources_per_node, state
    from ray.autoscaler.sdk import request_resources
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:  # an extra; `main` says so
    ray = None

PASSED_ON = ("PYTHONPATH", "KERAS_", "RECIPES_", "TF_", "XLA_")  # of the driver's environment
SETTLE_SECONDS = 10  # to wait for more places, where there are enough to start
SAY_SECONDS = 30  # between two lines while there are too few places
LOOK_SECONDS = 0.5  # how long an actor waits for the end of its process before it answers
START_SECONDS = 60  # for an actor to start
WATCH_SECONDS = 3  # between two looks at the nodes of the cluster
FAIL_SECONDS = 5  # for the other workers to end by themselves; Ray reports a lost one after 3
LOCK_SECONDS = 100  # for the run's lock, held by a node that is gone: NFS 4 keeps it for 90 seconds
GONE_SECONDS = 20  # without the head of the cluster
ENDED_WELL = (None, 0, SAVED_AND_STOPPED)
say = functools.partial(launch.say, speaker="on_ray")
LOST = 128 + signal.SIGKILL  # the status of a worker whose actor does not answer


class Worker:
    """A worker of the recipe: an actor on a node, which starts the recipe as a process."""

    def __init__(self, run_dir: Path, index: int):
        self.run_dir, self.index = run_dir, index
        self.child: Any = None  # a `launch.Child`, from `start` on

    def prepare(self, mark: str, count: int, waits: bool) -> tuple[str, str] | None:
        """Returns the node's id and HOST:PORT; None while another process holds the run.

        Raises:
            OSError: The run's folder is not shared, or not writable.
        """
        log = self.run_dir / "worker-0.log"
        if self.index == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            with open(self.run_dir / ".lock", "a") as lock, open(log, "a") as file:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if waits:
                        return None
                file.write(f"{mark}\n")
        elif not log.exists() or mark not in log.read_text(errors="replace"):
            raise OSError(f"the nodes do not share --run-dir {self.run_dir}")
        ports = launch.FREE_PORTS[self.index :: count]  # no two workers get the same one
        free = (p for p in random.sample(ports, len(ports)) if launch.can_listen("", p))
        host = ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        return ray.get_runtime_context().get_node_id(), f"{host}:{next(free)}"

    def start(self, words: list[str], cwd: str, environment: dict[str, str]) -> None:
        """Starts the recipe; it dies with this actor."""
        if os.path.isdir(cwd):
            os.chdir(cwd)
        log, environment = self.run_dir / f"worker-{self.index}.log", os.environ | environment
        self.child = launch.start_process("worker", self.index, words, log, environment, [])
        self.position = self.child.log_start

    def look(self) -> dict:
        """Waits a moment for the end of the process, and tells how the run is there."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.process.wait(LOOK_SECONDS)
        found = {"status": self.child.status}
        if found["status"] is not None:
            self.child.kill()  # what it left in its session
            found["end"] = self.child.describe_end()
        if self.index == 0:
            text = launch.read_log(self.child.log, self.position, found["status"] is not None)
            self.position += len(text)
            found["text"] = text.decode(errors="replace")
            names = [path.name for path in self.run_dir.glob("checkpoints/step-*")]
            found["checkpoint"] = max(names, default="")
            with contextlib.suppress(OSError, ValueError, KeyError):
                run = json.loads((self.run_dir / "options.json").read_text(encoding="utf-8"))
                found["shares"] = run["resolved"]["global_batch_size"] // run["replicas_per_worker"]
        return found

    def send(self, number: int) -> None:
        """Sends a signal to the process; SIGKILL to all of its session."""
        if self.child and number == signal.SIGKILL:
            self.child.kill()
            self.child.process.wait()
        elif self.child:
            self.child.process.send_signal(number)


@dataclasses.dataclass
class Member:
    """A worker as the driver knows it."""

    index: int
    actor: Any
    node: str = ""
    address: str = ""
    status: int | None = None  # as a shell gives it; None while it runs
    end: str = ""  # in words

    def blame(self) -> tuple[bool, bool, int]:
        """Orders workers: the others may have failed because of the last one."""
        causes = (WRONG_OPTIONS, LOST)
        return self.status not in ENDED_WELL, self.status in causes, self.status or 0


class RayRun(launch.Requests):
    """A run on a Ray cluster, from its first process to its last."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.least, self.most = options.workers
        cpus, gpus = options.cpus_per_worker, options.gpus_per_worker
        self.bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})  # what a worker needs
        self.worker = ray.remote(num_cpus=cpus, num_gpus=gpus)(Worker)
        self.members: list[Member] = []
        self.group: Any = None  # the places that Ray keeps for them
        self.shares = self.most  # the number of workers divides it; the chief knows better
        self.checkpoint = ""  # the newest
        self.texts: list[tuple[float, str]] = []  # of the chief's log: when heard, not shown yet
        self.starts = 0
        self.again = False  # asked to save in order to start with other workers
        self.head = ray.get_runtime_context().gcs_address

    def run(self) -> int:
        """Trains until the run is over; returns its exit status."""
        failures, status = 0, SAVED_AND_STOPPED
        try:
            request_resources(bundles=[self.bundle] * self.most)  # an autoscaler hears of it
            while self.gather():
                before, self.again = self.checkpoint, False
                status = self.start() or self.supervise(before)
                self.release()
                if status == SAVED_AND_STOPPED and self.again and not self.request:
                    continue
                if status in (0, SAVED_AND_STOPPED, WRONG_OPTIONS) or self.request:
                    break
                failures = 1 if self.checkpoint > before else failures + 1
                if failures == self.options.max_failures:
                    say(f"{failures} failures without a checkpoint between them: giving up")
                    break
            request_resources(bundles=[])
        finally:
            self.release()
        stopped = status == SAVED_AND_STOPPED or status == LOST and self.request
        return self.say_how_to_resume() if stopped else status

    def say_how_to_resume(self) -> int:
        """Says how to resume a run that was stopped; returns its exit status."""
        say(f"stopped. Resume with:\n  {shlex.join(self.options.command)}")
        return SAVED_AND_STOPPED

    def await_head(self) -> None:
        """Waits for the head of the cluster; without it Ray would abort this process."""
        end = time.monotonic() + GONE_SECONDS
        while launch.why_silent(self.head):
            if time.monotonic() > end:
                self.stop(f"the head of the cluster, {self.head}, does not answer", signal.SIGTERM)
                time.sleep(SETTLE_SECONDS)  # to save, where there are nodes
                os._exit(self.say_how_to_resume())
            time.sleep(LOOK_SECONDS)

    def gather(self) -> bool:
        """Reserves places for as many workers as there can be; False if the run is to stop."""
        began = time.monotonic()
        said = began - SAY_SECONDS + SETTLE_SECONDS
        while self.request is None:
            self.await_head()
            free, nodes = self.places(available_resources_per_node())
            count, now = self.largest(free), time.monotonic()
            all_free = self.starts and free >= self.places()[0]
            if count and (count == self.most or all_free or now - began > SETTLE_SECONDS):
                here = {"ray.io/node-id": f"in({','.join(nodes)})"}
                wanted = {"bundles": [self.bundle] * count, "bundle_label_selector": [here] * count}
                self.group = ray.util.placement_group(strategy="SPREAD", **wanted)
                if self.group.wait(SETTLE_SECONDS):
                    return True
                self.release()
            elif not count and now - said > SAY_SECONDS:
                said = now
                say(f"places for {free} of at least {self.least} workers; waiting for nodes")
            time.sleep(1)
        return False

    def places(self, resources: dict | None = None) -> tuple[int, list[str]]:
        """Counts the workers that fit into what is free, or into all, and names the nodes."""
        draining, found = state.get_draining_nodes(), 0
        names: list[str] = []
        for node in ray.nodes():
            name, port = node["NodeID"], node["NodeManagerPort"]
            address = f"{node['NodeManagerAddress']}:{port}"
            have = node["Resources"] if resources is None else resources.get(name, {})
            fits = min(int(have.get(kind, 0) / count) for kind, count in self.bundle.items())
            # A node that does not answer is gone; Ray takes a quarter of a minute to say so.
            if fits and node["Alive"] and name not in draining and not launch.why_silent(address):
                found, names = found + fits, [*names, name]
        return found, names

    def largest(self, places: int) -> int:
        """Returns the largest number of workers that can share the global batch; 0 for none."""
        counts = range(min(places, self.most), self.least - 1, -1)
        return next((count for count in counts if self.shares % count == 0), 0)

    def release(self) -> None:
        """Ends all processes and actors, and gives the places back."""
        self.await_head()
        kills = [member.actor.send.remote(signal.SIGKILL) for member in self.members]
        if kills:
            ray.wait(kills, num_returns=len(kills), timeout=FAIL_SECONDS)
        for member in self.members:
            ray.kill(member.actor)
        if self.group:
            ray.util.remove_placement_group(self.group)
        self.members, self.group = [], None

    def start(self) -> int | None:
        """Starts a worker at each place; returns an exit status where that fails."""
        options, count = self.options, self.group.bundle_count
        words = ["-m", options.module, *options.arguments]
        mark = f"start {self.starts} of {count} workers, {time.time_ns():x}"
        end = time.monotonic() + (LOCK_SECONDS if self.starts else 0)
        self.starts += 1
        for index in range(count):
            place = PlacementGroupSchedulingStrategy(self.group, index)
            actor = self.worker.options(scheduling_strategy=place).remote(options.run_dir, index)
            self.members.append(Member(index, actor))
        try:
            for member in self.members:
                place = None
                while place is None:
                    waits = time.monotonic() < end and not self.request
                    prepared = member.actor.prepare.remote(mark, count, waits)
                    place = ray.get(prepared, timeout=START_SECONDS)
                    time.sleep(0 if place else LOOK_SECONDS)
                member.node, member.address = place
            cluster = {"worker": [member.address for member in self.members]}
            say(f"{mark}: {', '.join(cluster['worker'])}")
            for member in self.members:
                task = {"type": "worker", "index": member.index}
                config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
                environment = options.environment | config
                started = member.actor.start.remote(words, os.getcwd(), environment)
                ray.get(started, timeout=START_SECONDS)
        except ray.exceptions.RayTaskError as error:
            say(f"cannot start: {error.cause}")
            return WRONG_OPTIONS
        except ray.exceptions.RayError:  # an actor is lost, or its place
            say("cannot start: a worker is lost")
            return LOST
        return None

    def supervise(self, before: str) -> int:
        """Waits for the end of the processes; returns the exit status that this means.

        `before` is the newest checkpoint when they started.
        """
        looks = {member.actor.look.remote(): member for member in self.members}
        watched, deadline, is_passed_on = time.monotonic(), float("inf"), False
        while looks and time.monotonic() < deadline:
            for reference in ray.wait(list(looks), timeout=1)[0]:
                member = looks.pop(reference)
                self.hear(member, reference)
                if member.status is None:
                    looks[member.actor.look.remote()] = member
            ends = {member.status for member in self.members} - {None, 0}
            if ends:
                seconds = launch.SAVE_SECONDS if ends == {SAVED_AND_STOPPED} else FAIL_SECONDS
                # Who is lost is the cause; the others have nothing to say.
                deadline = min(deadline, time.monotonic() + (0 if LOST in ends else seconds))
            if self.killed_by:
                say("killing the processes")
                return 128 + self.killed_by
            if self.request and not is_passed_on:
                is_passed_on, name = True, signal.Signals(self.request).name
                self.stop(f"{name}: asking the processes to stop; again kills", self.passed_on)
            elif not (ends or self.again) and time.monotonic() - watched > WATCH_SECONDS:
                watched, reason = time.monotonic(), self.why_again(self.checkpoint > before)
                if reason:
                    self.again = True
                    self.stop(f"{reason}: asking the processes to save", signal.SIGTERM)
        culprit = max(self.members, key=Member.blame)
        if culprit.status in ENDED_WELL or culprit.index == 0:
            self.show(time.monotonic())
        if culprit.status not in ENDED_WELL:
            say(culprit.end)
        self.texts = []
        return culprit.status or 0

    def show(self, until: float) -> None:
        """Prints what the chief wrote until then; a closed terminal does not end a run."""
        while self.texts and self.texts[0][0] <= until:
            with contextlib.suppress(OSError):
                print(self.texts.pop(0)[1], end="", flush=True)

    def hear(self, member: Member, reference: object) -> None:
        """Takes in what an actor has seen."""
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError:
            member.status, member.end = LOST, f"worker {member.index}, {member.address}, is lost"
            return
        member.status, member.end = found["status"], found.get("end", "")
        asked = (128 + signal.SIGTERM, 128 + signal.SIGINT) if self.again or self.request else ()
        if member.status in asked:  # it was still importing: nothing is lost
            member.status = SAVED_AND_STOPPED
        if member.index == 0:
            now = time.monotonic()
            self.texts.append((now, found["text"]))
            self.show(now - FAIL_SECONDS)  # it may complain about one whose end is not known yet
            self.checkpoint = max(self.checkpoint, found["checkpoint"])
            self.shares = found.get("shares", self.shares)

    def stop(self, reason: str, number: int | None) -> None:
        """Asks all processes to save and stop, by a signal."""
        say(reason)
        for member in self.members:
            if member.status is None:
                member.actor.send.remote(number)

    def why_again(self, has_saved: bool) -> str | None:
        """Tells why the run is to start again with other workers; None where it is not."""
        self.await_head()
        draining = state.get_draining_nodes()
        leaving = [member.address for member in self.members if member.node in draining]
        if leaving:
            return f"Ray takes the node of {', '.join(leaving)} away"
        if not has_saved or len(self.members) == self.most:
            return None
        count = self.largest(len(self.members) + self.places(available_resources_per_node())[0])
        return f"places for {count} workers" if count > len(self.members) else None


def worker_counts(text: str) -> tuple[int, int]:
    """Reads N or MIN:MAX; a type for argparse."""
    counts = [whole_number(1, 1024)(part) for part in text.split(":")]
    if len(counts) > 2 or counts[0] > counts[-1]:
        raise argparse.ArgumentTypeError(f"expected N or MIN:MAX, found {text!r}")
    return counts[0], counts[-1]


def read_options(argv: list[str]) -> argparse.Namespace:
    """Reads and checks the command line; a `SystemExit` with status 2 where it cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.on_ray",
        usage="python -m distribution.on_ray [options] -m MODULE [options of the module]",
        epilog="Ctrl-C (or SIGTERM) asks the processes to save and stop, a second one kills them."
        " Exit status: 75 if the run stopped (the same command resumes it), 2 if the options are"
        " wrong. Ports are neither encrypted nor protected by a password: private networks only.",
        allow_abbrev=False,
    )
    add, number, limit = parser.add_argument, whole_number, "failures without a checkpoint between"
    add("--workers", type=worker_counts, required=True, help="N, or MIN:MAX: those that fit")
    add("--cpus-per-worker", type=number(1, 1024), default=1, help="cores (default 1)")
    add("--gpus-per-worker", type=number(0, 1024), default=0, help="GPUs (default 0)")
    add("--address", default="auto", help="HOST:PORT of the head (default: RAY_ADDRESS, or here)")
    add("--max-failures", type=number(1, 1024), default=3, help=f"{limit} them to end (default 3)")
    add("-m", metavar="MODULE", help="what to run; everything after it goes to the module")
    options, run_dir = launch.split_options(parser, argv)
    if run_dir is None or not run_dir.is_absolute():
        parser.error("--run-dir after the module must be an absolute path, on a shared disk")
    options.run_dir = run_dir
    options.command = ["python", "-m", "distribution.on_ray", *argv]
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    options.environment = passed_on | {
        "PYTHONUNBUFFERED": "1",
        "KERAS_RECIPES_LAUNCHED": "1",
        "KERAS_RECIPES_PLANNED_WORKERS": str(options.workers[1]),
    }
    if not options.gpus_per_worker:
        threads = dict.fromkeys(launch.THREADS, str(options.cpus_per_worker))
        options.environment = {"CUDA_VISIBLE_DEVICES": "-1"} | threads | options.environment
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, or as a function what a Ray job asks for; returns its exit status."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    try:
        if ray is None:
            raise ConnectionError("Ray is not installed: pip install -e '.[ray]'")
        if ":" in options.address and launch.why_silent(options.address):
            raise ConnectionError(f"--address {options.address}: no Ray cluster answers")
        ray.init(options.address, ignore_reinit_error=True, log_to_driver=False, logging_level=40)
    except (ConnectionError, RuntimeError, ValueError) as error:
        say(str(error))
        return WRONG_OPTIONS
    kinds = {kind for node in ray.nodes() if node["Alive"] for kind in node["Resources"]}
    gpus = [kind for kind in kinds if kind.startswith("accelerator_type:")]
    if options.gpus_per_worker and len(gpus) > 1:
        say(f"the cluster has GPUs of several types, whose numbers differ: {', '.join(gpus)}")
        return WRONG_OPTIONS
    run = RayRun(options)
    with contextlib.suppress(ValueError):  # not in the main thread: the signals are another's
        run.listen()
    return run.run()


if __name__ == "__main__":
    sys.exit(main())
