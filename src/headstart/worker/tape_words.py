"""What is on a tape, for people."""

import numpy as np

from headstart.worker.tape import (
    Asked,
    Call,
    Digested,
    Effect,
    Input,
    Launched,
    LaunchedRow,
    Linked,
    Received,
    Said,
    StepEnded,
    Submitted,
    Wrote,
    message_in,
    submit_in,
)


def describe(effect: Effect) -> str:
    """For people."""
    match effect:
        case Said(recipient, frame):
            return f"to {recipient}: {_short(message_in(frame))}"
        case Wrote():
            pages = f"pages {_ids(effect.src_pages)} to {_ids(effect.dst_pages)}"
            return f"write to {effect.peer}, {pages}" + ("" if effect.error is None else f", failed: {effect.error}")
        case Linked(peer, descriptor):
            return f"disconnect {peer}" if descriptor is None else f"connect {peer}"
        case Digested(pages):
            return f"digest pages {_ids(pages)}"
        case Launched(-1):
            return "no step"
        case Launched(step_id, rows):
            return f"step {step_id}: " + "; ".join(map(_row, rows))
        case Call():
            return f"a call: {describe_input(effect.input)}"
        case _:
            return str(effect)


def describe_input(noted: Input) -> str:
    match noted:
        case Received(sender, frame):
            return f"from {sender}: {_short(message_in(frame))}"
        case Submitted(frame):
            return f"submit {_short(submit_in(frame).request)}"
        case StepEnded(output):
            sampled = {sample.row_id: sample.token_ids for sample in output.sampled}
            return f"step {output.step_id} ended, row: token {sampled}"
        case Asked(what):
            return what
        case _:
            return str(noted)


def _row(row: LaunchedRow) -> str:
    end = row.start + len(row.tokens) // 4
    sample = "" if row.output_index < 0 else f", samples output {row.output_index}"
    written = f"tokens {_ids(row.tokens)} into pages {_ids(row.written)}"
    return f"row {row.row_id} [{row.start}, {end}) {written}, table {row.table:08x}{sample}"


def _ids(data: bytes) -> str:
    return str(np.frombuffer(data, dtype="<i4").tolist())


def _short(value: object, limit: int = 400) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[:limit]}..."
