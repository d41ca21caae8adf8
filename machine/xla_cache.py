"""Caches compiled XLA programs for later runs with the same options on the same processor.

TensorFlow loads any program in a folder without checking its bytes, and must know the folder at
import. So each process has a private folder: `restore()` copies the cached programs with a correct
checksum to it, and `store()` moves newly compiled programs to the cache, and XLA's choice of the
fastest kernels of GPUs. The programs of a GPU are kept where it is the only one, also split:
whether TensorFlow tells those of several GPUs apart was not tried. XLA reads its own flags once, so
those for GPUs are set before the import, too.

A program is machine code: anyone who can write to the cache can run code as its reader. So its
folders must belong to this user and be writable by no one else; otherwise they are not used.
"""

import atexit
import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

from machine.cores import cores

log = logging.getLogger("recipes")

PREFIX = "keras-recipes-programs-"
PROGRAMS = " --tf_xla_persistent_cache_directory="
ON_CPU = " --tf_xla_persistent_cache_device_types=CPU"
# XLA's folder of chosen kernels: the flag of TensorFlow 2.20, and that of 2.21.
KERNELS = ("--xla_gpu_per_fusion_autotune_cache_dir", "--xla_gpu_experimental_autotuner_cache_dir")
# Without the kernels that Triton compiles, of matrix products (cuBLAS has its own) and of other
# fused operations, the first step on a GPU came earlier (docs/performance.md).
WITHOUT_TRITON = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_experimental_enable_fusion_autotuner=false",
)
# The parts of a program in several threads: BERT-base came to its first step five seconds earlier.
IN_THREADS = "--xla_gpu_enable_llvm_module_compilation_parallelism=true"
THREADS = "--xla_gpu_force_compilation_parallelism="  # their number
# TensorFlow 2.20 ends the process at a flag that it does not know.
SINCE_2_21 = (KERNELS[1], WITHOUT_TRITON[1], IN_THREADS, THREADS)
NVIDIA_GPUS = "/dev/nvidia[0-9]*"
GPU_FILES = (NVIDIA_GPUS, "/dev/dxg")  # the second in Windows' Linux
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ABANDONED_SECONDS = 60  # younger folders may not be locked yet
FOLDERS = 50  # of the cache; the newest programs stay
# They affect the compiled programs or their number of threads.
ENVIRONMENT = ("XLA_", "TF_XLA_", "TF_NUM_", "TF_ENABLE_", "OMP_")
# Lines of /proc/cpuinfo that tell processors apart: of x86, and of ARM.
PROCESSOR = ("model", "flags", "Features", "CPU ")

_owner = 0  # the process that imported TensorFlow; its forks store nothing
_own = Path()  # the folder that TensorFlow reads and writes
_cache: Path | None = None  # the folder of the cache
_seen: set[str] = set()  # names of the programs in both


def use_own_folder() -> None:
    """Passes a private folder of this process to TensorFlow, before its import.

    Removes the folders of killed processes.
    """
    global _own, _owner
    before, known, folder = f" {os.environ.get('TF_XLA_FLAGS', '')}".partition(PROGRAMS)
    if sys.platform != "linux" or (known and PREFIX not in folder):  # or the user has set a folder
        return
    _remove_abandoned(Path(tempfile.gettempdir()))
    _owner = os.getpid()
    _own = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_owner}-"))
    _lock(_own)  # until this process ends in any way
    atexit.register(shutil.rmtree, _own, ignore_errors=True)
    with_gpu = len(glob.glob(NVIDIA_GPUS)) == 1 and _tensorflow_version() >= (2, 21)
    os.environ["TF_XLA_FLAGS"] = f'{before}{PROGRAMS}"{_own}"{"" if with_gpu else ON_CPU}'
    if any(map(glob.glob, GPU_FILES)):
        os.environ["XLA_FLAGS"] = _with_flags_for_gpus(os.environ.get("XLA_FLAGS", ""))


def flags_for_gpus() -> tuple[str, ...]:
    """Returns the flags with which XLA compiles sooner for a GPU."""
    return (*WITHOUT_TRITON, IN_THREADS, f"{THREADS}{cores()}")


def _with_flags_for_gpus(flags: str) -> str:
    """Adds XLA's flags for GPUs to those that the user has set, which stay as they are."""
    # The folder of the process that has started this one is not the user's.
    flags = re.sub(rf' --\w+="[^"]*{PREFIX}[^"]*"', "", flags)
    added = (*(f'{name}="{_own}"' for name in KERNELS), *flags_for_gpus())
    unknown = () if _tensorflow_version() >= (2, 21) else SINCE_2_21
    for flag in added:
        is_set = re.search(rf"{flag.partition('=')[0]}\b", flags)
        if not is_set and not flag.startswith(unknown):
            flags += f" {flag}"
    return flags


def _tensorflow_version() -> tuple[int, ...]:
    """Returns the first two numbers of TensorFlow's version, without importing it."""
    try:
        version = importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:  # it has another name, such as tf-nightly
        return (0, 0)
    return tuple(int(number) for number in version.split(".")[:2])


def _lock(folder: Path) -> int | None:
    """Locks a folder until this process ends; returns None if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or being removed by another process
            if time.time() - folder.lstat().st_mtime < ABANDONED_SECONDS:
                continue
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def restore(cache_dir: Path, *made_from) -> bool:
    """Copies programs of earlier runs to TensorFlow's folder, before anything is compiled.

    Args:
        cache_dir: the cache; programs are stored in its folder `programs`.
        *made_from: values that determine the programs besides versions, processor and GPUs.

    Returns:
        Whether any program was restored.
    """
    global _cache
    _cache = None  # of an earlier run of this process
    _seen.clear()
    if _owner != os.getpid():
        return False
    import keras
    import tensorflow as tf

    from machine import device

    settings = sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))
    made_from += (tf.__version__, keras.__version__, settings, _processor())
    gpus = device.gpu_models()
    made_from += (gpus, _gpu_software() if gpus else [])
    key = repr((made_from, cores())).replace(str(_own), "").encode()
    programs = Path(cache_dir) / "programs"
    folder = programs / hashlib.sha256(key).hexdigest()[:24]
    with contextlib.suppress(OSError):  # not writable: nothing is stored
        programs.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (programs, folder):
        if os.path.lexists(path) and not _is_private(path):
            log.warning("%s: not used, since others can write there; remove it", path)
            return False
    _cache = folder
    for path in _cache.glob("*.sha256-*"):
        name, _, checksum = path.name.partition(".sha256-")
        with contextlib.suppress(OSError):  # another process has removed it
            with open(path, "rb") as file:
                content, owner = file.read(), os.fstat(file.fileno()).st_uid
            if hashlib.sha256(content).hexdigest() == checksum and owner == os.geteuid():
                _copy(content, _own / name)
                _seen.add(name)
            else:
                log.warning("%s: damaged; compiled again", path)
                path.unlink()
    return bool(_seen)


def _processor(path: str = "/proc/cpuinfo") -> list[str]:
    """Returns what machine code depends on."""
    with open(path) as file:
        return [os.uname().machine, *sorted({line for line in file if line.startswith(PROCESSOR)})]


def _gpu_software() -> list[str]:
    """Returns the versions of what a GPU's program calls: driver and NVIDIA's Python packages."""
    found = {
        f"{each.name} {each.version}"
        for each in importlib.metadata.distributions()
        if (each.name or "").startswith("nvidia")
    }
    with contextlib.suppress(OSError):
        found.add(NVIDIA_DRIVER.read_text())
    return sorted(found)


def _copy(content: bytes, target: Path) -> None:
    """Writes a program to TensorFlow's folder, or nothing: it would load a part of one."""
    try:
        target.write_bytes(content)
    except OSError:  # the temporary disk is full
        target.unlink(missing_ok=True)
        raise


def _is_private(path: Path) -> bool:
    """Returns whether a path is a folder, not a link, that only this user may change."""
    status = path.lstat()
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and is_own


def store() -> None:
    """Moves newly compiled programs to the cache, if that is writable."""
    if _cache is None:
        return
    with contextlib.suppress(OSError):
        for path in _own.iterdir():
            if path.name in _seen or not path.is_file():
                continue
            _seen.add(path.name)
            content = path.read_bytes()
            target = _cache / f"{path.name}.sha256-{hashlib.sha256(content).hexdigest()}"
            _cache.mkdir(mode=0o700, exist_ok=True)
            temporary = _cache / f".{os.getpid()}"
            temporary.write_bytes(content)
            os.replace(temporary, target)
            path.unlink()  # TensorFlow has loaded it
            for old in sorted(_cache.parent.iterdir(), key=os.path.getmtime)[:-FOLDERS]:
                shutil.rmtree(old, ignore_errors=True)
