"""Values that cannot be true. One of them fails a run: something between clock and server measures wrongly."""

from collections.abc import Iterator

from headstart.bench.records import RequestRecord


def impossible(record: RequestRecord) -> list[str]:
    """What cannot be true about a complete answer, one sentence each."""
    name = f"{record.request.session} turn {record.request.turn + 1}"
    return [f"{name}: {reason}" for reason in (*_times(record), *_counts(record), *_reuse(record))]


def _times(record: RequestRecord) -> Iterator[str]:
    if record.ttft_s <= 0:
        yield f"a time to first token of {record.ttft_s} s"
    if any(itl <= 0 for itl in record.itls_s):
        yield "an inter-token latency of 0"
    if record.num_tokens > 1 and len(record.answer.arrivals) == 1:
        yield f"all {record.num_tokens} tokens in one arrival: not streamed, or client or server were kept from running"


def _counts(record: RequestRecord) -> Iterator[str]:
    request, answer = record.request, record.answer
    if record.num_tokens != request.output_len:
        few = "fewer" if record.num_tokens < request.output_len else "more"
        yield f"{record.num_tokens} output tokens, {few} than the {request.output_len} asked for"
    if answer.token_ids and len(answer.token_ids) != record.num_tokens:
        yield f"{len(answer.token_ids)} token ids for {record.num_tokens} tokens"
    if request.prompt_len is not None and record.prompt_len != request.prompt_len:
        yield f"{record.prompt_len} prompt tokens counted where {request.prompt_len} were sent"


def _reuse(record: RequestRecord) -> Iterator[str]:
    for name in ("cached_tokens", "decode_prefix_len"):
        value = getattr(record.answer.usage, name)
        if value is not None and not 0 <= value <= record.prompt_len:
            yield f"{name} of {value} for a prompt of {record.prompt_len} tokens"
