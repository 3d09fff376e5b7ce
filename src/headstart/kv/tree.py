"""RadixTree: token prefix -> pages, one root per namespace.

A node is a run of whole pages: its edge is their tokens, as the bytes of an int32 array (comparing with `startswith`
runs at memcmp speed and copies nothing). Children are keyed by the bytes of their first page, so no two children of a
node share a page. A node's pins are the leases whose path runs through it.

Invariant: pins never grow with depth, and a node with exactly one child has more pins than it. A chain that no lease
ends inside is therefore one node, and a path has no more nodes than there are forks and lease ends on it.

Splits give the upper part a new node and merges keep the lower one: the node at which a lease ends stays that lease's.

What a walk found lies on its nodes while `version` is what it was: splits, merges and removals change it. What is put
behind a node does not, but may make the same walk longer: `num_inserts` counts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headstart.core.arrays import EMPTY, Int32Array
from headstart.core.errors import InvariantError


@dataclass(slots=True, eq=False)
class Node:
    """`pages` [n], `edge` n pages of tokens. A root has no parent and no pages; its edge is its namespace. A node
    that was taken out or merged away has no parent either. A node knows its namespace: walking up to the root would
    cost each eviction the depth of the tree."""

    edge: bytes
    pages: Int32Array
    parent: "Node | None"
    children: dict[bytes, "Node"] = field(default_factory=dict)
    pins: int = 0
    namespace: bytes = b""


class Walk(NamedTuple):
    """`nodes` from below the start to the last one entered, of which `num_last` pages matched; `num_pages` in all."""

    nodes: list[Node]
    num_last: int
    num_pages: int

    def num_unpinned(self) -> int:
        """Matched pages that no lease pins. Where the last node is pinned, which may be longer, all are."""
        num_pinned = sum([len(node.pages) for node in self.nodes if node.pins])
        return max(0, self.num_pages - num_pinned)

    def pages(self) -> Int32Array:
        """The matched pages, in order."""
        if not self.nodes:
            return EMPTY
        last = self.nodes[-1].pages[: self.num_last]
        return last if len(self.nodes) == 1 else np.concatenate([node.pages for node in self.nodes[:-1]] + [last])


class RadixTree:
    """Structure only: it neither owns pages nor decides which go."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = page_size * 4
        self.version = 0
        self.num_inserts = 0
        self._roots: dict[bytes, Node] = {}

    def walk(self, namespace: bytes, tokens: bytes) -> Walk:
        """Follow `tokens` from the namespace's root as far as whole pages agree."""
        root = self._roots.get(namespace)
        return Walk([], 0, 0) if root is None else self.walk_from(root, tokens)

    def walk_from(self, node: Node, tokens: bytes) -> Walk:
        """Follow `tokens` from below `node`."""
        if not node.children:
            return Walk([], 0, 0)
        page_bytes = self.page_bytes
        nodes: list[Node] = []
        position, num_last, last = 0, 0, len(tokens) - page_bytes
        while position <= last:
            child = node.children.get(tokens[position : position + page_bytes])
            if child is None:
                break
            nodes.append(child)
            if not tokens.startswith(child.edge, position):
                num_last = _common_bytes(child.edge, tokens, position) // page_bytes
                return Walk(nodes, num_last, position // page_bytes + num_last)
            position += len(child.edge)
            num_last = len(child.pages)
            node = child
        return Walk(nodes, num_last, position // page_bytes)

    def root(self, namespace: bytes) -> Node:
        """The namespace's root, made where missing."""
        return self._roots.setdefault(namespace, Node(namespace, EMPTY, None, namespace=namespace))

    def end(self, walk: Walk) -> Node:
        """The node that ends exactly where a walk of at least one page did; splits one where it ended inside."""
        node = walk.nodes[-1]
        return node if walk.num_last == len(node.pages) else self._split(node, walk.num_last)

    def pin(self, node: Node, above: Node | None = None) -> None:
        """One lease more on the nodes from `node` up to, and without, `above` (the root where None)."""
        while node is not above and node.parent is not None:
            node.pins += 1
            node = node.parent

    def unpin(self, end: Node) -> None:
        """One lease less on the nodes from `end`, where it ended, up to the root."""
        node = end
        while node.parent is not None:
            if node.pins < 1:
                raise InvariantError("a tree node is unpinned more often than pinned")
            node.pins -= 1
            node = node.parent
        self.join(end)

    def insert(self, parent: Node, edge: bytes, pages: Int32Array) -> Node:
        """Put `pages` behind `parent` for the lease that ended there. Returns the node at which it ends now: `parent`
        where nobody else has to do with it, or a new child."""
        self.num_inserts += 1
        if parent.pins == 1 and not parent.children:
            parent.edge += edge
            parent.pages = np.concatenate((parent.pages, pages))
            return parent
        key = edge[: self.page_bytes]
        if key in parent.children:
            raise InvariantError("the tree already has a page of these tokens")
        child = Node(edge, pages.copy(), parent, pins=1, namespace=parent.namespace)
        parent.children[key] = child
        return child

    def join(self, node: Node) -> None:
        """Merge `node` into its child where it has a single one and no lease ends between them."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.pins != node.pins:
            return
        self.version += 1
        child.edge = node.edge + child.edge
        child.pages = np.concatenate((node.pages, child.pages))
        child.parent = node.parent
        node.parent.children[self._key(node)] = child
        node.parent = None
        node.children = {}

    def trim(self, leaf: Node, num_pages: int) -> Int32Array:
        """Cut the last `num_pages`, but not all, pages of a leaf and return them."""
        self.version += 1
        kept = len(leaf.pages) - num_pages
        pages = leaf.pages[kept:]
        leaf.pages = leaf.pages[:kept].copy()
        leaf.edge = leaf.edge[: kept * self.page_bytes]
        return pages

    def remove(self, leaf: Node) -> None:
        """Take an unpinned leaf out. No unpinned node becomes a leaf by that: it had two children, or is merged."""
        self.version += 1
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key(leaf)]
        leaf.parent = None
        if parent.parent is not None:
            self.join(parent)
        elif not parent.children:
            del self._roots[parent.edge]

    def prune(self) -> list[Node]:
        """Take every unpinned node out and return them."""
        self.version += 1
        parents = [*self._roots.values(), *self.nodes()]
        dropped = [node for node in self.nodes() if node.pins == 0]
        for parent in parents:
            parent.children = {key: child for key, child in parent.children.items() if child.pins}
        for node in dropped:
            node.parent = None
        for node in parents:
            self.join(node)
        self._roots = {namespace: root for namespace, root in self._roots.items() if root.children}
        return dropped

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise InvariantError unless edges, keys, parents and pins are as this module says."""
        for namespace, root in self._roots.items():
            self._check_children(root)
            if not root.children or root.edge != namespace or root.parent is not None:
                raise InvariantError("a namespace's root is empty or not a root")
        for node in self.nodes():
            self._check_children(node)
            if len(node.pages) == 0 or len(node.edge) != len(node.pages) * self.page_bytes:
                raise InvariantError("a node's tokens are not whole pages")
            if node.pins < sum(child.pins for child in node.children.values()):
                raise InvariantError("a node's children have pins that it lacks")
            if node.parent is None or node.namespace != node.parent.namespace:
                raise InvariantError("a node is in another namespace than its parent")
            if len(node.children) == 1 and next(iter(node.children.values())).pins >= node.pins:
                raise InvariantError("a chain that no lease ends inside is more than one node")

    def _check_children(self, node: Node) -> None:
        for key, child in node.children.items():
            if key != self._key(child):
                raise InvariantError("a child's key is not its first page")
            if child.parent is not node:
                raise InvariantError("a child does not know its parent")

    def _split(self, node: Node, num_upper: int) -> Node:
        self.version += 1
        parent = node.parent
        assert parent is not None
        cut = num_upper * self.page_bytes
        pages = node.pages[:num_upper].copy()
        upper = Node(node.edge[:cut], pages, parent, pins=node.pins, namespace=node.namespace)
        parent.children[self._key(node)] = upper
        node.edge = node.edge[cut:]
        node.pages = node.pages[num_upper:].copy()
        node.parent = upper
        upper.children = {self._key(node): node}
        return upper

    def _key(self, node: Node) -> bytes:
        return node.edge[: self.page_bytes]


def _common_bytes(edge: bytes, tokens: bytes, position: int) -> int:
    """Length of the common prefix of `edge` and `tokens[position:]`, in whole tokens."""
    num = min(len(edge), len(tokens) - position) // 4
    differ = np.frombuffer(edge, np.int32, num) != np.frombuffer(tokens, np.int32, num, position)
    first = int(differ.argmax())
    return (first if differ[first] else num) * 4
