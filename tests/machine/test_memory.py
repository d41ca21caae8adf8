"""Large blocks are reused without new pages from the system."""

import platform
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

# Writes to the same 100 MB again and again in a thread, as TensorFlow's threads do.
PROGRAM = """
import resource, sys, threading
import numpy as np
from machine import memory

def write():
    np.ones(100_000_000, np.uint8)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

memory.keep_freed_memory()
thread = threading.Thread(target=write)
thread.start()
thread.join()
before = faults()
for _ in range(5):
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
print(faults() - before)
print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
"""


def pages_and_kilobytes(**environment):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return map(int, ended.stdout.split())


def test_threads_reuse_the_memory_of_large_blocks():
    pages, kilobytes = pages_and_kilobytes()
    assert pages < 100  # 100 MB are 24,414 pages of 4 KiB, or 48 of 2 MiB, five times
    assert 100_000 < kilobytes < 400_000  # addresses that were never written take no memory


def test_a_limit_on_addresses_is_respected():
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32)){PROGRAM}"
    ended = subprocess.run(
        [sys.executable, "-c", limited],
        env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) < 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_sets_up_stays_as_it_is(name):
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000", "LD_PRELOAD": ""}
    pages, _ = pages_and_kilobytes(**{name: value.get(name, "100000")})
    assert pages > 200  # returned to the system, and cleared anew each time
