"""Where prefixes probably are, from the gateway's own decisions alone: a tree of token chunks -> workers.

A guess that costs nothing to be wrong about: the decode worker's own radix cache decides what is reused. Sequences are
the bytes of int32 token ids; what is left of one behind its last whole chunk is not looked at.

Invariant: a node was used no earlier than those below it, so the longest unused one is a leaf.
"""

from bisect import bisect_left
from collections import OrderedDict

from headstart.core.errors import InvariantError

MAX_HOLDERS = 4
"""Workers remembered for one chunk, the latest ones."""


class _Node:
    """Whole chunks behind those of its parent, all with the same holders. A root has its namespace in their place."""

    __slots__ = ("children", "chunks", "holders", "parent")

    def __init__(self, parent: "_Node | None", chunks: bytes, holders: tuple[str, ...]) -> None:
        self.parent = parent
        self.chunks = chunks
        self.holders = holders
        self.children: dict[bytes, _Node] = {}  # by their first chunk


class PrefixIndex:
    """Bounded LRU. A chunk is `chunk_len` tokens; at most `max_chunks` of them are kept, and no more than workers can hold.

    200,000 chunks of 64 tokens take 50 to 115 MB, the more the more sequences part after one chunk.
    """

    def __init__(self, chunk_len: int = 64, max_chunks: int = 200_000) -> None:
        self._chunk_bytes = 4 * chunk_len
        self._most_chunks = max_chunks
        self._max_chunks = max_chunks  # for now
        self._num_chunks = 0
        self._roots: dict[bytes, _Node] = {}  # by namespace
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # but the roots, the longest unused first

    def __len__(self) -> int:
        return self._num_chunks

    def limit(self, num_tokens: int) -> None:
        """All workers together hold this many tokens: what was used before as many others is held by none."""
        self._max_chunks = min(self._most_chunks, num_tokens * 4 // self._chunk_bytes)
        self._forget()

    def match(self, namespace: bytes, tokens: bytes) -> dict[str, int]:
        """Tokens of the sequence that each worker probably holds; workers that hold nothing are absent."""
        held: dict[str, int] = {}
        num_bytes = 0
        for node, num_common in self._walk(namespace, tokens):
            num_bytes += num_common
            for worker in node.holders:
                held[worker] = num_bytes // 4
        return held

    def record(self, namespace: bytes, tokens: bytes, worker: str) -> None:
        """`worker` is about to hold, or holds, KV of the sequence."""
        end, num_bytes = self._roots.get(namespace) or _Node(None, namespace, ()), 0
        for node, num_common in self._walk(namespace, tokens):
            end = node if num_common == len(node.chunks) else self._split(node, num_common)
            if worker not in end.holders:
                end.holders = (*end.holders, worker)[-MAX_HOLDERS:]
            num_bytes += num_common
        rest = tokens[num_bytes : len(tokens) - len(tokens) % self._chunk_bytes]
        if rest:
            end = self._add(end, rest, (worker,))
            self._num_chunks += len(rest) // self._chunk_bytes
        self._use(end)
        self._forget()

    def _walk(self, namespace: bytes, tokens: bytes) -> list[tuple[_Node, int]]:
        """The nodes that the sequence runs through, and how many bytes of each; only of the last one not all."""
        path: list[tuple[_Node, int]] = []
        node, start, step = self._roots.get(namespace), 0, self._chunk_bytes
        while node is not None and (node := node.children.get(tokens[start : start + step])) is not None:
            num_common = self._num_common(node.chunks, tokens, start)
            path.append((node, num_common))
            start += num_common
            if num_common < len(node.chunks):
                break
        return path

    def _num_common(self, chunks: bytes, tokens: bytes, start: int) -> int:
        """Bytes of whole chunks that are the same from `start` on."""
        if tokens.startswith(chunks, start):
            return len(chunks)
        ends = range(self._chunk_bytes, len(chunks), self._chunk_bytes)
        return self._chunk_bytes * bisect_left(ends, True, key=lambda end: not tokens.startswith(chunks[:end], start))

    def _add(self, parent: _Node, chunks: bytes, holders: tuple[str, ...]) -> _Node:
        node = parent.children[chunks[: self._chunk_bytes]] = _Node(parent, chunks, holders)
        if parent.parent is None:
            self._roots[parent.chunks] = parent
        self._nodes[node] = None
        return node

    def _split(self, node: _Node, num_bytes: int) -> _Node:
        """Give the first bytes of a node to one of their own, above it. Whoever splits uses that one next."""
        assert node.parent is not None
        above = self._add(node.parent, node.chunks[:num_bytes], node.holders)
        node.parent, node.chunks = above, node.chunks[num_bytes:]
        above.children[node.chunks[: self._chunk_bytes]] = node
        return above

    def _use(self, node: _Node) -> None:
        while node.parent is not None:
            self._nodes.move_to_end(node)
            node = node.parent

    def _forget(self) -> None:
        """Cut off from the leaves what is too much."""
        while self._num_chunks > self._max_chunks:
            leaf = next(iter(self._nodes))
            num_over = (self._num_chunks - self._max_chunks) * self._chunk_bytes
            num_cut = min(num_over, len(leaf.chunks))
            self._num_chunks -= num_cut // self._chunk_bytes
            if num_cut == len(leaf.chunks):
                self._remove(leaf)
            else:
                leaf.chunks = leaf.chunks[:-num_cut]

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del self._nodes[leaf]
        del parent.children[leaf.chunks[: self._chunk_bytes]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.chunks]

    def check(self) -> None:
        """Raise InvariantError unless the tree, its order and its size agree."""
        age = {node: number for number, node in enumerate(self._nodes)}
        below = list(self._roots.values())
        num_bytes = 0
        while below:
            node = below.pop()
            if node.parent is not None:
                num_bytes += len(node.chunks)
                if not node.chunks or any(age[child] > age[node] for child in node.children.values()):
                    raise InvariantError("a node is empty, or was used earlier than one below it")
                del age[node]
            below.extend(node.children.values())
        if age or num_bytes != self._num_chunks * self._chunk_bytes or self._num_chunks > self._max_chunks:
            raise InvariantError("chunks are lost or too many")
