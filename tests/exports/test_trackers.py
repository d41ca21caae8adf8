"""The real trackers, in their local modes; needs the packages of `make test-export`."""

import json
import os
import signal
import struct

import pytest

from callbacks.errors import Stopped
from callbacks.stop_at_step import StopAtStep
from tests.support import tiny_recipe

pytestmark = pytest.mark.export
STEPS = 2 * tiny_recipe.STEPS_PER_EPOCH


def stop_and_resume(folder, tracker, monkeypatch):
    """Stops in mid-epoch and where an epoch ends; returns the results of the whole run."""
    stock = StopAtStep.on_step_end

    def on_step_end(self, now, logs):
        if now in (5, 9):
            os.kill(os.getpid(), signal.SIGTERM)
        stock(self, now, logs)

    monkeypatch.setattr(StopAtStep, "on_step_end", on_step_end)
    options = tiny_recipe.Options(run_dir=folder, tracker=tracker, test_every=4, log_every=1)
    for _ in range(2):
        with pytest.raises(Stopped):
            tiny_recipe.main(options)
    return tiny_recipe.main(options)


def records_of(path):
    """What a `.wandb` file holds: after seven bytes a log of LevelDB's, in blocks of 32 KiB."""
    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := 2**15 - position % 2**15) < 7:
            position += left
            continue
        _, length, part = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # the whole record, or the last part of one
            yield whole
            whole = b""


def test_mlflow_holds_each_step_of_one_run_once(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    results = stop_and_resume(tmp_path / "run", "mlflow", monkeypatch)
    client = MlflowClient()
    (experiment,) = [e for e in client.search_experiments() if e.name == "keras-recipes"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["global_batch_size"] == "8"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1, STEPS + 1))
    epochs = client.get_metric_history(run.info.run_id, "validation/accuracy")
    assert [point.step for point in epochs] == [STEPS // 2, STEPS]
    assert [point.value for point in epochs] == results["history"]["val_accuracy"]
    assert run.data.metrics["test/accuracy"] == results["test"]["accuracy"]


def test_wandb_holds_each_step_of_one_run_once(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    results = stop_and_resume(tmp_path / "run", "wandb", monkeypatch)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 3
    numbers, rows = set(), []
    for path in files:
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                numbers.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or ".".join(i.nested_key): i for i in record.history.item}
                rows.append({key: json.loads(item.value_json) for key, item in items.items()})
    assert len(numbers) == 1
    assert [row["_step"] for row in rows] == list(range(1, STEPS + 1))
    assert [r["validation/accuracy"] for r in rows if "validation/accuracy" in r] == (
        results["history"]["val_accuracy"]
    )
    assert rows[-1]["test/accuracy"] == results["test"]["accuracy"]
