"""What happened in a world, in order: who said what to whom and what became of it, what was written where, what was
done to whom, and where each request stood."""

from collections.abc import Iterable
from dataclasses import dataclass

from headstart.core.clock import Clock
from headstart.core.messages import (
    Accepted,
    Cancel,
    CancelTicket,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Join,
    KillRequest,
    Membership,
    Message,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Rejected,
    Submit,
    TicketClosed,
    TicketRef,
    Tokens,
    WorkerExited,
    decode_notice,
)
from headstart.core.request import ChoiceRef
from headstart.sim.network import FINE, MessageFate
from headstart.transfer.loopback import Fate, Posted

FAULTLESS = Fate()
ROUTINE = (Heartbeat, Join, Membership, Hello)
"""Said all the time: shown only where something became of it."""
NAME_WIDTH = 12


@dataclass(frozen=True, slots=True)
class _Said:
    sender: str
    recipient: str
    message: Message
    fate: MessageFate

    def __str__(self) -> str:
        said = f"{self.sender:>{NAME_WIDTH}} -> {self.recipient:<{NAME_WIDTH}} {describe(self.message)}"
        return said if self.fate is FINE else f"{said}   ** {_message_fate(self.fate)}"


@dataclass(frozen=True, slots=True)
class _Posted:
    posted: Posted
    fate: Fate

    def __str__(self) -> str:
        posted = self.posted
        notice = decode_notice(posted.notice)
        what = f"{posted.num_pages} pages"
        if notice is not None:
            what = f"{_ticket(notice.ref)} pages [{notice.first}, {notice.first + notice.count})"
        said = f"{posted.source:>{NAME_WIDTH}} => {posted.peer:<{NAME_WIDTH}} write {what}"
        return said if self.fate == FAULTLESS else f"{said}   ** {_write_fate(self.fate)}"


class Timeline:
    """Keeps everything as it comes and puts it into words only when asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[tuple[float, object]] = []
        self._states: dict[tuple[str, ChoiceRef], str] = {}

    def said(self, sender: str, recipient: str, message: Message, fate: MessageFate) -> None:
        if fate is not FINE or not isinstance(message, ROUTINE):
            self._events.append((self._clock.now(), _Said(sender, recipient, message, fate)))

    def posted(self, posted: Posted, fate: Fate) -> None:
        self._events.append((self._clock.now(), _Posted(posted, fate)))

    def did(self, what: str) -> None:
        self._events.append((self._clock.now(), what))

    def stand(self, states: dict[tuple[str, ChoiceRef], str]) -> None:
        """Where every choice stands, by worker; only changes are kept."""
        for (worker, ref), state in states.items():
            before = self._states.get((worker, ref))
            if before != state:
                came = f"{before} -> {state}" if before else state
                self._events.append((self._clock.now(), f"{worker:>{NAME_WIDTH}}    {choice_name(ref)}: {came}"))
        self._states = states

    def lines(self, last: int | None = None) -> list[str]:
        """One line an event, times in milliseconds."""
        events = self._events if last is None else self._events[-last:]
        return [f"{1000 * time_s:10.2f}  {event}" for time_s, event in events]


def choice_name(ref: ChoiceRef) -> str:
    return f"{ref.request_id}/{ref.choice}@{ref.attempt}"


def describe(message: Message) -> str:
    """A message in a few words: its kind, what it is about, and what decides what follows."""
    kind = type(message).__name__
    match message:
        case Submit():
            request = message.request
            told = f"prompt {len(request.prompt)}, resumed with {len(request.output_ids)}, {request.remaining_s:.2f} s"
            return f"{kind} {choice_name(request.ref)} {told}"
        case Tokens():
            parts = (f"{choice_name(d.ref)}[{d.index}:{d.index + len(d.token_ids)}]" for d in message.deltas)
            return f"{kind} {' '.join(parts)}"
        case Finished():
            return f"{kind} {choice_name(message.ref)} {message.finish_reason} after {message.num_tokens}"
        case Accepted():
            return f"{kind} {choice_name(message.ref)}"
        case Rejected() | Failed():
            return f"{kind} {choice_name(message.ref)} {message.code.value}: {message.message}"
        case Cancel():
            return f"{kind} {choice_name(message.ref)} {message.reason.value}"
        case Prefill():
            pages = f"onto pages {_pages(message.dst_pages.tolist())}"
            return f"{kind} {_ticket(message.ref)} [{message.start}, {len(message.tokens)}) {pages}"
        case PrefillFailed():
            return f"{kind} {_ticket(message.ref)} {message.code.value}: {message.message}"
        case PrefillDone() | CancelTicket() | TicketClosed():
            return f"{kind} {_ticket(message.ref)}"
        case WorkerExited() | KillRequest():
            return f"{kind} {message.worker}"
        case _:
            return kind


def _ticket(ref: TicketRef) -> str:
    return f"ticket {ref.ticket}.{ref.attempt}"


def _pages(pages: Iterable[int]) -> str:
    return ",".join(map(str, pages))


def _message_fate(fate: MessageFate) -> str:
    if fate.num_copies == 0:
        return "lost"
    copies = "" if fate.num_copies == 1 else f" in {fate.num_copies} copies"
    return f"late by {fate.delay_s:.3f} s{copies}"


def _write_fate(fate: Fate) -> str:
    if fate.refused:
        return "refused"
    words = ["torn"] if fate.fails else []
    if fate.flips:
        words.append("a bit flips")
    if fate.late_page_s is not None:
        words.append(f"a page is right {fate.late_page_s:.3f} s after its notice")
    if fate.delay_s is not None:
        words.append(f"lands after {fate.delay_s:.3f} s")
    if fate.num_notices != 1:
        words.append(f"{fate.num_notices} notices")
    if fate.notice_delay_s:
        words.append(f"notice late by {fate.notice_delay_s:.3f} s")
    return ", ".join(words)
