import sys

import pytest

from benchmarks import gpu, pipelines
from tests.support import processes


class FakeSide:
    """Trains at the rate of its batch size; a matrix product has 100 tokens a second."""

    environs: list[dict] = []
    found_programs: list[bool] = []

    def __init__(self, name, python, folder, sizes, **environ):
        self.rate = 100 if name == "matrix_product" else sizes["batch_size"]
        self.works = sizes.get("jit") != "off"
        self.ends = sizes.get("steps_per_execution") == 10  # in its first turn
        self.environs.append(environ)
        self.found_programs.append((folder / "cache" / "programs").exists())
        (folder / "cache" / "programs").mkdir(parents=True, exist_ok=True)

    def steps(self, count):
        if not self.works or (self.ends and count == 5):
            raise SystemExit("out of memory\nand more")
        return {"seconds": count, "tokens": count * self.rate, "since_imports": 7}

    def close(self):
        pass


@pytest.mark.parametrize("together", [1, 3])
def test_a_group_of_the_gpu_bench(together, monkeypatch, tmp_path):
    """Failures are listed, the rest is measured, and what is known is written meanwhile."""
    monkeypatch.setattr(pipelines, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "environs", [])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_ftz=false")
    known = []

    def write(bench):
        known.append(len(bench.rows))

    bench = gpu.Bench(tmp_path, None, turns=2, seconds=5, minutes=1, together=together, write=write)
    flag = gpu.XLA_FLAGS[1]
    others = ["without XLA", "Trainer", "matrix product", flag]
    bench.run("BERT", {"batch_size": 40}, others, warm=True)
    assert [row["median"] for row in bench.rows] == [7, 7, 0.4, 1, 40] and bench.failed
    assert known[0] == 1 and known == sorted(known) and known[-1] == 5 and len(set(known)) > 2
    assert FakeSide.environs[-1] == {"XLA_FLAGS": f"--xla_gpu_ftz=false {flag}"}
    assert not any(FakeSide.environs[:-1])
    table = gpu.markdown("device", bench.rows, bench.missing)
    assert "| BERT: mfu | 0.400 | 0.400 to 0.400 | 40; 100 |  |" in table
    assert f"| BERT ÷ {flag} | 1.00 | 1.00 to 1.00 | 40; 40 | 7 |" in table
    # Of groups that are measured together, either may fail first.
    for reason in ("without XLA: out of memory", "Trainer: no --trainer-python"):
        assert f"\n- Not measured: BERT ÷ {reason}\n" in table


def test_a_group_begins_without_the_programs_of_another(monkeypatch, tmp_path):
    monkeypatch.setattr(pipelines, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "found_programs", [])
    bench = gpu.Bench(tmp_path, None, 2, 5, minutes=1, together=1, write=lambda bench: None)
    for _ in range(2):
        bench.run("BERT", {"batch_size": 40}, [], warm=True)
    assert FakeSide.found_programs == [False, True] * 2


def test_a_side_that_ends_within_its_turn_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(pipelines, "Side", FakeSide)
    bench = gpu.Bench(tmp_path, None, 2, 5, minutes=1, together=1, write=lambda bench: None)
    bench.run("BERT", {"batch_size": 40}, ["10 steps per execution", "matrix product"], warm=False)
    assert [row["measure"] for row in bench.rows[1:]] == ["BERT: mfu", "BERT: tokens/s"]
    (missing,) = bench.missing
    assert missing.startswith("BERT ÷ 10 steps per execution: out of memory") and bench.failed


def test_a_side_that_has_ended_says_why(tmp_path):
    side = pipelines.Side("nothing", sys.executable, tmp_path)
    side.process.wait(60)
    for _ in range(2):
        with pytest.raises(
            SystemExit, match="^nothing ended with status 2:\n(.|\n)*invalid choice"
        ):
            side.steps(1)
    side.close()


@pytest.mark.long
@pytest.mark.parametrize("words", ["-m pytest -m gpu tests/gpu", "benchmarks/gpu.py"])
def test_where_there_is_no_gpu_nothing_passes(words):
    assert "no GPU here: nothing was " in processes.run_script(*words.split(), status=1)
