"""One step's rows: who computes how many tokens, and the batch made of it.

A step may be made while earlier ones are in flight. A row then follows the rows of its entry that are in flight: a chunk
goes on behind the last one, and a decode row takes the token that the last one draws. Three kinds of rows wait for what is
in flight instead: those that end with it by length, those whose length it leaves open (drafts), and those that lack pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from headstart.core.arrays import EMPTY, Int32Array
from headstart.core.batch import Batch, PendingToken, Row, SampleSpec
from headstart.core.request import Request
from headstart.scheduler.decode.states import Choice, Running, ScheduledRow
from headstart.scheduler.decode.step_time import StepWork
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.protocol import Drafter


@dataclass(slots=True, eq=False)
class InflightStep:
    """A step that was launched and whose output has not come. `rows` by their ids. `held` are pages that no lease may hold
    any more, and that the step or an earlier one may still touch."""

    step_id: int
    rows: list[ScheduledRow]
    held: list[Int32Array] = field(default_factory=list)

    def has(self, entry: Running) -> bool:
        return any(row.entry is entry for row in self.rows)


def split_token_budget(running: Iterable[Running], limits: DecodeLimits, chunk: int) -> list[ScheduledRow]:
    """Decode rows cost nothing; tokens before a last one come out of the short-delta budget or that of `chunk` tokens, in
    order."""
    short = limits.local_prefill_tokens
    rows: list[ScheduledRow] = []
    for entry in running:
        sequence = entry.choice.sequence
        start, end = sequence.num_computed, len(sequence) - 1
        if entry.inflight:
            num_pending = _num_pending(entry)
            if num_pending is None:
                continue
            start, end = entry.inflight[-1].stop, end + num_pending
        if start == end:
            rows.append(ScheduledRow(entry, start, 1, True))
            continue
        num_new = min(end - start, chunk if entry.chunked else short)
        if entry.chunked:
            chunk -= num_new
        else:
            short -= num_new
        if num_new:
            samples = start + num_new == end
            rows.append(ScheduledRow(entry, start, num_new + samples, samples))
    return rows


def work_of(rows: Iterable[ScheduledRow]) -> StepWork:
    """What the rows of a step compute, as far as its time depends on it."""
    chunks: list[tuple[int, int]] = []
    num_decode_rows = 0
    for row in rows:
        if row.samples and row.num_new == 1:
            num_decode_rows += 1
        else:
            chunks.append((row.start, row.num_new))
    return StepWork.of(num_decode_rows, chunks)


def _num_pending(entry: Running) -> int | None:
    """Outputs that the entry's rows in flight draw, 0 or 1; None if its next row has to wait for what they bring."""
    num_pending = 0
    for row in entry.inflight:
        if row.drafts is not None:
            return None
        num_pending += row.samples
    num_left = entry.choice.request.stop.max_new_tokens - entry.choice.sequence.num_outputs
    return num_pending if num_pending < min(num_left, 2) else None


def with_drafts(rows: list[ScheduledRow], drafter: Drafter, num_draft_tokens: int) -> list[ScheduledRow]:
    """The rows, decode rows with what the drafter proposes behind their last token. A row whose last token is in flight
    is left out if there is something to propose: its next one can have drafts."""
    drafted: list[ScheduledRow] = []
    for row in rows:
        num_drafts = min(num_draft_tokens, _most_drafts(row))
        choice = row.entry.choice
        drafts = drafter.propose(choice.request, choice.sequence.tokens, num_drafts) if num_drafts > 0 else EMPTY
        if not len(drafts):
            drafted.append(row)
        elif not row.entry.inflight:
            drafted.append(structs.replace(row, drafts=drafts[:num_drafts]))
    return drafted


def _most_drafts(row: ScheduledRow) -> int:
    """Drafts of a row that could all be accepted. The same ids are banned at all of their positions."""
    sequence, stop = row.entry.choice.sequence, row.entry.choice.request.stop
    num_outputs = sequence.num_outputs + (1 if row.entry.inflight else 0)
    if not row.samples or row.num_new > 1 or not num_outputs:
        return 0
    last = stop.min_new_tokens if num_outputs < stop.min_new_tokens else stop.max_new_tokens
    return last - 1 - num_outputs


def make_batch(step_id: int, scheduled: list[ScheduledRow]) -> Batch:
    """Rows in the order of `scheduled`, which their ids index. Each follows those of its entry that are in flight."""
    rows: list[Row] = []
    for row_id, row in enumerate(scheduled):
        entry, start = row.entry, row.start
        choice, pages = entry.choice, entry.lease.pages
        context, pending, num_drafts = choice.sequence.tokens, None, 0
        tokens = context[start : start + row.num_new]
        if start == len(context):
            before = entry.inflight[-1]
            pending = PendingToken(before.step_id, before.row_id)
        if row.drafts is not None:
            tokens, num_drafts = np.concatenate((tokens, row.drafts)), len(row.drafts)
        sample = sample_spec(choice, context, pending is not None) if row.samples else None
        rows.append(Row(row_id, tokens, start, pages, sample, choice.request.namespace, pending, num_drafts))
        row.step_id, row.row_id = step_id, row_id
        entry.inflight.append(row)
    return Batch(step_id, tuple(rows))


def sample_spec(choice: Choice, context: Int32Array, is_pending: bool) -> SampleSpec:
    request, sequence = choice.request, choice.sequence
    output_index = sequence.num_outputs + is_pending
    return SampleSpec(
        request.sampling,
        request.ref.choice,
        output_index,
        context,
        sequence.prompt_len,
        banned_ids(request, output_index),
        request.num_top_logprobs,
    )


def banned_ids(request: Request, output_index: int) -> tuple[int, ...]:
    """Ids that this output may not be."""
    return request.stop.stop_token_ids if output_index < request.stop.min_new_tokens else ()
