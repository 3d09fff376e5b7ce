"""Where prefixes probably are, from the gateway's own decisions alone: hash chain of token chunks -> workers.

A guess that costs nothing to be wrong about: the decode worker's own radix cache decides what is reused.
"""

from collections import OrderedDict

from headstart.core.arrays import Int32Array
from headstart.core.messages import WorkerRef


class PrefixIndex:
    """Bounded LRU of chunk hashes. `chunk_len` tokens share an entry; at most `max_chunks` entries are kept."""

    def __init__(self, chunk_len: int = 64, max_chunks: int = 200_000) -> None:
        self._chunk_len = chunk_len
        self._max_chunks = max_chunks
        self._holders: OrderedDict[int, tuple[WorkerRef, ...]] = OrderedDict()
        self._matched: tuple[bytes, Int32Array, list[int]] | None = None

    def record(self, namespace: bytes, tokens: Int32Array, worker: WorkerRef) -> None:
        """`worker` is about to hold, or holds, KV of `tokens` [n]."""
        known = self._holders
        for key in self._chain_of(namespace, tokens):
            holders = known.pop(key, ())
            known[key] = holders if worker in holders else (*holders, worker)[-4:]
        while len(self._holders) > self._max_chunks:
            self._holders.popitem(last=False)

    def match(self, namespace: bytes, tokens: Int32Array) -> dict[WorkerRef, int]:
        """Tokens of the prompt each worker probably holds; workers that hold nothing are absent."""
        held: dict[WorkerRef, int] = {}
        for depth, key in enumerate(self._chain_of(namespace, tokens), start=1):
            holders = self._holders.get(key)
            if holders is None:
                break
            for worker in holders:
                held[worker] = depth * self._chunk_len
        return held

    def __len__(self) -> int:
        return len(self._holders)

    def _chain_of(self, namespace: bytes, tokens: Int32Array) -> list[int]:
        """A prompt is matched and recorded in a row: its chain is made once."""
        if self._matched is not None and self._matched[1] is tokens and self._matched[0] == namespace:
            return self._matched[2]
        chain = self._chain(namespace, tokens)
        self._matched = None if tokens.flags.writeable else (namespace, tokens, chain)
        return chain

    def _chain(self, namespace: bytes, tokens: Int32Array) -> list[int]:
        """The interpreter's hash of bytes: keyed afresh in every process, and far cheaper than a digest."""
        raw = tokens.astype("<i4", copy=False).tobytes()
        step = self._chunk_len * 4
        chain: list[int] = []
        key = hash(namespace)
        for start in range(0, len(raw) - step + 1, step):
            key = hash((key, raw[start : start + step]))
            chain.append(key)
        return chain
