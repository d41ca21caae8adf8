"""Keeps what XLA has compiled, for later runs with the same options on the same processor.

TensorFlow loads what it finds in a folder, does not look at its bytes, and has to know the folder
when it is imported. So that folder is this process's own: `take()` copies the programs of the cache
to it whose checksum is right, and `keep()` moves to the cache what was compiled since. On GPUs it
is not the programs that are kept, which was not tried, but which of its kernels XLA found fastest.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

log = logging.getLogger("recipes")

PREFIX = "keras-recipes-programs-"
PROGRAMS = " --tf_xla_persistent_cache_directory="
KERNELS = "--xla_gpu_per_fusion_autotune_cache_dir="
FOLDERS = 50  # of the cache: those that were written last stay
# They decide what is compiled, or for how many threads.
ENVIRONMENT = ("XLA_", "TF_XLA_", "TF_NUM_", "TF_ENABLE_", "OMP_")

_owner = 0  # the process that TensorFlow was imported in; one that it forks keeps nothing
_own = Path()  # what TensorFlow reads and writes
_cache: Path | None = None  # where it is kept
_seen: set[str] = set()  # names of what is in both


def use_own_folder() -> None:
    """Names a folder of this process to TensorFlow, which is about to be imported."""
    global _own, _owner
    before, known, folder = f" {os.environ.get('TF_XLA_FLAGS', '')}".partition(PROGRAMS)
    if sys.platform != "linux" or (known and PREFIX not in folder):  # or the user keeps programs
        return
    _owner = os.getpid()
    _own = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_owner}-"))
    atexit.register(shutil.rmtree, _own, ignore_errors=True)
    on_cpu = "--tf_xla_persistent_cache_device_types=CPU"
    os.environ["TF_XLA_FLAGS"] = f'{before}{PROGRAMS}"{_own}" {on_cpu}'


def take(cache_dir: Path, *made_from) -> bool:
    """Puts what earlier runs compiled where TensorFlow looks for it, before anything is compiled.

    Args:
        cache_dir: the cache; programs are stored in its folder `programs`.
        *made_from: what decides the programs beside versions and processor.

    Returns:
        Whether there is any.
    """
    global _cache
    if _owner != os.getpid():
        return False
    import keras
    import tensorflow as tf

    flags = os.environ.get("XLA_FLAGS", "")
    if tf.config.list_physical_devices("GPU") and KERNELS not in flags:
        os.environ["XLA_FLAGS"] = f'{flags} {KERNELS}"{_own}"'  # read when XLA is first used
    settings = sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))
    with open("/proc/cpuinfo") as file:
        processor = sorted({line for line in file if line.startswith(("model", "flags"))})
    made_from += (tf.__version__, keras.__version__, settings, processor)
    key = repr((made_from, len(os.sched_getaffinity(0)))).replace(str(_own), "").encode()
    _cache = Path(cache_dir) / "programs" / hashlib.sha256(key).hexdigest()[:24]
    _seen.clear()  # of an earlier run of this process
    for path in _cache.glob("*.sha256-*"):
        name, _, checksum = path.name.partition(".sha256-")
        with contextlib.suppress(OSError):  # another process has removed it
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == checksum:
                (_own / name).write_bytes(content)
                _seen.add(name)
            else:
                log.warning("%s: damaged; compiled again", path)
                path.unlink()
    return bool(_seen)


def keep() -> None:
    """Moves what was compiled since to the cache, unless that cannot be written."""
    if _cache is None:
        return
    with contextlib.suppress(OSError):
        for path in _own.iterdir():
            if path.name in _seen or not path.is_file():
                continue
            _seen.add(path.name)
            content = path.read_bytes()
            target = _cache / f"{path.name}.sha256-{hashlib.sha256(content).hexdigest()}"
            _cache.mkdir(parents=True, exist_ok=True)
            temporary = _cache / f".{os.getpid()}"
            temporary.write_bytes(content)
            os.replace(temporary, target)
            path.unlink()  # TensorFlow has it in memory
            for old in sorted(_cache.parent.iterdir(), key=os.path.getmtime)[:-FOLDERS]:
                shutil.rmtree(old, ignore_errors=True)
