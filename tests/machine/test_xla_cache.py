"""What XLA has compiled is kept between processes, and never loaded unchecked."""

import json
import os

import pytest

from machine import xla_cache
from tests.support.processes import start

# Compiles a step of a tiny model, as a run does; tells what it computed, and what was kept.
PROGRAM = """
import json, os, sys
import recipes
import tensorflow as tf
from machine import xla_cache
if "deterministic" in sys.argv:
    tf.config.experimental.enable_op_determinism()
known = xla_cache.take(sys.argv[1], "tiny")
times = lambda: [path.stat().st_mtime_ns for path in xla_cache._own.iterdir()]
before = times()
w = tf.Variable(tf.random.stateless_normal((64, 64), (1, 2)))
@tf.function(jit_compile=True)
def step(x):
    w.assign_sub(tf.nn.softmax(tf.nn.gelu(x @ w)))
step(tf.random.stateless_normal((64, 64), (3, 4)))
after = times()
xla_cache.keep()
print(json.dumps([known, before == after, w.numpy().tobytes().hex()]))
"""
# An unknown flag would end the process. The last two are for --deterministic on a GPU.
XLA_FLAGS = xla_cache.KERNELS + (
    "/tmp/none --xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true"
)


def compile_and_step(cache, *words):
    folder = cache / "temporary files"
    folder.mkdir(exist_ok=True)
    process = start(*("-c", PROGRAM, str(cache), *words), XLA_FLAGS=XLA_FLAGS, TMPDIR=str(folder))
    said, _ = process.communicate()
    assert process.returncode == 0, said[-2000:]
    return json.loads(said.splitlines()[-1]), said


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    (*cold, first), _ = compile_and_step(tmp_path)
    (stored,) = tmp_path.glob("programs/*/*.sha256-*")
    assert not list(tmp_path.glob("temporary files/*"))  # nothing is left
    (*warm, second), _ = compile_and_step(tmp_path)
    # TensorFlow has written none, so it has loaded this one.
    assert cold == [False, False] and warm == [True, True] and second == first
    # One bit is another: not loaded, and compiled again. Op determinism changes nothing on a CPU.
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)
    (*found, third), said = compile_and_step(tmp_path, "deterministic")
    assert found == cold and f"{stored}: damaged" in said and third == first


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Makes this process one that begins, with a folder of this name."""
    import tensorflow  # noqa: F401 (its import names another folder)

    def begin(name):
        (tmp_path / name).mkdir()
        state = {"_owner": os.getpid(), "_own": tmp_path / name, "_seen": set()}
        for variable, value in state.items():
            monkeypatch.setattr(xla_cache, variable, value)
        return tmp_path / name

    return begin


def test_what_is_kept_is_taken_with_the_same_options(tmp_path, process):
    own = process("first")
    assert not xla_cache.take(tmp_path, "mnist", {"seed": 1})
    (own / "step.pb").write_bytes(b"code")
    xla_cache.keep()
    assert not xla_cache.take(tmp_path, "mnist", {"seed": 2})  # as in a notebook
    own = process("second")
    assert not xla_cache.take(tmp_path, "mnist", {"seed": 2}) and not list(own.iterdir())
    assert xla_cache.take(tmp_path, "mnist", {"seed": 1})
    assert (own / "step.pb").read_bytes() == b"code"


def test_on_a_gpu_the_choice_of_kernels_is_kept(tmp_path, process, monkeypatch):
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [kind])
    for name, known in (("first", False), ("second", True)):
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_ftz=false")
        own = process(name)
        assert xla_cache.take(tmp_path, "mnist") == known
        assert os.environ["XLA_FLAGS"] == f'--xla_gpu_ftz=false {xla_cache.KERNELS}"{own}"'
        if not known:
            (own / "tmp").mkdir()  # XLA's
            (own / "kernel.textproto").write_text("the fastest")
            xla_cache.keep()
    assert (own / "kernel.textproto").read_text() == "the fastest"


def test_a_cache_that_cannot_be_written(tmp_path, process):
    own = process("own")
    (tmp_path / "programs").write_text("a file")  # root may write everywhere else
    assert not xla_cache.take(tmp_path, "mnist")
    (own / "step.pb").write_bytes(b"code")
    xla_cache.keep()
    assert (tmp_path / "programs").read_text() == "a file"
