"""Kill it anywhere: the same command finishes the run as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from callbacks import checkpoint
from tests.support import processes, strategy_run

KILLED = 128 + signal.SIGKILL


def killed_run(run_dir: Path, run: str, status: int = 0, kill: dict | None = None, **options):
    chosen = json.dumps({"run": run, "kill": kill or {}} | options)
    return processes.run_script("tests/support/killed_run.py", chosen, str(run_dir), status=status)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    strategy_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(folder):
    """Runs that nothing stopped, each done once."""
    done = {}

    def get(run: str, **options) -> Path:
        key = json.dumps([run, options], sort_keys=True)
        if key not in done:
            done[key] = folder / f"unbroken-{len(done)}"
            killed_run(done[key], run, **options)
        return done[key]

    return get


def assert_identical(resumed: Path, unbroken: Path) -> None:
    ours, theirs = processes.results(unbroken), processes.results(resumed)
    assert theirs["resumed_from_step"] is not None
    for name in ("weights_sha256", "history", "test", "steps"):
        assert ours[name] == theirs[name], name
    assert processes.records(unbroken) == processes.records(resumed)
    assert processes.events(unbroken) == processes.events(resumed)


def test_killed_at_every_moment_and_at_random_ones(folder, unbroken):
    """One run is killed seven times; in the end nobody can tell."""
    seed = int(os.environ.get("RESUME_SEED", time.time()))
    print(f"RESUME_SEED={seed}")
    run_dir = folder / "killed"
    steps = sorted(random.Random(seed).sample(range(5, 20), 3))
    kills = [
        {"at": "before", "save": 1},  # nothing is saved yet
        {"at": "halfway", "save": 1},
        {"at": "rename", "save": 1},
        {"at": "after", "save": 1},
        *({"at": "step", "step": step} for step in steps),
    ]
    for kill in kills:
        killed_run(run_dir, "bert", status=-signal.SIGKILL, kill=kill)
    killed_run(run_dir, "bert")
    assert_identical(run_dir, unbroken("bert"))
    assert not list(run_dir.glob("checkpoints/.*")), "left over from a kill"

    said = killed_run(run_dir, "bert", quiet=False)
    assert "is finished: nothing to do" in said


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("bert", {"strategy": "mirrored", "replicas": 2}),
        ("bert_half", {}),
        ("bert_together", {}),
    ],
    ids=["mirrored x 2", "mixed_float16", "accumulation, clipping, evaluations in mid-epoch"],
)
def test_killed_once(run, options, folder, unbroken, request):
    run_dir = folder / request.node.callspec.id.replace(" ", "-")
    kill = {"at": "step", "step": 14}
    killed_run(run_dir, run, status=-signal.SIGKILL, kill=kill, **options)
    killed_run(run_dir, run, **options)
    assert_identical(run_dir, unbroken(run, **options))


def test_two_workers_are_restarted_and_go_on(folder):
    """The launcher starts both again when one was killed, and they go on where they were."""
    outcomes = []
    for name, kill in (("whole", {}), ("broken", {"at": "step", "step": 11, "worker": 1})):
        run_dir = folder / f"workers-{name}"
        chosen = json.dumps({"run": "mnist", "kill": kill, "strategy": "multi_worker"})
        processes.launch(
            2,
            *("killed_run", chosen, str(run_dir)),
            logs=folder / f"logs-{name}",
            options=("--max-restarts", "1"),
        )
        outcomes.append(run_dir)
    assert_identical(outcomes[1], outcomes[0])


def test_sigterm_then_another_number_of_replicas(folder, unbroken):
    run_dir = folder / "moved"
    step = random.Random(time.time()).randrange(2, 20)
    kill = {"at": "step", "step": step, "signal": "TERM"}
    said = killed_run(run_dir, "bert_exact", status=75, kill=kill)
    assert "this goes on" in said and f"--run-dir {run_dir}" in said
    assert checkpoint.newest(run_dir / "checkpoints").step == step
    killed_run(run_dir, "bert_exact", strategy="mirrored", replicas=2)
    processes.assert_equal_tensors(unbroken("bert_exact"), run_dir)
    assert processes.results(run_dir)["global_batch_size"] == 8


@pytest.mark.parametrize("at", ["downloading", "tokenising"])
def test_asked_to_stop_before_training(at, folder):
    """Nothing is left behind but a clean cache, and the exit status says: come again."""
    run_dir = folder / f"stopped-{at}"
    begun = time.time()
    kill = {"at": at, "signal": "TERM"}
    cache = str(folder / f"cache-{at}")
    said = killed_run(run_dir, "bert", status=75, kill=kill, cache_dir=cache)
    assert time.time() - begun < 40  # most of it is starting Python and TensorFlow
    assert "this goes on" in said
    assert not run_dir.exists()
    assert not [path for path in Path(cache).rglob("*") if path.name.startswith(".tmp")]


def test_asked_to_stop_while_evaluating(folder, unbroken):
    """In the validation behind an epoch, in that behind the run's last step, and in the test."""
    run_dir = folder / "stopped-evaluating"
    for evaluation, epochs_done, step in ((1, 0, 9), (3, 2, 20), (2, 3, 20)):
        kill = {"at": "evaluating", "evaluation": evaluation, "signal": "TERM"}
        killed_run(run_dir, "mnist", status=75, kill=kill)
        saved = checkpoint.newest(run_dir / "checkpoints")
        assert (saved.epochs_done, saved.step) == (epochs_done, step)
    killed_run(run_dir, "mnist")
    assert_identical(run_dir, unbroken("mnist"))


def test_asked_to_stop_while_evaluating_in_mid_epoch(folder, unbroken):
    """Behind step 3; behind 9, an epoch's last; in the second one behind 12; behind the last."""
    run_dir = folder / "stopped-in-mid-epoch"
    for evaluation, step in ((1, 3), (5, 9), (4, 12), (6, 20)):
        kill = {"at": "evaluating", "evaluation": evaluation, "signal": "TERM"}
        killed_run(run_dir, "mnist_together", status=75, kill=kill)
        assert checkpoint.newest(run_dir / "checkpoints").step == step
    killed_run(run_dir, "mnist_together")
    assert_identical(run_dir, unbroken("mnist_together"))


@pytest.fixture(scope="module")
def stopped(folder):
    """A run stopped behind step 14, with checkpoints of steps 4, 8, 9, 12 and 14."""
    run_dir = folder / "stopped"
    killed_run(run_dir, "bert", status=75, kill={"at": "step", "step": 14, "signal": "INT"})
    return run_dir


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "empty"])
def test_a_damaged_checkpoint_is_named_and_passed_over(damage, stopped, tmp_path, caplog):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(stopped / "checkpoints", checkpoints)
    newest = checkpoints / "step-00000014"
    for file in newest.iterdir():
        content = bytearray(file.read_bytes())
        if damage == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "bit flipped":
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        else:
            file.write_bytes(b"")
        caplog.clear()
        with caplog.at_level("WARNING", logger="recipes"):
            import logging

            logging.getLogger("recipes").propagate = True
            found = checkpoint.newest(checkpoints)
        assert found.step == 12, file.name
        assert str(newest) in caplog.text and "is damaged" in caplog.text
        shutil.copy(stopped / "checkpoints" / newest.name / file.name, file)


def test_the_checkpoint_before_a_damaged_one_leads_to_the_same_end(stopped, folder, unbroken):
    run_dir = folder / "damaged"
    shutil.copytree(stopped, run_dir)
    weights = run_dir / "checkpoints" / "step-00000014" / "model.weights.h5"
    weights.write_bytes(weights.read_bytes()[:1000])
    said = killed_run(run_dir, "bert")
    assert "step-00000014 is damaged" in said
    assert_identical(run_dir, unbroken("bert"))


def test_other_options_are_refused_each_by_name(stopped):
    said = killed_run(stopped, "bert", status=2, seed=5, hidden_dim=8)
    assert "--seed: 0 there, 5 now" in said and "--hidden-dim: 16 there, 8 now" in said
    said = killed_run(stopped, "bert", status=2, resume="never")
    assert "--resume never" in said
    assert checkpoint.newest(stopped / "checkpoints").step == 14


def test_a_folder_in_use_is_refused(stopped):
    holder = subprocess.Popen(["flock", str(stopped / ".lock"), "sleep", "60"])
    try:
        time.sleep(0.5)
        assert "another run is using this folder" in killed_run(stopped, "bert", status=2)
    finally:
        holder.kill()
        holder.wait()


def test_extending_a_finished_run_lays_the_schedule_anew(folder, unbroken):
    run_dir = folder / "extended"
    shutil.copytree(unbroken("bert"), run_dir)
    said = killed_run(run_dir, "bert", resume="extend", max_steps=27, quiet=False)
    assert "the schedule is laid anew: over 27 steps instead of 20" in said
    results = processes.results(run_dir)
    assert results["steps"] == 27 and results["resumed_from_step"] == 20
    # The third epoch, in which the first run ended, is whole now.
    assert len(results["history"]["loss"]) == results["epochs"] == 3
    records = processes.records(run_dir)
    steps = [r for r in records if r["event"] == "step"]
    assert [r["step"] for r in steps] == [*range(2, 21, 2), *range(22, 27, 2), 27]
    third = [r["loss"] for r in steps if r["step"] > 18]
    weighted = np.dot(third, [2, 2, 2, 2, 1]) / 9
    np.testing.assert_allclose(results["history"]["loss"][2], weighted, rtol=1e-5)


def test_a_full_disk_harms_no_checkpoint(stopped, folder):
    run_dir = folder / "full"
    shutil.copytree(stopped, run_dir)
    said = killed_run(run_dir, "bert", status=1, kill={"at": "full", "save": 1})
    assert "cannot be written" in said and "step-00000014" in said
    assert checkpoint.newest(run_dir / "checkpoints").step == 14
    assert not list(run_dir.glob("checkpoints/.*"))


def test_a_bad_loss_stops_the_run_and_names_the_last_good_checkpoint(folder):
    run_dir = folder / "bad"
    said = killed_run(run_dir, "bert", status=1, kill={"at": "nan", "step": 11})
    assert "the loss is nan at step 11" in said and "step-00000009" in said
    assert "learning rate" in said


def test_a_checkpoint_loads_into_a_plain_keras_model(stopped, tmp_path):
    """The lines of docs/checkpoints.md, in a process without this package."""
    text = (processes.ROOT / "docs" / "checkpoints.md").read_text()
    code = text.split("```python")[1].split("```")[0]
    code = code.replace("RUN_DIR", str(stopped)).replace("step-00000500", "step-00000014")
    code = code.replace("vocabulary_size=8192", "vocabulary_size=120")
    for name, value in (("num_layers=2", 1), ("hidden_dim=128", 16), ("intermediate_dim=512", 64)):
        code = code.replace(name, f"{name.split('=')[0]}={value}")
    script = tmp_path / "plain.py"
    script.write_text(
        code + f"\nimport numpy\nnumpy.save({str(tmp_path / 'w.npy')!r}, "
        "model.backbone.token_embedding.embeddings.numpy())\n"
    )
    subprocess.run(
        [processes.sys.executable, str(script)],
        check=True,
        cwd="/",
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": ""},
    )
    saved = [v for k, v in processes.tensors(stopped).items() if "optimizer" not in k]
    loaded = np.load(tmp_path / "w.npy")
    assert any(v.shape == loaded.shape and (v == loaded).all() for v in saved)
