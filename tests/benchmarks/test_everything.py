import io
import json

import numpy as np
import pytest

from benchmarks import gpu, pipelines, sides
from tests.support import processes


def test_what_every_side_reads(tmp_path):
    """The same text and vocabulary, and the sequences that the recipe would cut."""
    lines = [f"words number {number} of a line" for number in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    vocabulary = "[PAD] [UNK] [CLS] [SEP] [MASK] words number of a line".split()
    (tmp_path / "vocabulary.txt").write_text("\n".join(vocabulary))
    sizes = {"batch_size": 2, "length": 16, "vocabulary_size": 99}
    pipelines.prepare(
        tmp_path / "work", str(tmp_path / "text.txt"), tmp_path / "vocabulary.txt", sizes
    )
    assert json.loads((tmp_path / "work" / "sizes.json").read_text())["vocabulary_size"] == 10
    train = (tmp_path / "work" / "text" / "wiki.train.tokens").read_text().splitlines()
    assert set(train) < set(lines) and len(train) > 300
    packed = np.load(tmp_path / "work" / "train.npy")
    assert packed.shape == (len(train) * 7 // 15, 16) and (packed[:, 0] == 2).all()


def test_a_side_takes_the_steps_that_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n3\n"))
    gate = sides.Gate(io.StringIO())
    gate.tokens_per_step = 10
    for _ in range(5):
        gate.before_step()
        gate.after_step()
    answers = [json.loads(line) for line in gate.answers.getvalue().splitlines()]
    assert [answer["tokens"] for answer in answers] == [20, 30]
    assert all(answer["seconds"] >= 0 for answer in answers)
    gate.begun, gate.last = 10, sides.time.perf_counter() - 100
    gate.skip()
    assert gate.begun >= 110, "an evaluation counts"


class FakeSide:
    """Trains at the rate of its batch size; a matrix product has 100 tokens a second."""

    def __init__(self, name, python, folder, sizes, **environ):
        self.rate = 100 if name == "matrix_product" else sizes["batch_size"]
        self.works = sizes.get("jit") != "off"

    def steps(self, count):
        if not self.works:
            raise SystemExit("out of memory\nand more")
        return {"seconds": count, "tokens": count * self.rate, "since_imports": 7}

    def close(self):
        pass


def test_a_group_of_the_gpu_bench(monkeypatch, tmp_path):
    """What fails or cannot be measured is listed, and the rest measured."""
    monkeypatch.setattr(pipelines, "Side", FakeSide)
    bench = gpu.Bench(tmp_path, None, turns=2, seconds=5, minutes=1)
    others = ["without XLA", "Trainer", "matrix product"]
    bench.run("BERT", {"batch_size": 40}, others, warm=True)
    assert [row["median"] for row in bench.rows] == [0.4, 40, 7, 7] and bench.failed
    table = gpu.markdown("device", bench.rows, bench.missing)
    assert "| BERT: mfu | 0.400 | 0.400 to 0.400 | 40; 100 |" in table
    assert "\n- Not measured: BERT ÷ without XLA: out of memory\n- Not" in table
    assert table.endswith(": BERT ÷ Trainer: no --trainer-python\n")


@pytest.mark.parametrize("words", ["-m pytest -m gpu tests/gpu", "benchmarks/gpu.py"])
def test_where_there_is_no_gpu_nothing_passes(words):
    assert "no GPU here: nothing was " in processes.run_script(*words.split(), status=1)
