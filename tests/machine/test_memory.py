"""Large blocks are reused without new pages from the system."""

import os
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


ADDRESSES = """
print(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
"""


@pytest.mark.parametrize(
    "limit",
    [
        "resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))",
        "resource.setrlimit(resource.RLIMIT_DATA, (2**35, 2**35))",
        "memory.COUNTS_ADDRESSES = Path('counted')",
    ],
)
def test_where_addresses_are_counted_none_are_taken_in_advance(limit, tmp_path):
    (tmp_path / "counted").write_text("2\n")
    start = f"import resource\nfrom pathlib import Path\nfrom machine import memory\n{limit}\n"
    found = []
    for beginning in (start, ""):
        ended = subprocess.run(
            [sys.executable, "-c", beginning + PROGRAM + ADDRESSES],
            env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        pages, _, addresses = map(int, ended.stdout.split())
        assert pages < 100
        found.append(addresses)
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    assert found[1] - found[0] > 0.9 * quarter / 1024


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_sets_up_stays_as_it_is(name):
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000", "LD_PRELOAD": ""}
    pages, _ = pages_and_kilobytes(**{name: value.get(name, "100000")})
    assert pages > 200  # each time the system clears other pages
