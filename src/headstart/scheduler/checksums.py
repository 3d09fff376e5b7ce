"""Page checksums: what a writer states of each page that it wrote, and what the reader must find in its own pool.

The checksum of a page combines the digest of its bytes with its place: the position of its first token and the tokens
whose KV it holds. It does not depend on the page's id, which differs on the two sides. A page that was changed, swapped,
written late or not at all, or that holds the KV of other tokens, has another checksum.
"""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from headstart.core.arrays import Int32Array

CHECKSUM_BYTES = 8


def page_checksums(digests: Sequence[int], tokens: Int32Array, start: int, page_size: int) -> bytes:
    """One checksum of CHECKSUM_BYTES for each of `digests`. `digests[k]` is of the page of positions
    [start + k * page_size, ...); `tokens` begin at position 0, and end where the last page's KV ends."""
    stop = start + len(digests) * page_size
    ids = np.ascontiguousarray(tokens[start:stop], dtype="<i4")
    places = (
        xxh3_64_intdigest(ids[first : first + page_size].tobytes(), seed=start + first)
        for first in range(0, len(digests) * page_size, page_size)
    )
    return b"".join(
        (digest ^ place).to_bytes(CHECKSUM_BYTES, "little") for digest, place in zip(digests, places, strict=True)
    )
