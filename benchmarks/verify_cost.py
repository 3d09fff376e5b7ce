"""What checksums cost a run that does nothing but move pages: two processes over NIXL, with and without, in one run.

    python benchmarks/verify_cost.py [--prompt-tokens N] [--chunk-tokens N] [--rounds N]

A round moves one prompt of the demo model's KV (float16: 30 layers x 2 x 3 heads x 64 dims, 16 tokens a page) in chunks,
two at a time. The source computes the checksums of a chunk before it posts it, the target digests it when its notice comes and
compares. Rounds with and without alternate; the ratio is of their medians.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from transfer_rate import open_pool

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.messages import ChunkNotice, TicketRef, WorkerRef, decode_notice, encode_notice
from headstart.scheduler.checksums import page_checksums
from headstart.transfer.contract import Completed, Notice
from headstart.transfer.digest import HostDigests

PAGE_TOKENS, PAGE_BYTES = 16, 368_640
AT_ONCE = 2
SOURCE = WorkerRef("source", 1)


@dataclass(frozen=True)
class Size:
    """`num_pages` of a prompt, moved in chunks of `chunk_pages`."""

    num_pages: int
    chunk_pages: int

    def chunks(self) -> Iterator[tuple[int, Int32Array]]:
        """(index of the first page, page ids)"""
        for first in range(0, self.num_pages, self.chunk_pages):
            yield first, int32_array(range(first, min(first + self.chunk_pages, self.num_pages)))

    @property
    def tokens(self) -> Int32Array:
        return int32_array(np.arange(self.num_pages * PAGE_TOKENS) % 49_152)


def serve(size: Size) -> None:
    """The target: one line for each round, when all of its pages are there and right."""
    os.set_blocking(sys.stdin.fileno(), False)
    pool, transport = open_pool("target", size.num_pages, PAGE_BYTES)
    digests, tokens = HostDigests(pool), size.tokens
    print(transport.descriptor().hex(), flush=True)
    num_arrived = 0
    while sys.stdin.buffer.raw.read(1) is None:
        for event in transport.poll():
            notice = decode_notice(event.payload) if isinstance(event, Notice) else None
            if notice is None:
                continue
            if notice.checksums:
                found = digests.digest(int32_array(range(notice.first, notice.first + notice.count)))
                assert page_checksums(found, tokens, notice.first * PAGE_TOKENS, PAGE_TOKENS) == notice.checksums
            num_arrived += notice.count
        if num_arrived == size.num_pages:
            print("all", flush=True)
            num_arrived = 0


class Source:
    def __init__(self, size: Size, target: "subprocess.Popen[str]") -> None:
        assert target.stdout is not None
        self._size, self._tokens, self._target, self._answers = size, size.tokens, target, target.stdout
        pool, self._transport = open_pool("source", size.num_pages, PAGE_BYTES)
        pool[:] = np.random.default_rng(0).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
        pool[:, :4] = np.arange(size.num_pages, dtype="<i4").view(np.uint8).reshape(-1, 4)
        self._digests = HostDigests(pool)
        self._transport.connect("target", bytes.fromhex(self._answers.readline()))
        os.set_blocking(self._answers.fileno(), False)

    def move(self, verifies: bool) -> float:
        """Seconds until the target has all of it."""
        began = time.perf_counter()
        handles: set[int] = set()
        for first, pages in self._size.chunks():
            checksums = b""
            if verifies:
                checksums = page_checksums(self._digests.digest(pages), self._tokens, first * PAGE_TOKENS, PAGE_TOKENS)
            notice = encode_notice(ChunkNotice(SOURCE, TicketRef(1, 0), first, len(pages), 0, checksums))
            while len(handles) >= AT_ONCE:
                self._poll(handles)
            handles.add(self._transport.write("target", pages, pages, notice))
        while not self._answers.readline():
            if self._target.poll() is not None:
                raise SystemExit("the target has ended")
            self._poll(handles)
        elapsed = time.perf_counter() - began
        while handles:
            self._poll(handles)
        return elapsed

    def _poll(self, handles: set[int]) -> None:
        handles -= {event.handle for event in self._transport.poll() if isinstance(event, Completed)}

    def close(self) -> None:
        self._transport.close()


def measure(size: Size, num_rounds: int) -> dict[bool, list[float]]:
    """Seconds of each round, without and with checksums."""
    arguments = [sys.executable, __file__, "--serve", str(size.num_pages), str(size.chunk_pages)]
    found: dict[bool, list[float]] = {False: [], True: []}
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdin is not None
        source = Source(size, target)
        source.move(True)  # connects, and maps the memory of both pools
        for _ in range(num_rounds):
            for verifies, seconds in found.items():
                seconds.append(source.move(verifies))
        source.close()
        target.stdin.close()
    return found


def digest_s(num_pages: int) -> float:
    """Seconds that one side needs for one page, out of memory and not out of a cache."""
    pool = np.ones((num_pages, PAGE_BYTES), dtype=np.uint8)
    pages, digests = int32_array(range(num_pages)), HostDigests(pool)
    began = time.perf_counter()
    digests.digest(pages)
    return (time.perf_counter() - began) / num_pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=16_384)
    parser.add_argument("--chunk-tokens", type=int, default=2_048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", type=int, nargs=2, metavar=("NUM_PAGES", "CHUNK_PAGES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Size(*arguments.serve))
        return
    size = Size(arguments.prompt_tokens // PAGE_TOKENS, max(1, arguments.chunk_tokens // PAGE_TOKENS))
    found = measure(size, arguments.rounds)
    plain_s, checked_s = median(found[False]), median(found[True])
    gigabytes = size.num_pages * PAGE_BYTES / 1e9
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{size.num_pages} pages of {PAGE_BYTES} B in chunks of {size.chunk_pages}, {arguments.rounds} rounds each")
    print(f"without checksums {gigabytes / plain_s:6.2f} GB/s, with checksums {gigabytes / checked_s:6.2f} GB/s")
    print(f"cost of a run that only moves pages: {checked_s / plain_s - 1:.1%}")
    both_s = 2 * digest_s(size.num_pages) / PAGE_TOKENS
    print(f"both digests: {1e6 * both_s:.1f} us a token, 2 % of a prefill of {0.02 / both_s:,.0f} tokens/s")


if __name__ == "__main__":
    main()
