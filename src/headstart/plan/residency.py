"""How many tokens a decode batch of a shared-prefix workload reads per step and keeps resident, in closed form.

B requests run; each begins with one of G prefixes of P tokens, goes on with S tokens of its own, and has O outputs. A
batch meets g = G (1 - (1 - 1/G)^B) distinct prefixes on average. Read per step, outputs being half done on average:
B (P + S + O/2) where every row reads its own copy, g P + B (S + O/2) where equal prefixes are read once. Resident:
the same with whole outputs, since whoever runs may grow to its end.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixedLoad:
    """Lengths are tokens, means where they vary."""

    num_groups: int
    prefix_len: float
    suffix_len: float
    output_len: float

    def distinct_prefixes(self, num_rows: float) -> float:
        """Of a batch whose rows' groups are drawn evenly."""
        share: float = 1 - (1 - 1 / self.num_groups) ** num_rows
        return self.num_groups * share

    def read_tokens(self, num_rows: float, *, shared: bool) -> float:
        """KV positions that one decode step of `num_rows` reads."""
        return self._tokens(num_rows, self.output_len / 2, shared)

    def resident_tokens(self, num_rows: float, *, shared: bool) -> float:
        """KV positions that `num_rows` requests need a place for."""
        return self._tokens(num_rows, self.output_len, shared)

    def most_resident(self, pool_tokens: float, *, shared: bool) -> int:
        """Requests that fit `pool_tokens` at once; with sharing, beside every prefix whether someone uses it or not."""
        if not shared:
            return int(pool_tokens // (self.prefix_len + self.suffix_len + self.output_len))
        own = pool_tokens - self.num_groups * self.prefix_len
        return max(0, int(own // (self.suffix_len + self.output_len)))

    def _tokens(self, num_rows: float, output_len: float, shared: bool) -> float:
        num_prefixes = self.distinct_prefixes(num_rows) if shared else num_rows
        return num_prefixes * self.prefix_len + num_rows * (self.suffix_len + output_len)
