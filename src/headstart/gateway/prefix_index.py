"""Where prefixes probably are, from the gateway's own decisions alone: hash chain of token chunks -> workers.

A guess that costs nothing to be wrong about: the decode worker's own radix cache decides what is reused.
"""

from itertools import islice

from headstart.core.arrays import Int32Array

MAX_HOLDERS = 4
"""Workers remembered for one chunk, the latest ones."""


class Trail:
    """The hash chain of one sequence: a key for each of its whole chunks, which names the chunk and all before it."""

    def __init__(self, namespace: bytes, chunk_len: int) -> None:
        self.keys: list[int] = []
        self._chunk_bytes = chunk_len * 4
        self._rest = b""  # tokens behind the last whole chunk
        self._last = hash(namespace)

    def extend(self, tokens: bytes) -> None:
        """The sequence goes on with `tokens`, int32.

        The interpreter's hash of bytes: keyed afresh in every process, and far cheaper than a digest.
        """
        raw, step, key = self._rest + tokens, self._chunk_bytes, self._last
        for start in range(0, len(raw) - step + 1, step):
            key = hash((key, raw[start : start + step]))
            self.keys.append(key)
        self._rest, self._last = raw[len(raw) // step * step :], key


class PrefixIndex:
    """Bounded LRU of chunk hashes. `chunk_len` tokens share an entry; at most `max_chunks` entries are kept."""

    def __init__(self, chunk_len: int = 64, max_chunks: int = 200_000) -> None:
        self._chunk_len = chunk_len
        self._max_chunks = max_chunks
        self._holders: dict[int, tuple[str, ...]] = {}  # the longest unused first

    def trail(self, namespace: bytes, tokens: Int32Array) -> Trail:
        """What `record` and `match` know a sequence by."""
        trail = Trail(namespace, self._chunk_len)
        trail.extend(tokens.tobytes())
        return trail

    def record(self, trail: Trail, worker: str) -> None:
        """`worker` is about to hold, or holds, KV of the sequence."""
        known, alone = self._holders, (worker,)
        for key in trail.keys:
            holders = known.pop(key, alone)
            known[key] = holders if worker in holders else (*holders, worker)[-MAX_HOLDERS:]
        if len(known) > self._max_chunks:
            self._forget()

    def _forget(self) -> None:
        """A few more than must go: to find the oldest, a dict passes by all that was moved behind them."""
        num_kept = self._max_chunks - self._max_chunks // 64
        for key in list(islice(self._holders, len(self._holders) - num_kept)):
            del self._holders[key]

    def match(self, trail: Trail) -> dict[str, int]:
        """Tokens of the sequence each worker probably holds; workers that hold nothing are absent."""
        held: dict[str, int] = {}
        for depth, key in enumerate(trail.keys, start=1):
            holders = self._holders.get(key)
            if holders is None:
                break
            for worker in holders:
                held[worker] = depth * self._chunk_len
        return held

    def __len__(self) -> int:
        return len(self._holders)
