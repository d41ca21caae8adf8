"""Compiled XLA programs are cached between processes, and never loaded unchecked."""

import errno
import json
import os
import pathlib
import types

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
known = xla_cache.restore(sys.argv[1], "tiny")
times = lambda: [path.stat().st_mtime_ns for path in xla_cache._own.iterdir()]
before = times()
w = tf.Variable(tf.random.stateless_normal((64, 64), (1, 2)))
@tf.function(jit_compile=True)
def step(x):
    w.assign_sub(tf.nn.softmax(tf.nn.gelu(x @ w)))
step(tf.random.stateless_normal((64, 64), (3, 4)))
after = times()
xla_cache.store()
print(json.dumps([known, before == after, w.numpy().tobytes().hex()]))
"""
# An unknown flag would end the process. The last two are for --deterministic on a GPU.
XLA_FLAGS = " ".join(
    (
        *(f"{flag}=/tmp/none" for flag in xla_cache.KERNELS),
        *xla_cache.flags_for_gpus(),
        "--xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true",
    )
)


def compile_and_step(cache, *words):
    folder = cache / "temporary files"
    folder.mkdir(exist_ok=True)
    process = start(*("-c", PROGRAM, str(cache), *words), XLA_FLAGS=XLA_FLAGS, TMPDIR=str(folder))
    said, _ = process.communicate()
    assert process.returncode == 0, said[-2000:]
    return json.loads(said.splitlines()[-1]), said


@pytest.mark.long
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


def test_what_is_stored_is_restored_with_the_same_options(tmp_path, process):
    own = process("first")
    assert not xla_cache.restore(tmp_path, "mnist", {"seed": 1})
    (own / "step.pb").write_bytes(b"code")
    xla_cache.store()
    assert not xla_cache.restore(tmp_path, "mnist", {"seed": 2})  # as in a notebook
    own = process("second")
    assert not xla_cache.restore(tmp_path, "mnist", {"seed": 2}) and not list(own.iterdir())
    assert xla_cache.restore(tmp_path, "mnist", {"seed": 1})
    assert (own / "step.pb").read_bytes() == b"code"


def test_a_full_temporary_disk_leaves_no_part_of_a_program(tmp_path, process, monkeypatch):
    """TensorFlow would load it, and the cache would get it with a correct checksum."""
    own = process("first")
    xla_cache.restore(tmp_path, "mnist")
    (own / "step.pb").write_bytes(b"code")
    xla_cache.store()
    own = process("second")

    def write_a_part(path, content):
        with open(path, "wb") as file:
            file.write(content[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", write_a_part)
        assert not xla_cache.restore(tmp_path, "mnist") and not list(own.iterdir())
    xla_cache.store()
    process("third")
    assert xla_cache.restore(tmp_path, "mnist")
    assert len(list(tmp_path.glob("programs/*/*"))) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensorflow.__version__", "2.99"),
        ("keras.__version__", "3.99"),
        ("os.sched_getaffinity", lambda process: range(99)),
    ],
)
def test_another_version_or_number_of_cores_compiles_its_own(
    name, value, tmp_path, process, monkeypatch
):
    own = process("first")
    assert not xla_cache.restore(tmp_path, "mnist")
    (own / "step.pb").write_bytes(b"code")
    xla_cache.store()
    process("second")
    assert xla_cache.restore(tmp_path, "mnist")
    process("third")
    monkeypatch.setattr(name, value)
    assert not xla_cache.restore(tmp_path, "mnist")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Returns XLA's flags after the begin of a process on a machine with such GPU files."""
    monkeypatch.setattr(xla_cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(xla_cache.atexit, "register", lambda *_, **__: None)
    for name in ("_own", "_owner"):
        monkeypatch.setattr(xla_cache, name, getattr(xla_cache, name))

    def begin(flags, *files, version="2.21.0"):
        monkeypatch.setenv("TF_XLA_FLAGS", "")
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(xla_cache.glob, "glob", lambda name: [f for f in files if f in name])
        monkeypatch.setattr(xla_cache.importlib.metadata, "version", lambda name: version)
        xla_cache.use_own_folder()
        return os.environ["XLA_FLAGS"]

    return begin


def test_a_machine_with_a_gpu_begins_with_flags_for_it(begun):
    assert begun("--xla_gpu_ftz=false") == "--xla_gpu_ftz=false"  # no GPU
    for file in ("/dev/nvidia", "/dev/dxg"):
        flags = begun("--xla_gpu_ftz=false", file)
        folders = [f'{name}="{xla_cache._own}"' for name in xla_cache.KERNELS]
        assert flags.split() == ["--xla_gpu_ftz=false", *folders, *xla_cache.flags_for_gpus()]
    # A child has a folder of its own, and the user's flags stay.
    again = begun(flags, "/dev/nvidia").split()
    folders = [f'{name}="{xla_cache._own}"' for name in xla_cache.KERNELS]
    assert sorted(again) == sorted(["--xla_gpu_ftz=false", *folders, *xla_cache.flags_for_gpus()])
    chosen = "--xla_gpu_enable_triton_gemm=true --xla_gpu_per_fusion_autotune_cache_dir=/mine"
    flags = begun(chosen, "/dev/nvidia")
    assert (
        flags.startswith(chosen + " ") and flags.count("triton") == flags.count("per_fusion") == 1
    )
    assert begun("--xla_gpu_enable_triton_gemm_int4=true", "/dev/nvidia").count("triton_gemm=") == 1


@pytest.mark.parametrize("version", ["2.20.0", None])
def test_flags_that_an_older_tensorflow_does_not_know_are_left_out(begun, version, monkeypatch):
    flags = begun("", "/dev/nvidia", version=version or "2.21.0")
    if version is None:

        def version_of(name):
            raise xla_cache.importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(xla_cache.importlib.metadata, "version", version_of)
        flags = xla_cache._with_flags_for_gpus("")
    names = [flag.partition("=")[0] for flag in flags.split()]
    assert names == [xla_cache.KERNELS[0], "--xla_gpu_enable_triton_gemm"]


@pytest.mark.parametrize(
    ("files", "version", "kept"),
    [
        ((), "2.21.0", False),
        (("/dev/nvidia",), "2.21.0", True),
        (("/dev/nvidia",), "2.20.0", False),
        (("/dev/nvidia", "/dev/nvidia["), "2.21.0", False),
        (("/dev/dxg",), "2.21.0", False),
    ],
)
def test_programs_of_one_gpu_are_kept(begun, files, version, kept):
    begun("", *files, version=version)
    flags = os.environ["TF_XLA_FLAGS"]
    assert f'"{xla_cache._own}"' in flags and ("device_types=CPU" not in flags) == kept


@pytest.fixture
def gpu(monkeypatch):
    """Puts a GPU of this name and compute capability into the process."""

    def put(name, *capability):
        details = {"device_name": name, "compute_capability": capability}
        monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [kind])
        monkeypatch.setattr("tensorflow.config.experimental.get_device_details", lambda _: details)

    return put


def test_on_a_gpu_the_choice_of_kernels_is_kept(tmp_path, process, gpu):
    for name, known in (("first", False), ("second", True)):
        gpu("H100", 9, 0)
        own = process(name)
        assert xla_cache.restore(tmp_path, "mnist") == known
        if not known:
            (own / "tmp").mkdir()  # XLA's
            (own / "kernel.textproto").write_text("the fastest")
            xla_cache.store()
    assert (own / "kernel.textproto").read_text() == "the fastest"


@pytest.mark.parametrize("other", [("H200", 9, 0), ("H100", 10, 0)])
def test_another_model_of_gpu_chooses_its_own_kernels(tmp_path, process, gpu, other):
    for name, model, known in (("a", ("H100", 9, 0), False), ("b", other, False)):
        gpu(*model)
        own = process(name)
        assert xla_cache.restore(tmp_path, "mnist") == known
        (own / "kernel.textproto").write_text("the fastest")
        xla_cache.store()


@pytest.mark.parametrize("what", ["driver", "library"])
def test_programs_of_a_gpu_end_with_its_software(tmp_path, process, gpu, monkeypatch, what):
    def installed(version):
        package = types.SimpleNamespace(name="nvidia-cublas-cu12", version=version)
        return lambda: [package, types.SimpleNamespace(name="numpy", version=version)]

    driver = tmp_path / "version"
    driver.write_text("580.1")
    monkeypatch.setattr(xla_cache, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(xla_cache.importlib.metadata, "distributions", installed("12.9"))
    gpu("H100", 9, 0)
    for name, known in (("first", False), ("second", True), ("third", False)):
        if name == "third" and what == "driver":
            driver.write_text("580.2")
        elif name == "third":
            monkeypatch.setattr(xla_cache.importlib.metadata, "distributions", installed("13.0"))
        own = process(name)
        assert xla_cache.restore(tmp_path / "cache", "mnist") == known
        if not known:
            (own / "step.pb").write_bytes(b"code")
            xla_cache.store()


class TestWhoMayWrite:
    """A program is machine code: whoever plants one runs it as the reader."""

    @pytest.fixture
    def programs(self, tmp_path, process):
        own = process("first")
        xla_cache.restore(tmp_path, "mnist")
        (own / "step.pb").write_bytes(b"code")
        xla_cache.store()
        (folder,) = (tmp_path / "programs").iterdir()
        for path in (folder, folder.parent):
            assert path.stat().st_mode & 0o777 == 0o700
        self.own = process("second")
        return folder

    def is_refused(self, tmp_path, caplog, named):
        caplog.clear()
        refused = not xla_cache.restore(tmp_path, "mnist") and not list(self.own.iterdir())
        (self.own / "new.pb").write_bytes(b"more code")
        xla_cache.store()
        assert not list(tmp_path.glob("programs/*/new.pb*")), "nothing is stored there either"
        return refused and f"{named}: not used" in caplog.text

    def test_ones_own_folder_is_used(self, programs, tmp_path):
        programs.chmod(0o755)  # others may read
        assert xla_cache.restore(tmp_path, "mnist")

    @pytest.mark.parametrize("mode", [0o770, 0o707])
    @pytest.mark.parametrize("which", ["programs", "one"])
    def test_a_folder_that_others_may_write(self, programs, tmp_path, caplog, mode, which):
        folder = programs if which == "one" else programs.parent
        folder.chmod(mode)
        assert self.is_refused(tmp_path, caplog, folder)

    @pytest.mark.parametrize("which", ["programs", "one"])
    def test_a_folder_of_another_user(self, programs, tmp_path, caplog, monkeypatch, which):
        folder, stock = programs if which == "one" else programs.parent, type(tmp_path).lstat

        def lstat(path):
            found = list(stock(path))
            found[4] += path == folder  # the user
            return os.stat_result(found)

        monkeypatch.setattr(type(tmp_path), "lstat", lstat)
        assert self.is_refused(tmp_path, caplog, folder)

    def test_a_link(self, programs, tmp_path, caplog):
        (tmp_path / "programs").rename(tmp_path / "elsewhere")
        (tmp_path / "programs").symlink_to(tmp_path / "elsewhere")
        assert self.is_refused(tmp_path, caplog, tmp_path / "programs")

    def test_a_file_of_another_user(self, programs, tmp_path, monkeypatch, caplog):
        me = os.geteuid()
        users = iter([me, me, me + 1])  # of the two folders, and then of the file
        monkeypatch.setattr(xla_cache.os, "geteuid", lambda: next(users))
        assert not xla_cache.restore(tmp_path, "mnist") and not list(self.own.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(xla_cache.tempfile, "tempdir", str(tmp_path))
    for name in ("killed", "alive", "new"):
        (tmp_path / f"{xla_cache.PREFIX}{name}").mkdir()
        (tmp_path / f"{xla_cache.PREFIX}{name}" / "program").write_text("")
        if name != "new":
            os.utime(tmp_path / f"{xla_cache.PREFIX}{name}", (0, 0))
    (tmp_path / f"{xla_cache.PREFIX}link").symlink_to(tmp_path)
    held = xla_cache._lock(tmp_path / f"{xla_cache.PREFIX}alive")
    try:
        for name, value in (("TF_XLA_FLAGS", ""), ("_own", None), ("_owner", 0)):
            if name.startswith("_"):
                monkeypatch.setattr(xla_cache, name, value)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(xla_cache.atexit, "register", lambda *_, **__: None)
        xla_cache.use_own_folder()
    finally:
        os.close(held)
    left = {path.name.removeprefix(xla_cache.PREFIX) for path in tmp_path.iterdir()}
    assert left - {xla_cache._own.name.removeprefix(xla_cache.PREFIX)} == {"alive", "new", "link"}
    # This process's own is locked: another one that begins does not take it for a dead one's.
    os.utime(xla_cache._own, (0, 0))
    xla_cache._remove_abandoned(tmp_path)
    assert xla_cache._own.is_dir()


def test_a_cache_that_cannot_be_written(tmp_path, process):
    own = process("own")
    (tmp_path / "programs").write_text("a file")  # root may write everywhere else
    assert not xla_cache.restore(tmp_path, "mnist")
    (own / "step.pb").write_bytes(b"code")
    xla_cache.store()
    assert (tmp_path / "programs").read_text() == "a file"


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("model name\t: AMD EPYC\n", "model name\t: Intel Xeon\n"),
        ("flags\t\t: avx2\n", "flags\t\t: avx2 avx512f\n"),
        ("CPU part\t: 0xd0c\n", "CPU part\t: 0xd40\n"),  # ARM: Graviton 2 and 3
        ("Features\t: asimd\n", "Features\t: asimd sve\n"),
    ],
)
def test_processors_are_told_apart(line, other, tmp_path):
    found = []
    for number, text in enumerate((line, other)):
        path = tmp_path / str(number)
        path.write_text(f"processor\t: {number}\n{text}BogoMIPS\t: {number}\n")
        found.append(xla_cache._processor(str(path)))
    assert found[0] != found[1]
    assert len(found[0]) == 2, "neither the core's number nor its speed"
