"""Keep the memory of a step's temporaries for the next step.

A step allocates and frees the same buffers of megabytes at every layer. By default the C library returns such blocks
to the system, and each comes back as fresh pages that the kernel must map and clear: thousands of faults a step.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h> of glibc
_LARGEST_KEPT = 32 << 20
_MOST_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Let this process keep up to a gigabyte of freed blocks, each of up to 32 MiB. False where this libc cannot."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_KEPT), (_M_TRIM_THRESHOLD, _MOST_KEPT))
    return all(mallopt(name, value) == 1 for name, value in wanted)
