"""What serving one choice cost, the stats made of it, and why a prompt hit less than it could."""

from array import array
from dataclasses import dataclass, field

from xxhash import xxh32_intdigest

from headstart.core.arrays import Int32Array
from headstart.core.request import RequestStats

_NUM_SLOTS = 1 << 16


@dataclass(slots=True, eq=False)
class ChoiceMetrics:
    """What serving a choice cost so far. Counts of tokens are of the client's prompt alone: outputs that an earlier attempt
    delivered are computed again at no cost of the prompt, and so is what is computed again after the first token."""

    accepted_at: float
    prompt_len: int
    timestamps: dict[str, float] = field(default_factory=dict)  # first time: admitted, ready, first_token
    decode_prefix_len: int = 0
    prefill_prefix_len: int = 0
    pages_moved: int = 0
    miss_reason: str = ""
    num_retractions: int = 0
    num_mismatches: int = 0  # notices whose pages did not hold what was sent
    _computed: list[tuple[int, int]] = field(
        default_factory=list
    )  # positions, apart and ascending; by anyone, once each
    _held_len: int = 0  # positions of which KV was held, computed or found

    @property
    def num_computed(self) -> int:
        """Prompt tokens whose KV was computed for this choice, by anyone."""
        return sum(stop - start for start, stop in self._computed)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of whose KV use was made without computing it for this choice; 0 before anything was computed."""
        return self._held_len - self.num_computed

    def computed(self, start: int, stop: int) -> None:
        """KV of positions [start, stop) was computed; what is before `stop` is held now."""
        if "first_token" in self.timestamps or start >= stop:
            return
        self._held_len = max(self._held_len, min(stop, self.prompt_len))
        start, stop = min(start, self.prompt_len), min(stop, self.prompt_len)
        apart = [span for span in self._computed if span[1] < start or span[0] > stop]
        joined = [span for span in self._computed if span not in apart]
        merged = min([start, *(span[0] for span in joined)]), max([stop, *(span[1] for span in joined)])
        self._computed = sorted([*apart, merged])

    def timestamp(self, event: str, now: float) -> None:
        self.timestamps.setdefault(event, now)

    def found(self, decode_prefix_len: int, miss_reason: str) -> None:
        """At the first admission."""
        self.decode_prefix_len, self.miss_reason = min(decode_prefix_len, self.prompt_len), miss_reason

    def moved(self, num_pages: int, prefill_prefix_len: int) -> None:
        """Pages arrived of a prefill worker that found so much in its own cache."""
        self.pages_moved += num_pages
        self.prefill_prefix_len = min(prefill_prefix_len, self.prompt_len)

    def stats(self, page_bytes: int, now: float) -> RequestStats:
        admitted = self.timestamps.get("admitted", now)
        ready = self.timestamps.get("ready", now)
        first = self.timestamps.get("first_token", now)
        return RequestStats(
            cached_tokens=self.cached_tokens,
            decode_prefix_len=self.decode_prefix_len,
            prefill_prefix_len=self.prefill_prefix_len,
            bytes_moved=self.pages_moved * page_bytes,
            miss_reason=self.miss_reason,
            num_retractions=self.num_retractions,
            stage_s={
                "queue": admitted - self.accepted_at,
                "prefill": max(0.0, ready - admitted),
                "first_step": max(0.0, first - ready),
            },
        )


class CommittedPages:
    """A bounded, approximate memory of pages that were committed: by namespace, place and tokens.

    It explains misses in statistics and decides nothing: a page at the same place with the same tokens behind another
    prefix counts as the same, and old entries are overwritten. Checksums are the same in every process, so that a
    replay has the same reasons.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._slots = array("I", bytes(4 * _NUM_SLOTS))

    def add(self, namespace: bytes, tokens: Int32Array, first: int, last: int) -> None:
        """Pages [first, last) of `tokens` are in the cache now."""
        slots, seed = self._slots, xxh32_intdigest(namespace)
        raw = tokens[first * self._page_size : last * self._page_size].tobytes()
        page_bytes = self._page_size * tokens.itemsize
        for page, at in enumerate(range(0, len(raw), page_bytes), first):
            key = _key(seed, page, raw[at : at + page_bytes])
            slots[key % _NUM_SLOTS] = key

    def had(self, namespace: bytes, tokens: Int32Array, page: int) -> bool:
        """Whether that page was committed before, as far as remembered."""
        raw = tokens[page * self._page_size : (page + 1) * self._page_size].tobytes()
        key = _key(xxh32_intdigest(namespace), page, raw)
        return len(raw) > 0 and self._slots[key % _NUM_SLOTS] == key


def _key(seed: int, page: int, raw: bytes) -> int:
    return xxh32_intdigest(raw, seed + page)  # it takes seeds modulo 2**32
