"""The callbacks of docs/trackers.md, as they are written there, with packages that note calls."""

import re
import sys
import types
from pathlib import Path

import pytest

from tests.support import tiny_recipe
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(import.*?)```", PAGE, re.DOTALL)


class Package(types.ModuleType):
    """Notes how its functions are called."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        return lambda *words, **named: self.calls.append((name, words, named))


@pytest.mark.long
@pytest.mark.parametrize(
    "package, log, init",
    [
        ("wandb", "log", {"init"}),
        ("mlflow", "log_metrics", {"start_run", "log_params"}),
    ],
)
def test_a_tracker_gets_every_number(package, log, init, tmp_path, monkeypatch):
    noted = Package(package)
    noted.config, noted.summary = {}, {}  # of wandb
    monkeypatch.setitem(sys.modules, package, noted)
    (block,) = (block for block in BLOCKS if f"import {package}" in block)
    names = {}
    exec(block, names)
    options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=4, validate_every=3)
    run = types.SimpleNamespace(recipe="tiny", options=options)
    results = tiny_recipe.main(options, extra=[names["Tracker"](run)])
    assert {name for name, *_ in noted.calls} == init | {log}
    if package == "wandb":
        assert noted.config["max_steps"] == 4
    sent = [(named["step"], words[0]) for name, words, named in noted.calls if name == log]
    assert [step for step, _ in sent] == [2, 3, 4, 4, 4]
    assert sent[1][1].keys() >= {"validation/loss", "validation/accuracy"}
    assert sent[-1][1]["test/accuracy"] == pytest.approx(results["test"]["accuracy"])
    assert "epoch/val_loss" in sent[-2][1]


def test_weights_and_biases_drops_no_test_of_earlier_weights(monkeypatch):
    """As with --early-stopping: it ignores what is logged for an earlier step than its last one."""
    noted = Package("wandb")
    noted.config, noted.summary = {}, {}
    monkeypatch.setitem(sys.modules, "wandb", noted)
    (block,) = (block for block in BLOCKS if "import wandb" in block)
    names = {}
    exec(block, names)
    run = types.SimpleNamespace(recipe="tiny", options=tiny_recipe.Options(run_dir=Path("run")))
    tracker = names["Tracker"](run)
    tracker.on_record({"event": "epoch", "step": 18, "epoch": 2, "val_loss": 0.5})
    tracker.on_record(
        {"event": "evaluation", "step": 9, "epoch": 1, "split": "test", "accuracy": 0.8}
    )
    assert noted.summary == {"test/accuracy": 0.8}
