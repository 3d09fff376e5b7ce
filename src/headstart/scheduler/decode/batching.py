"""One step's rows: who computes how many tokens, and the batch made of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.scheduler.decode.states import Choice, Running
from headstart.scheduler.decode.stop import banned_ids
from headstart.scheduler.limits import DecodeLimits


class ScheduledRow(Struct, frozen=True, eq=False):
    """What a running entry computes in a step. It samples where that reaches its last token."""

    entry: Running
    num_new: int
    samples: bool


@dataclass(slots=True, eq=False)
class InflightStep:
    """The step in flight. `parts[row_id]` launched each row; `left` are those of their entries that have left since, and
    `held` the pages of these."""

    step_id: int
    parts: list[ScheduledRow]
    left: list[Running] = field(default_factory=list)
    held: list[Int32Array] = field(default_factory=list)

    def has(self, entry: Running) -> bool:
        return any(part.entry is entry for part in self.parts)

    def lacks(self, entry: Running) -> bool:
        return any(gone is entry for gone in self.left)


def share_out(running: Iterable[Running], limits: DecodeLimits) -> list[ScheduledRow]:
    """Decode rows cost nothing; tokens before a last one come out of the short-delta or the chunk budget, in order."""
    short, chunk = limits.local_prefill_tokens, limits.chunked_prefill_size
    parts: list[ScheduledRow] = []
    for entry in running:
        delta = entry.choice.sequence.num_missing - 1
        if not delta:
            parts.append(ScheduledRow(entry, 1, True))
            continue
        num_new = min(delta, chunk if entry.chunked else short)
        if entry.chunked:
            chunk -= num_new
        else:
            short -= num_new
        if num_new:
            samples = num_new == delta
            parts.append(ScheduledRow(entry, num_new + samples, samples))
    return parts


def make_batch(step_id: int, parts: list[ScheduledRow]) -> Batch:
    """Rows in the order of `parts`, which their ids index."""
    rows: list[Row] = []
    for row_id, part in enumerate(parts):
        choice, pages = part.entry.choice, part.entry.lease.pages
        start, tokens = choice.sequence.num_computed, choice.sequence.tokens
        sample = sample_spec(choice, tokens) if part.samples else None
        rows.append(Row(row_id, tokens[start : start + part.num_new], start, pages, sample, choice.request.namespace))
    return Batch(step_id, tuple(rows))


def sample_spec(choice: Choice, context: Int32Array) -> SampleSpec:
    request, sequence = choice.request, choice.sequence
    return SampleSpec(
        request.sampling,
        request.ref.choice,
        sequence.num_outputs,
        context,
        sequence.prompt_len,
        banned_ids(request, sequence),
        request.num_top_logprobs,
    )
