"""What one seed of chaos does to a world: its size, who asks for what, the weather on its links, and what befalls whom.

Everything is drawn before the world starts, but for the weather, which draws as messages come: either way a seed has one
history. After `calm_at` nothing new befalls anybody, so that every history ends.
"""

from dataclasses import dataclass, field, replace
from random import Random
from string import ascii_lowercase

from headstart.core.request import SamplingParams, StopCriteria
from headstart.sim.cost import linear_cost
from headstart.sim.network import MessageFate
from headstart.sim.spec import SMALL_DECODE, SMALL_PREFILL, Timing, WorldSpec
from headstart.transfer.loopback import Fate

CONTEXT_LEN = 64
MAX_TURN_OUTPUT = 8
NAMESPACES = (b"", b"", b"tenant")
STEPS = (
    *("Submit", "Accepted", "Tokens", "Finished", "Cancel", "Prefill", "PrefillDone", "PrefillFailed"),
    *("CancelTicket", "TicketClosed", "Hello", "Welcome", "Membership", "write"),
)
"""Where a trap may wait: the messages of the protocol, and the post of a write."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: `num_choices` answers to what was said so far and `said`."""

    said: tuple[int, ...]
    stop: StopCriteria
    sampling: SamplingParams
    stops: tuple[str, ...]  # strings that end the answer
    num_choices: int
    deadline_s: float
    think_s: float  # before it is asked
    cancel_after_s: float | None  # the client leaves


@dataclass(frozen=True, slots=True)
class Conversation:
    namespace: bytes
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Weather:
    """Shares of messages and of writes that something happens to."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0  # overtaken by others, or overtaking them
    torn: float = 0.0
    refused: float = 0.0
    slow: float = 0.0  # lands long after it was posted
    unnoticed: float = 0.0
    noticed_twice: float = 0.0
    noticed_late: float = 0.0
    flipped: float = 0.0  # one bit arrives wrong
    unfinished: float = 0.0  # noticed before one of its pages is right

    def message_fate(self, rng: Random, fine: MessageFate) -> MessageFate:
        roll = rng.random()
        if roll < self.lost:
            return MessageFate(0)
        if roll < self.lost + self.doubled:
            return MessageFate(2, rng.choice((0.0, 0.05, 0.5)))
        if roll < self.lost + self.doubled + self.late:
            return MessageFate(1, rng.choice((0.002, 0.05, 0.3, 1.5, 4.0)))
        return fine

    def write_fate(self, rng: Random) -> Fate:
        return Fate(
            refused=rng.random() < self.refused,
            fails=rng.random() < self.torn,
            delay_s=rng.choice((0.1, 0.5, 3.0)) if rng.random() < self.slow else None,
            num_notices=0 if rng.random() < self.unnoticed else 1 + (rng.random() < self.noticed_twice),
            notice_delay_s=rng.choice((0.05, 0.6, 2.5)) if rng.random() < self.noticed_late else 0.0,
            flips=rng.random() < self.flipped,
            late_page_s=rng.choice((0.01, 0.2, 2.0)) if rng.random() < self.unfinished else None,
        )


@dataclass(frozen=True, slots=True)
class Kill:
    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Stall:
    """The process stands still, then goes on as if nothing had been."""

    at: float
    name: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Silence:
    """No message passes between the gateway and `name`; what the sockets repeat arrives afterwards."""

    at: float
    name: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Burst:
    """Long requests at once: no pool holds them all."""

    at: float
    count: int


Incident = Kill | Stall | Silence | Burst


@dataclass(frozen=True, slots=True)
class Trap:
    """Strikes the sender or the recipient of the `countdown`-th message of a kind, `after_s` it was sent."""

    step: str
    countdown: int
    strikes_sender: bool
    after_s: float
    stall_s: float | None  # None: kills
    swallows: bool  # the message is lost too


@dataclass(frozen=True, slots=True)
class Plan:
    spec: WorldSpec
    conversations: tuple[Conversation, ...]
    weather: Weather
    incidents: tuple[Incident, ...] = ()
    traps: tuple[Trap, ...] = ()
    calm_at: float = 10.0
    names: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Devices:
    """How workers take steps, if a seed does not draw it."""

    steps_in_flight: int | None = None  # of every worker; None: 1 of some, 2 of others
    num_drafts: int | None = None  # of a decode row, at most; None: 0 to 3


DRAWN = Devices()


def draw_plan(seed: int, devices: Devices = DRAWN) -> Plan:
    """The plan of a seed."""
    rng = Random(f"plan {seed}")
    spec = _with_devices(_draw_spec(rng), Random(f"devices {seed}"), devices)
    names = tuple([f"prefill-{i}" for i in range(spec.num_prefill)] + [f"decode-{i}" for i in range(spec.num_decode)])
    calm_at = rng.choice((4.0, 8.0, 12.0))
    stems = [tuple(rng.randrange(spec.vocab_size) for _ in range(rng.randint(4, 24))) for _ in range(3)]
    return Plan(
        spec,
        tuple(_draw_conversation(rng, stems, calm_at) for _ in range(rng.randint(4, 7))),
        _draw_weather(rng),
        tuple(_draw_incident(rng, names, calm_at) for _ in range(rng.choice((0, 1, 2, 4)))),
        tuple(_draw_trap(rng) for _ in range(rng.choice((0, 1, 2, 4)))),
        calm_at,
        names,
    )


def _draw_spec(rng: Random) -> WorldSpec:
    page_size = rng.choice((1, 4, 4, 8))
    longest = CONTEXT_LEN // page_size + 1
    num_prefill, num_decode = rng.choice(((2, 2), (2, 2), (2, 2), (1, 2), (2, 1), (1, 1)))
    return WorldSpec(
        num_prefill,
        num_decode,
        page_size,
        prefill_pages=int(longest * rng.choice((1, 1.5, 3))),
        decode_pages=int(longest * rng.choice((1, 1.5, 3))),
        prefill=replace(SMALL_PREFILL, chunked_prefill_size=rng.choice((4, 8, 16)), capacity_tokens=CONTEXT_LEN),
        decode=replace(
            SMALL_DECODE,
            chunked_prefill_size=rng.choice((4, 16)),
            context_len=CONTEXT_LEN,
            local_prefill_tokens=rng.choice((0, 0, 4)),
            num_reserved_decode_tokens=rng.choice((0, 8)),
        ),
        timing=_draw_timing(rng),
    )


def _with_devices(spec: WorldSpec, rng: Random, devices: Devices) -> WorldSpec:
    """At least one worker of the cluster takes one step at a time, and at least one two, if nothing else is asked for."""
    first = rng.choice((1, 2))
    prefill, decode = (first, 3 - first), (3 - first, first)
    num_drafts = rng.choice((0, 0, 1, 2, 3))
    if devices.steps_in_flight is not None:
        prefill = decode = (devices.steps_in_flight,)
    if devices.num_drafts is not None:
        num_drafts = devices.num_drafts
    modelling = replace(spec.modelling, prefill_steps_in_flight=prefill, decode_steps_in_flight=decode)
    return replace(spec, decode=replace(spec.decode, num_draft_tokens=num_drafts), modelling=modelling)


def _draw_timing(rng: Random) -> Timing:
    cost = linear_cost(rng.choice((0.01, 0.05)), rng.choice((0.0005, 0.01)))
    return Timing(prefill_cost=cost, decode_cost=cost, restart_s=rng.choice((0.2, 0.2, 1.5)))


def _draw_conversation(rng: Random, stems: list[tuple[int, ...]], calm_at: float) -> Conversation:
    first = rng.choice(stems)[: rng.randint(1, 24)]
    start_s = rng.uniform(0.0, 0.7 * calm_at)
    turns = [_draw_turn(rng, first, start_s)]
    for _ in range(rng.choice((0, 1, 2, 3))):
        turns.append(_draw_turn(rng, (), rng.choice((0.0, 0.05, 1.0))))
    return Conversation(rng.choice(NAMESPACES), tuple(turns))


def _draw_turn(rng: Random, stem: tuple[int, ...], think_s: float) -> Turn:
    said = (*stem, *(rng.randrange(97) for _ in range(rng.randint(1, 6))))
    max_new = rng.randint(1, MAX_TURN_OUTPUT)
    stop_ids = tuple(rng.sample(range(97), rng.choice((0, 0, 5, 20))))
    sampling = _draw_sampling(rng)
    return Turn(
        said,
        StopCriteria(max_new, rng.choice((0, 0, min(2, max_new))), stop_ids),
        sampling,
        stops=tuple("".join(rng.choices(ascii_lowercase, k=k)) for k in rng.choice(((), (), (), (1,), (2, 1)))),
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        deadline_s=rng.choice((0.3, 2.0, 8.0, 30.0, 30.0, 30.0)),
        think_s=think_s,
        cancel_after_s=rng.choice((0.01, 0.1, 0.5)) if rng.random() < 0.12 else None,
    )


def _draw_sampling(rng: Random) -> SamplingParams:
    is_greedy = rng.random() < 0.5
    temperature, seed = (0.0, 0) if is_greedy else (1.0, rng.getrandbits(64))
    if rng.random() < 0.7:
        return SamplingParams(temperature=temperature, seed=seed)
    return SamplingParams(
        temperature=temperature,
        presence_penalty=rng.choice((0.0, 0.4, 2.0)),
        frequency_penalty=rng.choice((-0.5, 0.3, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.5)),
        seed=seed,
    )


def _draw_weather(rng: Random) -> Weather:
    """From clear to foul; each kind of trouble is absent in some seeds."""
    worst = rng.choice((0.0, 0.02, 0.1, 0.25))
    return Weather(**{kind: rng.choice((0.0, worst / 2, worst)) for kind in Weather.__dataclass_fields__})


def _draw_incident(rng: Random, names: tuple[str, ...], calm_at: float) -> Incident:
    at, name = rng.uniform(0.1, calm_at), rng.choice(names)
    match rng.randrange(6):
        case 0 | 1:
            return Kill(at, name)
        case 2 | 3:
            return Stall(at, name, rng.choice((0.5, 2.0, 4.0, 9.0)))
        case 4:
            return Silence(at, name, rng.choice((0.8, 2.0, 6.5)))
        case _:
            return Burst(at, rng.randint(4, 10))


def _draw_trap(rng: Random) -> Trap:
    return Trap(
        rng.choice(STEPS),
        rng.choice((1, 2, 3, 8)),
        rng.random() < 0.5,
        rng.choice((0.0, 0.0, 0.0005, 0.002, 0.02)),
        rng.choice((None, None, 0.6, 3.5, 8.0)),
        rng.random() < 0.3,
    )
