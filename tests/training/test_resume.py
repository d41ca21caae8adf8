"""Kill it anywhere: the same command finishes the run as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from callbacks import checkpoint as checkpoint_files
from tests.support import processes, strategy_run, tiny_recipe

# RESUME_SEED=... repeats the random steps of a run of these tests; a failure shows it.
SEED = int(os.environ.get("RESUME_SEED", time.time()))


def killed_run(run_dir: Path, run: str, status: int = 0, kill: dict | None = None, **options):
    print(f"RESUME_SEED={SEED}  {run}  {kill}")
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


def newest(run_dir: Path) -> checkpoint_files.CheckpointInfo:
    return checkpoint_files.newest(run_dir / "checkpoints", set_aside=False)


def logged_after_the_checkpoint(run_dir: Path) -> tuple[int, int]:
    """Bytes of metrics.jsonl and of TensorBoard's files that the next run has to cut off."""
    state = newest(run_dir).state["callbacks"]
    records = (run_dir / "metrics.jsonl").stat().st_size - state["records"]["bytes"]
    remembered = state["tensorboard"]["files"]
    events = sum(path.stat().st_size for path in run_dir.glob("events*"))
    return records, events - sum(remembered.values())


@pytest.mark.parametrize(
    ("moments", "steps"),
    [
        (["halfway"], [8]),
        # At first nothing is saved yet.
        pytest.param(["before", "halfway", "rename", "after"], [8, 12], marks=pytest.mark.long),
    ],
    ids=["thrice", "seven times"],
)
def test_killed_at_every_moment_and_at_random_ones(moments, steps, folder, unbroken):
    """A run killed several times equals one that was never killed."""
    run_dir = folder / f"killed-{len(moments)}"
    for at in moments:
        killed_run(run_dir, "tiny", status=-signal.SIGKILL, kill={"at": at, "save": 1})
    # Steps 8 and 12: the record of two steps before lies after the last checkpoint.
    random_step = random.Random(SEED).randrange(13, 20)
    for step in (*steps, random_step):
        killed_run(run_dir, "tiny", status=-signal.SIGKILL, kill={"at": "step", "step": step})
        if step != random_step:
            records, events = logged_after_the_checkpoint(run_dir)
            assert records > 0 and events > 0, step
    killed_run(run_dir, "tiny")
    assert_identical(run_dir, unbroken("tiny"))
    assert not list(run_dir.glob("checkpoints/.*")), "left over from a kill"

    said = killed_run(run_dir, "tiny", quiet=False)
    assert "is finished: nothing to do" in said


@pytest.mark.long
def test_killed_while_the_only_checkpoint_is_replaced(folder, unbroken):
    """An epoch's last step is saved before the validation, and again after it."""
    run_dir = folder / "replaced"
    kill = {"at": "evaluating", "evaluation": 1, "signal": "TERM"}
    killed_run(run_dir, "tiny", status=75, kill=kill, keep_checkpoints=1)
    assert newest(run_dir).step == 9 and newest(run_dir).epochs_done == 0
    kill = {"at": "replace", "save": 1}
    killed_run(run_dir, "tiny", status=-signal.SIGKILL, kill=kill, keep_checkpoints=1)
    assert list(run_dir.glob("checkpoints/.step-00000009.replaced"))
    killed_run(run_dir, "tiny", keep_checkpoints=1)
    assert_identical(run_dir, unbroken("tiny"))
    assert processes.results(run_dir)["resumed_from_step"] == 9
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000020"]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tiny", "bert"])
def test_a_deterministic_run_on_one_device_that_xla_compiles(recipe, folder, unbroken):
    run, kill = f"{recipe}_xla", {"at": "step", "step": 9}
    run_dir = folder / run
    killed_run(run_dir, run, status=-signal.SIGKILL, kill=kill, deterministic=True)
    killed_run(run_dir, run, deterministic=True)
    whole = unbroken(run, deterministic=True)
    assert_identical(run_dir, whole)
    log = (whole / "worker-0.log").read_text()
    assert "compiles the first step" in log, "XLA did not compile: nothing is tested here"
    if recipe == "bert":  # XLA rounds otherwise
        names = [processes.results(run)["weights_sha256"] for run in (run_dir, unbroken("bert"))]
        assert names[0] != names[1]


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("tiny", {"strategy": "mirrored", "replicas": 2}),
        ("tiny_half", {}),
        ("bert_together", {}),
        ("dna", {}),
        ("scores", {}),
        ("several", {}),
    ],
    ids=[
        "mirrored x 2",
        "mixed_float16",
        "accumulation, clipping, evaluations in mid-epoch",
        "dna_melting",
        "scores of text_classification",
        "several labels of text_classification",
    ],
)
@pytest.mark.long
def test_killed_once(run, options, folder, unbroken, request):
    run_dir = folder / request.node.callspec.id.replace(" ", "-")
    # A record is made of every second step, and 12 is the last one saved.
    kill = {"at": "step", "step": 15}
    killed_run(run_dir, run, status=-signal.SIGKILL, kill=kill, **options)
    assert logged_after_the_checkpoint(run_dir) > (0, 0)
    killed_run(run_dir, run, **options)
    assert_identical(run_dir, unbroken(run, **options))


@pytest.mark.long
def test_two_workers_are_restarted_and_resume(folder):
    """The launcher starts both again when one was killed, and they resume where they were."""
    outcomes = []
    for name, kill in (("whole", {}), ("broken", {"at": "step", "step": 11, "worker": 1})):
        run_dir = folder / f"workers-{name}"
        chosen = json.dumps({"run": "tiny", "kill": kill, "strategy": "multi_worker"})
        processes.launch(
            2,
            *("killed_run", chosen, str(run_dir)),
            logs=folder / f"logs-{name}",
            options=("--max-restarts", "1"),
        )
        outcomes.append(run_dir)
    assert_identical(outcomes[1], outcomes[0])


@pytest.mark.long
def test_no_worker_ends_before_the_chief_has_saved(folder):
    """The launcher, or SLURM, would kill a chief that still writes after another one's exit."""
    run_dir = folder / "slow" / "run"
    kill = {"at": "step", "step": 3, "signal": "TERM", "slow": 1}
    chosen = json.dumps({"run": "tiny", "kill": kill, "strategy": "multi_worker"})
    processes.launch(2, *("killed_run", chosen, str(run_dir)), logs=folder / "slow-logs", status=75)
    left = [run_dir.with_name(f"checkpoints-{index}.txt").read_text() for index in (0, 1)]
    assert left == ["step-00000003"] * 2


@pytest.mark.long
def test_sigterm_then_another_number_of_replicas(folder, unbroken):
    run_dir = folder / "moved"
    step = random.Random(SEED).randrange(2, 20)
    kill = {"at": "step", "step": step, "signal": "TERM"}
    said = killed_run(run_dir, "tiny_exact", status=75, kill=kill)
    assert "Resume with:" in said and f"--run-dir {run_dir}" in said
    assert newest(run_dir).step == step
    killed_run(run_dir, "tiny_exact", strategy="mirrored", replicas=2)
    processes.assert_equal_tensors(unbroken("tiny_exact"), run_dir)
    assert processes.results(run_dir)["global_batch_size"] == 8


@pytest.mark.parametrize("at", ["downloading", "tokenising"])
def test_asked_to_stop_before_training(at, folder):
    """Nothing is left but a clean cache, and the exit status says: come again."""
    run_dir = folder / f"stopped-{at}"
    kill = {"at": at, "signal": "TERM"}
    cache = folder / f"cache-{at}"
    said = killed_run(run_dir, "bert", status=75, kill=kill, cache_dir=str(cache))
    assert "stopped before training began: the same command starts again" in said
    assert not run_dir.exists()
    assert {path.name[:6] for path in cache.rglob(".*")} <= {".lock-"}


@pytest.mark.long
def test_asked_to_stop_while_evaluating(folder, unbroken):
    """In the validation after an epoch, in that after the run's last step, and in the test."""
    run_dir = folder / "stopped-evaluating"
    for evaluation, epochs_done, step in ((1, 0, 9), (3, 2, 20), (2, 3, 20)):
        kill = {"at": "evaluating", "evaluation": evaluation, "signal": "TERM"}
        killed_run(run_dir, "tiny", status=75, kill=kill)
        assert (newest(run_dir).epochs_done, newest(run_dir).step) == (epochs_done, step)
    killed_run(run_dir, "tiny")
    assert_identical(run_dir, unbroken("tiny"))


@pytest.fixture(scope="module")
def stopped(folder):
    """A run stopped after step 14, with checkpoints of steps 4, 8, 9, 12 and 14."""
    run_dir = folder / "stopped"
    killed_run(run_dir, "bert", status=75, kill={"at": "step", "step": 14, "signal": "INT"})
    return run_dir


def test_extending_a_finished_run_recomputes_the_schedule(folder, unbroken):
    run_dir = folder / "extended"
    shutil.copytree(unbroken("tiny"), run_dir)
    said = killed_run(run_dir, "tiny", resume="extend", max_steps=27, quiet=False)
    assert "the schedule is recomputed over 27 steps instead of 20" in said
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


@pytest.mark.long
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
        [sys.executable, str(script)],
        check=True,
        cwd="/",
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": ""},
    )
    saved = [v for k, v in processes.tensors(stopped).items() if "optimizer" not in k]
    loaded = np.load(tmp_path / "w.npy")
    assert any(v.shape == loaded.shape and (v == loaded).all() for v in saved)


@pytest.mark.parametrize("quantized", [False, pytest.param(True, marks=pytest.mark.long)])
def test_adapters_of_keras_resume_bit_for_bit(quantized, tmp_path):
    """Keras's own files have merged them into the kernels."""

    def build(options):
        model = tiny_recipe.build_model(options)
        if quantized:
            model.quantize("int8")
        model.layers[0].enable_lora(2)
        model.layers[-1].enable_lora(2)
        return model

    chosen = dict(early_stopping=1, keep_best="val_accuracy")
    whole = tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "whole", **chosen), build=build)
    options = tiny_recipe.Options(run_dir=tmp_path / "resumed", **chosen)
    with pytest.raises(KeyboardInterrupt):
        tiny_recipe.main(options, build=build, extra=[tiny_recipe.StopAfter(4)])
    resumed = tiny_recipe.main(options, build=build)
    assert resumed["resumed_from_step"] == 4
    for name in ("weights_sha256", "history", "test"):
        assert resumed[name] == whole[name]
