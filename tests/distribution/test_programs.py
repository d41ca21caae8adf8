"""What XLA has compiled is kept between processes, and never loaded unchecked."""

import json
import os
import subprocess
import sys

import pytest

from distribution import programs
from tests.support.processes import ENVIRONMENT, ROOT

# Compiles a step of a tiny model, as a run does; tells what it computed, and what was kept.
PROGRAM = """
import json, os, sys
import recipes
import tensorflow as tf
from distribution import programs
if "deterministic" in sys.argv:
    tf.config.experimental.enable_op_determinism()
known = programs.take(sys.argv[1], "tiny")
before = {path.name: path.stat().st_mtime_ns for path in programs._own.iterdir()}
w = tf.Variable(tf.random.stateless_normal((64, 64), (1, 2)))
@tf.function(jit_compile=True)
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.softmax(tf.nn.gelu(x @ w)) ** 2)
    w.assign_sub(tape.gradient(loss, w))
    return loss
for _ in range(3):
    step(tf.random.stateless_normal((64, 64), (3, 4)))
after = {path.name: path.stat().st_mtime_ns for path in programs._own.iterdir()}
programs.keep()
print(json.dumps([known, before == after, w.numpy().tobytes().hex()]))
"""
# An unknown flag would end the process. The last two are for --deterministic on a GPU.
XLA_FLAGS = programs.KERNELS + (
    "/tmp/none --xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true"
)


def compile_and_step(cache, *words):
    folder = cache / "temporary files"
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache), *words],
        env=os.environ | ENVIRONMENT | {"XLA_FLAGS": XLA_FLAGS, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    (known, untouched, first), _ = compile_and_step(tmp_path)
    assert (known, untouched) == (False, False)
    (stored,) = tmp_path.glob("programs/*/*.sha256-*")
    assert not list(tmp_path.glob("temporary files/*"))  # nothing is left
    (known, untouched, second), _ = compile_and_step(tmp_path)
    assert (known, untouched) == (True, True)  # TensorFlow wrote none: it has loaded this one
    assert second == first
    # One bit is another: not loaded, and compiled again. Op determinism changes nothing on a CPU.
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)
    (known, untouched, third), said = compile_and_step(tmp_path, "deterministic")
    assert (known, untouched) == (False, False) and f"{stored}: damaged" in said
    assert third == first


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Makes this process one that begins: what TensorFlow has found there is forgotten."""

    def begin(name="own"):
        monkeypatch.setattr(programs, "_owner", os.getpid())
        monkeypatch.setattr(programs, "_own", tmp_path / name)
        monkeypatch.setattr(programs, "_seen", set())
        programs._own.mkdir()
        return programs._own

    return begin


def test_what_is_kept_is_taken_with_the_same_options(tmp_path, process):
    own = process("first")
    assert not programs.take(tmp_path, "mnist", {"seed": 1})
    (own / "step.pb").write_bytes(b"code")
    programs.keep()
    own = process("second")
    assert not programs.take(tmp_path, "mnist", {"seed": 2}) and not list(own.iterdir())
    assert programs.take(tmp_path, "mnist", {"seed": 1})
    assert (own / "step.pb").read_bytes() == b"code"


def test_a_cache_that_cannot_be_written(tmp_path, process):
    own = process()
    (tmp_path / "programs").write_text("a file")  # root may write everywhere else
    assert not programs.take(tmp_path, "mnist")
    (own / "step.pb").write_bytes(b"code")
    programs.keep()
    assert (tmp_path / "programs").read_text() == "a file"


def test_those_written_last_stay(tmp_path, process, monkeypatch):
    monkeypatch.setattr(programs, "FOLDERS", 2)
    for seed in range(4):
        own = process(f"own-{seed}")
        programs.take(tmp_path, seed)
        (own / "step.pb").write_bytes(b"code")
        programs.keep()
        for age, folder in enumerate(tmp_path.glob("programs/*")):
            os.utime(folder, (age, age))
    assert len(list(tmp_path.glob("programs/*"))) == 2
