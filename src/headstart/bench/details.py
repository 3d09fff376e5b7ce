"""Every request of a run, for whoever needs more than its statistics: calibration fits step times to them."""

from typing import Any

from headstart.bench.load_generator import LoadResult
from headstart.bench.records import RequestRecord


def details(cold: LoadResult, sample: LoadResult) -> list[dict[str, Any]]:
    """One entry a request, in order of sending. Times are seconds since the warm-up began, lengths in tokens."""
    phases = ((cold, "warm-up"), (sample, "sample"))
    known = [(record, name) for phase, name in phases for record in phase.records if record.is_complete]
    known.sort(key=lambda entry: entry[0].answer.sent_s)
    return [_entry(record, name, cold.began_s) for record, name in known]


def _entry(record: RequestRecord, phase: str, began_s: float) -> dict[str, Any]:
    request, answer = record.request, record.answer
    return {
        "phase": phase,
        "session": request.session,
        "turn": request.turn,
        "group": request.group,
        "sent": round(answer.sent_s - began_s, 6),
        "prompt_len": record.prompt_len,
        "possible_len": request.possible_len,
        "cached": answer.usage.cached_tokens,
        "decode_prefix": answer.usage.decode_prefix_len,
        "bytes_moved": answer.usage.bytes_moved,
        "stages": answer.usage.stage_s,
        "arrivals": [[round(arrival.at_s - began_s, 6), arrival.num_tokens] for arrival in answer.arrivals],
    }
