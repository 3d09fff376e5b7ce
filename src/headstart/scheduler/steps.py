"""One step's rows: who computes how many tokens, and the batch made of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.scheduler.entries import Choice, Running
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.stop import banned_ids


class Part(NamedTuple):
    """What a running entry computes in a step. It samples where that reaches its last token."""

    entry: Running
    num_new: int
    samples: bool


@dataclass(slots=True, eq=False)
class Launched:
    """The step in flight. `parts[row_id]` launched each row; `held` are pages whose entries have left since."""

    step_id: int
    parts: list[Part]
    held: list[Int32Array] = field(default_factory=list)

    def has(self, entry: object) -> bool:
        return any(part.entry is entry for part in self.parts)


def share_out(running: Iterable[Running], limits: DecodeLimits) -> list[Part]:
    """Decode rows cost nothing; tokens before a last one come out of the short-delta or the chunk budget, in order."""
    short, chunk = limits.local_prefill_tokens, limits.chunked_prefill_size
    parts: list[Part] = []
    for entry in running:
        delta = entry.choice.sequence.num_missing - 1
        num_new = min(delta, chunk if entry.chunked else short)
        if entry.chunked:
            chunk -= num_new
        else:
            short -= num_new
        samples = num_new == delta
        if num_new or samples:
            parts.append(Part(entry, num_new + samples, samples))
    return parts


def make_batch(step_id: int, parts: list[Part]) -> Batch:
    """Rows in the order of `parts`, which their ids index."""
    rows: list[Row] = []
    for row_id, (entry, num_new, samples) in enumerate(parts):
        sequence = entry.choice.sequence
        start = sequence.num_computed
        sample = sample_spec(entry.choice) if samples else None
        tokens = sequence.span(start, start + num_new)
        rows.append(Row(row_id, tokens, start, entry.lease.pages, sample, entry.choice.request.namespace))
    return Batch(step_id, tuple(rows))


def sample_spec(choice: Choice) -> SampleSpec:
    request, sequence = choice.request, choice.sequence
    return SampleSpec(
        request.sampling,
        request.ref.choice,
        sequence.num_outputs,
        sequence.tokens,
        sequence.prompt_len,
        banned_ids(request, sequence),
        request.num_top_logprobs,
    )
