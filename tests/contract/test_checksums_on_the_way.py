"""Page checksums of both ends of real transfers agree, whatever the size of pages; pages that were touched do not."""

import itertools

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.scheduler.checksums import page_checksums
from headstart.transfer.contract import Completed, Notice
from headstart.transfer.digest import HostDigests
from tests.contract.members import Cluster, Loopback, Member, Nixl, connect, write

NUM_WRITES, AT_ONCE, PAGES_EACH, PAGE_SIZE = 50, 5, 3, 16
TOKENS = int32_array(range(PAGES_EACH * PAGE_SIZE))


def checksums_of(member: Member, pages: list[int]) -> bytes:
    return page_checksums(HostDigests(member.pool).digest(int32_array(pages)), TOKENS, 0, PAGE_SIZE)


@pytest.mark.parametrize("backend", [Loopback, Nixl], ids=["loopback", "nixl"])
@pytest.mark.behaviour("A5")
def test_fifty_writes_five_at_a_time_of_small_and_large_pages(backend: type[Loopback] | type[Nixl]) -> None:
    cluster = Cluster(backend())
    pairs = [
        (cluster.member(f"p{size}", 16, size), cluster.member(f"d{size}", 16, size)) for size in (16_384, 2_400_000)
    ]
    for source, target in pairs:
        connect(source, target)
    sent: dict[bytes, tuple[Member, list[int], bytes]] = {}
    numbers = itertools.count()

    def post() -> None:
        number = next(numbers)
        source, target = pairs[number % 2]
        src = [(5 * number + k) % 16 for k in range(PAGES_EACH)]
        dst = [PAGES_EACH * (number // 2 % AT_ONCE) + k for k in range(PAGES_EACH)]
        sent[b"%d" % number] = (target, dst, checksums_of(source, src))
        write(source, target, zip(src, dst, strict=True), b"%d" % number)

    def noticed() -> list[bytes]:
        return [event.payload for _, target in pairs for event in target.events if isinstance(event, Notice)]

    for _ in range(0, NUM_WRITES, AT_ONCE):
        for _ in range(AT_ONCE):
            post()
        cluster.wait(lambda: sent.keys() <= set(noticed()))
        for target, dst, checksums in list(sent.values())[-AT_ONCE:]:
            assert checksums_of(target, dst) == checksums
            target.pool[dst[1], 777] ^= np.uint8(1)
            assert checksums_of(target, dst) != checksums
            target.pool[dst[1], 777] ^= np.uint8(1)
    cluster.wait(lambda: sum(len(source.of(Completed)) for source, _ in pairs) == NUM_WRITES)
    cluster.close()
