import pytest

from benchmarks import gpu, pipelines
from tests.support import processes


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
    """Failures are listed, and the rest is measured."""
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
