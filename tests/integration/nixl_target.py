"""A process with one NIXL pool, driven by lines: `0 5` answers with two pages' digests; notices are printed as they come.

usage: python nixl_target.py NAME NUM_PAGES PAGE_BYTES
"""

import hashlib
import select
import sys

import numpy as np

from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Notice
from headstart.transfer.nixl import NixlTransport


def main() -> None:
    name, num_pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = np.zeros((num_pages, page_bytes), dtype=np.uint8)
    transport = NixlTransport(name, PoolRegion(pool.ctypes.data, num_pages, page_bytes))
    print("descriptor", transport.descriptor().hex(), flush=True)
    while True:
        for event in transport.poll():
            if isinstance(event, Notice):
                print("notice", event.payload.hex(), flush=True)
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            pages = sys.stdin.readline().split()
            if not pages:
                return
            for page in pages:
                print("digest", hashlib.sha256(pool[int(page)].tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
