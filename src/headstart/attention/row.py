"""What any attention over the KV pool is told about a row of a step."""

from dataclasses import dataclass

from headstart.core.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Positions [start, start + num_new) of one sequence and its page table."""

    pages: Int32Array
    start: int
    num_new: int
    tokens: Int32Array | None = None  # [>= start] what positions [0, start) hold, if known: permits contiguous copies
