"""The comparisons of fine-tuning and of generation, with models that show nothing but work."""

import json
import sys
import types

import numpy as np
import pytest

from benchmarks import everything, fine_tuning, generation, in_torch
from tests.support import processes


def measured(program, tmp_path, *words) -> list[dict]:
    output = tmp_path / "rows.json"
    words = [f"benchmarks/{program}.py", "--tiny", "--turns", "1", "--json", str(output), *words]
    processes.run_script(*words)
    return json.loads(output.read_text())["rows"]


@pytest.mark.long
def test_our_sides_alone(tmp_path):
    """Measures the rates of this package where there is no PyTorch."""
    rows = measured("fine_tuning", tmp_path)
    names = [f"fine-tuning by the recipe, {of} tokens, tokens/s" for of in ("16", "5 to 16")]
    assert [row["measure"] for row in rows] == names and all(row["median"] > 0 for row in rows)
    rows = measured("generation", tmp_path)
    names = [f"generation, {size} at once, tokens/s" for size in (1, 8)]
    assert [row["measure"] for row in rows] == names and all(row["median"] > 0 for row in rows)


@pytest.mark.export
def test_both_sides_have_the_same_weights_and_answers(tmp_path):
    """Each program compares them before it measures, and ends where they differ."""
    trainer = ("--trainer-python", sys.executable)
    rows = measured("fine_tuning", tmp_path, *trainer)
    assert [row["measure"] for row in rows] == [
        f"fine-tuning, {of} tokens: recipe ÷ Trainer, tokens/s" for of in ("16", "5 to 16")
    ]
    rows = measured("generation", tmp_path, *trainer)
    assert [row["measure"] for row in rows] == [
        f"generation, {size} at once: recipe ÷ transformers, tokens/s" for size in (1, 8)
    ]


def test_other_logits_and_other_answers_end_the_comparison(tmp_path, monkeypatch):
    ours = np.zeros((2, 3))
    in_torch.require_equal(ours, ours + 9e-4)
    for theirs in (ours + 2e-3, ours + np.nan):
        with pytest.raises(SystemExit, match="the logits differ by"):
            in_torch.require_equal(ours, theirs)

    class Side:
        def __init__(self, name, *words, **environ):
            (tmp_path / f"{name}.json").write_text(json.dumps([[1, len(name)]]))

        def steps(self, count):
            return {"seconds": 1, "tokens": 1}

        def close(self):
            pass

    monkeypatch.setattr(generation.pipelines, "Side", Side)
    pythons = dict.fromkeys(generation.SIDES, "python")
    with pytest.raises(SystemExit, match="do not answer with the same tokens"):
        generation.compare(tmp_path, pythons, 1, turns=1)


def test_both_are_among_the_measurements_of_make_bench():
    chosen = types.SimpleNamespace(dataset="auto", vocabulary=None, trainer_python="python")
    commands = everything.measurements(chosen)
    for program in (fine_tuning, generation):
        name = program.__name__.rpartition(".")[2]
        assert commands[name] == ["--trainer-python", "python"]
