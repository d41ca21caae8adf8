"""Keeps freed memory in the process, in large pages, so that each step reuses it.

glibc returns large blocks to the system as soon as they are freed. A training step allocates the
same buffers again each time, and the system clears all of their pages: in the default run of
`bert_mlm`, compiled by XLA, 150 MB in each step. The numbers of a run stay the same. What it
brought: docs/performance.md.
"""

import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path

# Whoever has chosen an allocator or its settings keeps them.
SETTINGS = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_")
# Parameters of glibc's mallopt(3), as malloc.h numbers them.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1
COUNTS_ADDRESSES = Path("/proc/sys/vm/overcommit_memory")  # 2: against the machine's memory
MADV_HUGEPAGE = 14  # madvise(2); Python's mmap module has it only for its own maps


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep what is freed, until this process ends.

    One heap serves all threads: other heaps are limited to 64 MiB and are returned to the system.
    Does nothing with another C library, or if the environment sets up the allocator.
    """
    if sys.platform != "linux" or any(name.startswith(SETTINGS) for name in os.environ):
        return
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(M_ARENA_MAX, 1)
    library.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap as well
    library.mallopt(M_TRIM_THRESHOLD, NEVER)
    _ask_for_large_pages(library)


def _ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Extends the heap by a quarter of the memory, and advises pages of 2 MiB for it.

    This takes addresses only: a page takes memory once it is written. The advice is a hint, without
    effect where the system has switched such pages off.
    """
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return  # addresses are counted for each process
    if COUNTS_ADDRESSES.is_file() and COUNTS_ADDRESSES.read_text().strip() == "2":
        return
    library.sbrk.restype = library.malloc.restype = ctypes.c_void_p
    library.sbrk.argtypes = [ctypes.c_ssize_t]
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = library.sbrk(0)
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    library.free(library.malloc(memory // 4))
    size = library.sbrk(0) - start
    if size > 0:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        library.madvise(first, start + size - first, MADV_HUGEPAGE)
