"""PrefixCache: the one place that hands out, shares and takes back KV pages.

Life of a lease: taken by `try_lease`, grown by `try_extend`, edited by `try_replace`, ended by `release`. While it lives
it holds

    pages[:num_shared]   pages of the tree, pinned by it: the path of its tokens
    pages[num_shared:]   private pages, its own alone

and `commit` moves pages from the second part to the first. Whole pages of KV that is written and fenced are all that
is ever committed, and only committed pages are matched.

Invariant: a page's leases are the live leases that list it; a node's pins are the live leases whose shared part runs
through it. Every call that may fail for want of pages changes nothing when it does.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headstart.core.arrays import EMPTY, Int32Array
from headstart.core.errors import InvariantError
from headstart.core.identity import cache_owner
from headstart.kv.eviction import LruOrder, evict
from headstart.kv.ledger import PageCounts, PageLedger
from headstart.kv.tree import Node, RadixTree, Walk

__all__ = ["Match", "PageCounts", "PageLease", "PrefixCache"]


class Match(Struct, frozen=True, eq=False):
    """What the cache holds of a prompt when it was asked. Holds nothing; may be stale by the time it is leased."""

    namespace: bytes
    num_pages: int
    prefix_len: int  # num_pages * page_size
    _asked: bytes  # the tokens, of which these match
    _walk: Walk  # their path as long as the tree has this version
    _version: int
    _num_inserts: int  # of the tree: with as many, nothing longer can be found


@dataclass(slots=True, eq=False)
class PageLease:
    """Right to a sequence's pages until released. Pages come in position order."""

    namespace: bytes
    pages: Int32Array  # page table, shared pages first; a fresh read-only array after every change
    num_shared: int = 0  # leading pages that are in the tree and pinned by this lease
    _end: Node | None = None  # the tree node that ends with the last shared page


class PrefixCache:
    """Radix cache over a pool of `num_pages` pages of `page_size` tokens. Not thread-safe: the worker's loop owns it.

    `owner_pages`: pages an owner may have before its own are evicted first (`kv.tenant_quota`); None: all are alike.
    """

    def __init__(self, num_pages: int, page_size: int, owner_pages: int | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._ledger = PageLedger(num_pages)
        self._tree = RadixTree(page_size)
        self._order = LruOrder(num_pages, owner_pages)
        self._leases: set[PageLease] = set()

    def match(self, namespace: bytes, tokens: Int32Array, max_len: int | None = None) -> Match:
        """Longest committed prefix of `tokens[:max_len]`, in whole pages. Pure: changes nothing, not even LRU order."""
        asked = (tokens if max_len is None else tokens[: max(max_len, 0)]).tobytes()
        return self._find(namespace, asked)

    def match_again(self, match: Match) -> Match:
        """What the cache holds of the same prompt now."""
        tree = self._tree
        if match._version == tree.version and match._num_inserts == tree.num_inserts:
            return match
        return self._find(match.namespace, match._asked)

    def holds_others_behind(self, match: Match) -> bool:
        """Whether pages follow the match that are not what was asked for; else it took all that was held there."""
        walk = self._walk(match)
        return bool(walk.nodes) and (walk.num_last < len(walk.nodes[-1].pages) or bool(walk.nodes[-1].children))

    def num_available(self, match: Match | None = None) -> int:
        """Pages `try_lease(match, n)` could take beyond the match: free plus evictable, without the match's own."""
        available = self._ledger.num_available
        return available if match is None else available - self._num_cached(self._walk(match))

    def try_lease(self, match: Match, num_new: int) -> PageLease | None:
        """Pin the match and allocate `num_new` pages behind it, evicting if needed; all or nothing.

        None where there is no room, and where the match is stale: match again before the next try.
        """
        walk = self._walk(match)
        if walk.num_pages < match.num_pages or num_new > self._ledger.num_available - self._num_cached(walk):
            return None
        shared, end = self._pin(walk, above=None)
        lease = PageLease(match.namespace, _table(shared, self._allocate(match.namespace, num_new)), len(shared), end)
        self._leases.add(lease)
        return lease

    def try_extend(self, lease: PageLease, num_new: int) -> bool:
        """Append `num_new` private pages; all or nothing."""
        self._expect_live(lease)
        if num_new > self._ledger.num_available:
            return False
        lease.pages = _table(lease.pages, self._allocate(lease.namespace, num_new))
        return True

    def try_replace(self, lease: PageLease, first: int, count: int) -> bool:
        """Replace private pages [first, first + count) of the lease with fresh ones; all or nothing."""
        self._expect_live(lease)
        last = first + count
        if not lease.num_shared <= first <= last <= len(lease.pages):
            raise InvariantError(f"pages [{first}, {last}) of the lease are not all private")
        if count > self._ledger.num_available:
            return False
        old = lease.pages[first:last]
        lease.pages = _table(lease.pages[:first], self._allocate(lease.namespace, count), lease.pages[last:])
        if count:
            self._free_private(lease, old)
        return True

    def make_room(self, num_pages: int, takers: Iterable[tuple[PageLease, int]] = ()) -> int:
        """Evict in one pass until `num_pages` are free, if possible. Returns pages now free. `takers`: the leases that are
        about to be extended, and by how many pages: these count as their owners' already while room is made."""
        num_free = self._ledger.num_free
        if num_pages > num_free:
            taken = Counter[bytes]()
            for lease, count in takers:
                taken[lease.namespace] += count
            for namespace, count in taken.items():
                self._order.quota.add(namespace, count)
            num_free = evict(self._tree, self._ledger, self._order, num_pages - num_free)
            for namespace, count in taken.items():
                self._order.quota.add(namespace, -count)
        return num_free

    def commit(self, lease: PageLease, tokens: Int32Array, num_tokens: int) -> int:
        """Insert the lease's whole pages of `tokens[:num_tokens]` into the tree. Where the tree already has a page the
        lease is remapped to it and its own copy freed. Returns the number of pages remapped; a strict no-op where
        nothing new is whole.

        The caller vouches that their KV is written and fenced; a page that a peer may still write raises.
        """
        self._expect_live(lease)
        first, last = lease.num_shared, num_tokens // self.page_size
        if num_tokens > len(tokens) or last > len(lease.pages):
            raise InvariantError(f"{num_tokens} tokens committed of {len(tokens)} on {len(lease.pages)} pages")
        if last <= first:
            return 0
        return self._publish(lease, last, tokens[first * self.page_size : last * self.page_size].tobytes())

    def release(self, lease: PageLease) -> None:
        """Unpin shared pages and free private ones. Exactly once per lease."""
        self._expect_live(lease)
        self._leases.remove(lease)
        end, num_shared = lease._end, lease.num_shared
        if end is not None:
            self._order.touch(self._ledger.unlease(lease.pages[:num_shared]))
            self._tree.unpin(end)
            self._order.push(end)
        if num_shared < len(lease.pages):
            self._free_private(lease, lease.pages[num_shared:])

    def open_write(self, pages: Int32Array) -> None:
        """A peer may write these pages from now on (its ticket owns them)."""
        self._ledger.open_write(pages)

    def close_write(self, pages: Int32Array) -> None:
        """The peer's word, or proof of its end, that it writes these no more."""
        self._ledger.close_write(pages)

    def add_reader(self, pages: Int32Array) -> None:
        """A launched step or an open transfer handle may read or write these pages, whoever leases them."""
        self._ledger.add_reader(pages)

    def drop_reader(self, pages: Int32Array) -> None:
        """The step's event is past or the handle has ended: the counterpart of one `add_reader` of the same pages."""
        self._ledger.drop_reader(pages)

    def flush(self) -> int:
        """Drop every unpinned page from the tree; returns how many."""
        dropped = self._tree.prune()
        if dropped:
            self._ledger.leave_tree(np.concatenate([node.pages for node in dropped]))
        for node in dropped:
            self._order.quota.add(node.namespace, -len(node.pages))
        return sum(len(node.pages) for node in dropped)

    def counts(self) -> PageCounts:
        return self._ledger.counts()

    def open_writes(self) -> Int32Array:
        """Pages that a peer may write now, ascending."""
        return self._ledger.written

    def check(self) -> None:
        """Raise InvariantError unless every page's owner set, the tree's pins and the free list agree."""
        self._ledger.check()
        self._tree.check()
        pins = self._check_tree_pages()
        self._check_leases(pins)

    def _find(self, namespace: bytes, asked: bytes) -> Match:
        tree = self._tree
        walk = tree.walk(namespace, asked)
        num_pages = walk.num_pages
        return Match(namespace, num_pages, num_pages * self.page_size, asked, walk, tree.version, tree.num_inserts)

    def _walk(self, match: Match) -> Walk:
        """The match's path as it is now."""
        if match._version == self._tree.version:
            return match._walk
        return self._tree.walk(match.namespace, match._asked[: match.num_pages * self._tree.page_bytes])

    def _num_cached(self, walk: Walk) -> int:
        """Matched pages that nobody holds. A node knows its leases, but not who reads its pages without one."""
        return self._ledger.num_cached_of(walk.pages()) if self._ledger.num_lingering else walk.num_unpinned()

    def _pin(self, walk: Walk, above: Node | None) -> tuple[Int32Array, Node | None]:
        """Lease what a walk from below `above` matched. Returns its pages and the node that ends with them."""
        if not walk.nodes:
            return EMPTY, above
        shared = walk.pages()
        end = self._tree.end(walk)
        self._tree.pin(end, above)
        self._ledger.lease(shared)
        return shared, end

    def _publish(self, lease: PageLease, last: int, new_tokens: bytes) -> int:
        """Move the private pages before page `last`, which hold `new_tokens`, into the tree; see `commit`."""
        tree, before = self._tree, lease._end
        walk = tree.walk(lease.namespace, new_tokens) if before is None else tree.walk_from(before, new_tokens)
        num_known = walk.num_pages
        first_new = lease.num_shared + num_known
        known, new = lease.pages[lease.num_shared : first_new], lease.pages[first_new:last]
        if num_known and self._ledger.num_written_of(known):
            raise InvariantError("a page that a peer may still write would be freed for one of the tree")
        if len(new):
            self._ledger.enter_tree(new)
        if num_known:
            self._remap(lease, walk, known)
        if len(new):
            edge = new_tokens[num_known * tree.page_bytes :]
            lease._end = tree.insert(lease._end or tree.root(lease.namespace), edge, new)
            lease.num_shared = last
        if num_known and before is not None:
            tree.join(before)
        return num_known

    def _remap(self, lease: PageLease, walk: Walk, own: Int32Array) -> None:
        """Take the tree's pages, which a walk from the lease's end matched, for the lease's own."""
        first, last = lease.num_shared, lease.num_shared + walk.num_pages
        shared, lease._end = self._pin(walk, above=lease._end)
        lease.pages, lease.num_shared = _table(lease.pages[:first], shared, lease.pages[last:]), last
        self._free_private(lease, own)

    def _allocate(self, namespace: bytes, num_pages: int) -> Int32Array:
        """The new pages count as the owner's already while room is made for them."""
        if not num_pages:
            return EMPTY
        self._order.quota.add(namespace, num_pages)
        if num_pages > self._ledger.num_free:
            self.make_room(num_pages)
        return self._ledger.allocate(num_pages)

    def _free_private(self, lease: PageLease, private: Int32Array) -> None:
        self._ledger.free_private(private)
        self._order.quota.add(lease.namespace, -len(private))

    def _expect_live(self, lease: PageLease) -> None:
        if lease not in self._leases:
            raise InvariantError("the lease was released before")

    def _check_tree_pages(self) -> NDArray[np.int32]:
        """Each page's pins by the tree; no page in two nodes, none missing, stamps and leaves in order."""
        pins = np.full(self.num_pages, -1, dtype=np.int32)
        leaves: set[Node] = set()
        num_pages = num_cached = 0
        for node in self._tree.nodes():
            pins[node.pages] = node.pins
            num_pages += len(node.pages)
            if node.pins:
                continue
            num_cached += self._ledger.num_unread_of(node.pages)
            if not node.children:
                leaves.add(node)
            above = node.parent.pages[-1:] if node.parent else node.pages[:0]
            if (np.diff(self._order.stamps[np.concatenate((above, node.pages))]) > 0).any():
                raise InvariantError("an unpinned page was released later than the one before it")
        if not np.array_equal(pins >= 0, self._ledger.in_tree) or num_pages != int(np.count_nonzero(pins >= 0)):
            raise InvariantError("a page is in two nodes, or the ledger and the tree disagree on what is in it")
        if num_cached != self._ledger.num_cached or leaves != self._order.heap.nodes():
            raise InvariantError("not everything that is counted as evictable would be evicted")
        self._order.quota.check(self._num_owned(), leaves)
        return pins

    def _num_owned(self) -> Counter[bytes]:
        """Pages of each owner, counted anew."""
        owned: Counter[bytes] = Counter()
        for node in self._tree.nodes():
            owned[cache_owner(node.namespace)] += len(node.pages)
        for lease in self._leases:
            owned[cache_owner(lease.namespace)] += len(lease.pages) - lease.num_shared
        return owned

    def _check_leases(self, pins: NDArray[np.int32]) -> None:
        for lease in self._leases:
            path: list[Int32Array] = []
            node = lease._end
            while node is not None:
                path.append(node.pages)
                node = node.parent
            if _table(EMPTY, *path[::-1]).tobytes() != lease.pages[: lease.num_shared].tobytes():
                raise InvariantError("a lease's shared pages are not the path it pins")
        leases = self._num_listed(lease.pages for lease in self._leases)
        num_sharing = self._num_listed(lease.pages[: lease.num_shared] for lease in self._leases)
        if not np.array_equal(leases, self._ledger.leases) or not np.array_equal(num_sharing, np.maximum(pins, 0)):
            raise InvariantError("leases or pins are not those of the live leases")

    def _num_listed(self, tables: Iterable[Int32Array]) -> NDArray[np.intp]:
        """How many of `tables` list each page."""
        return np.bincount(_table(EMPTY, *tables), minlength=self.num_pages)


def _table(*parts: Int32Array) -> Int32Array:
    table = np.concatenate(parts)
    table.setflags(write=False)
    return table
