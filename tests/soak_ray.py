"""Takes and gives nodes of a Ray cluster at random moments, and compares with an unbroken run.

    make soak-ray                                     30 rounds
    make soak-ray ARGS="--rounds 100 --seed 7"
    make soak-ray ARGS="--folder /tmp/soak-ray"       resumes an earlier soak

Each round starts a cluster of three nodes on this machine and a run of one to three workers. At
random moments a node dies, a node comes, a worker's process is killed, or Ray takes a node away.
Weights, losses and test metrics must be equal to those of one device, in float64.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ENABLE_METRICS_COLLECTION": "0"}

from tests.launch import test_on_ray as ray_runs  # noqa: E402
from tests.support import strategy_run  # noqa: E402

FAULTS = 4  # in a round, at most
ROUND_SECONDS = 900


def one_round(folder: Path, whole: Path, seed: str) -> str:
    """Breaks a run, and returns what was done to it."""
    choice, run = random.Random(seed), folder / "broken"
    shutil.rmtree(run, ignore_errors=True)
    cluster = ray_runs.Nodes(folder)
    nodes, done, draining = list(cluster.nodes), [], set()
    seconds = str(choice.uniform(0.1, 0.6))
    options = ["--max-failures", "100"]
    process = cluster.train(run, options=options, RECIPES_TEST_STEP_SECONDS=seconds)
    end = time.monotonic() + ROUND_SECONDS
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise AssertionError(f"no end within {ROUND_SECONDS} s")
            # Mostly in mid-training; sometimes while the processes start or save.
            step = ray_runs.step_of(run) if choice.random() < 0.7 else -1
            moment = time.monotonic() + choice.uniform(1, 8)
            while process.poll() is None and time.monotonic() < end:
                steps = ray_runs.step_of(run) > step or not nodes  # without nodes there are none
                if steps and time.monotonic() > moment:
                    break
                time.sleep(0.1)
            deeds = ["a node comes"] * (len(nodes) < 3)
            if len(done) < FAULTS:
                deeds += ["a worker is killed", "a node dies"] + ["a node leaves"] * (not draining)
            if process.poll() is not None or not deeds:
                continue
            deed = choice.choice(deeds)
            if deed == "a node comes":
                nodes.append(cluster.add())
                continue
            done.append(f"{deed} at step {ray_runs.step_of(run)}")
            if deed == "a worker is killed":
                pids = subprocess.run(
                    ["pgrep", "-f", f"-m ray_recipe .*{run}"], capture_output=True, text=True
                ).stdout.split()
                pids = [int(pid) for pid in pids if int(pid) != process.pid]
                if pids:
                    os.kill(choice.choice(pids), signal.SIGKILL)
            elif deed == "a node dies" and nodes:
                cluster.remove(nodes.pop(choice.randrange(len(nodes))))
            elif nodes:
                node = nodes.pop(choice.randrange(len(nodes)))
                draining.add(node.node_id)
                ray_runs.drain(cluster, node)
        ray_runs.end(process)
        ray_runs.assert_equal_runs(whole, run)
    except AssertionError as error:
        raise SystemExit(f"{seed}: {done}: {error}\nkept: {run}") from None
    finally:
        cluster.close()
    return f"{', '.join(done) or 'nothing lost'}; workers {ray_runs.parts(run)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="repeats a soak's choices")
    parser.add_argument("--folder", type=Path, default=None, help="kept; a soak there resumes")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="soak-ray-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    state_path, whole = folder / "soak.json", folder / "whole"
    if state_path.exists():
        state = json.loads(state_path.read_text())
        print(f"resumes: {state['rounds']} rounds are done")
    else:
        seed = options.seed if options.seed is not None else int(time.time())
        state = {"seed": seed, "rounds": 0}
        strategy_run.write_data(folder)
        ray_runs.train_whole(whole)
    print(f"--seed {state['seed']} --folder {folder}", flush=True)
    while state["rounds"] < options.rounds:
        done = one_round(folder, whole, f"{state['seed']}/{state['rounds']}")
        state["rounds"] += 1
        print(f"round {state['rounds']}: {done}: equal", flush=True)
        temporary = state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, state_path)
    print(f"{state['rounds']} rounds: every run equal")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
