"""How fast pages move between two processes over NIXL in host memory, and how long a post holds up its loop.

    python benchmarks/transfer_rate.py [--num-pages N]

Page sizes: the demo model's (30 layers x 2 x 3 heads x 16 tokens x 64 dims) in 2 and 4 bytes, and a small one.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from headstart.core.arrays import int32_array
from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Completed, Notice
from headstart.transfer.nixl import NixlTransport

PAGE_BYTES = {"demo bf16": 368_640, "demo fp32": 737_280, "small": 16_384}
ROUNDS = 9


@dataclass(frozen=True)
class Rates:
    num_pages: int
    gb_per_s: float  # best round, post to completion
    post_ms: float  # median time that write() itself took
    one_page_us: float  # median, post to completion


def open_pool(name: str, num_pages: int, page_bytes: int) -> tuple[np.ndarray, NixlTransport]:
    pool = np.ones((num_pages, page_bytes), dtype=np.uint8)
    return pool, NixlTransport(name, PoolRegion(pool.ctypes.data, num_pages, page_bytes))


def serve(num_pages: int, page_bytes: int) -> None:
    """The target: polls until its parent closes its input."""
    os.set_blocking(sys.stdin.fileno(), False)
    _pool, transport = open_pool("target", num_pages, page_bytes)
    print(transport.descriptor().hex(), flush=True)
    while sys.stdin.buffer.raw.read(1) is None:
        if not any(isinstance(event, Notice) for event in transport.poll()):
            time.sleep(0.0002)


def timed_write(transport: NixlTransport, pages: np.ndarray) -> tuple[float, float]:
    """(seconds in write(), seconds until completed)"""
    start = time.perf_counter()
    handle = transport.write("target", pages, pages[::-1].copy(), b"notice")
    posted = time.perf_counter()
    while Completed(handle) not in transport.poll():
        pass
    return posted - start, time.perf_counter() - start


def measure(num_pages: int, page_bytes: int) -> Rates:
    arguments = [sys.executable, __file__, "--serve", str(num_pages), str(page_bytes)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdout is not None
        assert target.stdin is not None
        _pool, transport = open_pool("source", num_pages, page_bytes)
        transport.connect("target", bytes.fromhex(target.stdout.readline()))
        everything, one = int32_array(range(num_pages)), int32_array([0])
        timed_write(transport, everything)  # the first one connects and maps memory
        rounds = [timed_write(transport, everything) for _ in range(ROUNDS)]
        singles = [timed_write(transport, one)[1] for _ in range(ROUNDS)]
        transport.close()
        target.stdin.close()
    best = min(done for _, done in rounds)
    return Rates(
        num_pages,
        num_pages * page_bytes / best / 1e9,
        float(np.median([post for post, _ in rounds])) * 1e3,
        float(np.median(singles)) * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-pages", type=int, default=128)
    parser.add_argument("--serve", type=int, nargs=2, metavar=("NUM_PAGES", "PAGE_BYTES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, page_bytes in PAGE_BYTES.items():
        rates = measure(arguments.num_pages, page_bytes)
        print(
            f"{name:10} {page_bytes:8} B x {rates.num_pages}: {rates.gb_per_s:6.2f} GB/s, "
            f"post {rates.post_ms:7.2f} ms, one page {rates.one_page_us:7.0f} us"
        )


if __name__ == "__main__":
    main()
