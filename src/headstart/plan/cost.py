"""What steps and transfers cost in seconds: named coefficients, the same type whether fitted or taken from a data sheet.

A step takes

    fixed_s                                                           c0
    + max(weights_s + experts read, row_s * padded tokens)            c1 * W and c3: the linear layers
    + max(kv_token_s * KV tokens read, pair_s * query-key pairs)      c2: attention
    + request_s * sampling rows                                       c4 * B

on a device where reading and computing of one kernel hide each other (`overlaps`), and the plain sum where they do not.
KV tokens read are those of distinct pages where attention reads a shared prefix once, else those of every row. Coefficients
of a fit are its own; those of a sheet come from `plan.roofline`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headstart.config.errors import ConfigError, require
from headstart.sim.cost import LinkCost, StepShape


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a step of n tokens reads the share 1 - (1 - token_share)^n of them."""

    read_s: float = 0.0  # to read every expert of every layer
    token_share: float = 1.0  # of the experts that one token uses

    def __post_init__(self) -> None:
        require(self.read_s >= 0, "the time to read the experts must not be negative")
        require(0 <= self.token_share <= 1, f"token_share must be from 0 to 1, got {self.token_share}")


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds that make up a step of one kind of worker."""

    fixed_s: float
    weights_s: float  # to read the weights that every step reads
    kv_token_s: float  # to read one token's KV
    row_s: float  # to push one token through the linear layers
    request_s: float  # of the host, for each row that samples
    pair_s: float  # of attention, for each pair of a query and a key
    row_tile: int = 1  # tokens are padded to a multiple of this
    experts: Experts = Experts()
    overlaps: bool = False

    def __post_init__(self) -> None:
        seconds = (self.fixed_s, self.weights_s, self.kv_token_s, self.row_s, self.request_s, self.pair_s)
        require(min(seconds) >= 0, "the coefficients of a step must not be negative")
        require(self.row_tile >= 1, f"row_tile must be at least 1, got {self.row_tile}")


@dataclass(frozen=True, slots=True)
class FrontCoefficients:
    """What a request meets outside the workers."""

    before_s: float = 0.0  # from the client's send to the gateway's dispatch: HTTP, tokenisation
    after_s: float = 0.0  # from the gateway's token to the client's: detokenisation, HTTP
    message_s: float = 0.0  # one way between two processes

    def __post_init__(self) -> None:
        require(min(self.before_s, self.after_s, self.message_s) >= 0, "the times of the front must not be negative")


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares by which a step takes longer while the worker of the other role computes on the same machine."""

    decode_slowed: float = 0.0
    prefill_slowed: float = 0.0

    def __post_init__(self) -> None:
        require(min(self.decode_slowed, self.prefill_slowed) >= 0, "the shares of contention must not be negative")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything that time is computed from. `notes` say where each number comes from."""

    name: str
    device: str  # "cpu" or "cuda": what a worker's "auto" settings resolve by
    kv_token_bytes: int  # of one token in the pool, all layers: what a transfer moves
    decode: StepCoefficients
    prefill: StepCoefficients
    link: LinkCost
    front: FrontCoefficients = FrontCoefficients()
    prefix_shared: bool = True  # decode attention reads a page that several rows share once
    contention: Contention = Contention()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.kv_token_bytes >= 1, f"kv_token_bytes must be at least 1, got {self.kv_token_bytes}")

    def decode_time(self, shape: StepShape) -> float:
        """Seconds of a decode worker's step, prompt tokens that it computes itself included."""
        return next(self.decode_times(shape))

    def decode_times(self, shape: StepShape) -> Iterator[float]:
        """The same of that step and of those after it. See `sim.cost.UpcomingStepTimes`."""
        return step_times(self.decode, shape, shape.unique_tokens if self.prefix_shared else shape.context_tokens)

    def prefill_time(self, shape: StepShape) -> float:
        return next(step_times(self.prefill, shape, shape.context_tokens))


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """A model's `decode_time`, and the `times` of steps in a row that `sim.cost.times_of` looks for."""

    model: CostModel

    def __call__(self, shape: StepShape) -> float:
        return self.model.decode_time(shape)

    def times(self, shape: StepShape) -> Iterator[float]:
        return self.model.decode_times(shape)


def step_times(costs: StepCoefficients, shape: StepShape, read_tokens: int) -> Iterator[float]:
    """Seconds of a step that reads `read_tokens` tokens of KV, and of those after it: each row has one token more to read
    in each. The formula is the module's."""
    padded = -(-shape.num_new // costs.row_tile) * costs.row_tile
    experts_s = costs.experts.read_s * (1 - (1 - costs.experts.token_share) ** shape.num_new)
    hides = costs.overlaps
    linear_s, weights_s = costs.row_s * padded, costs.weights_s + experts_s
    fixed_s = costs.fixed_s + (max(weights_s, linear_s) if hides else weights_s + linear_s)
    sampling_s, kv_token_s, pair_s = costs.request_s * shape.num_rows, costs.kv_token_s, costs.pair_s
    num_rows, pair_tokens = shape.num_rows, shape.pair_tokens
    while True:
        attention_s, computing_s = kv_token_s * read_tokens, pair_s * pair_tokens
        if not hides:
            attention_s += computing_s
        elif computing_s > attention_s:
            attention_s = computing_s
        yield fixed_s + attention_s + sampling_s
        read_tokens += num_rows
        pair_tokens += num_rows


def save_model(model: CostModel, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def load_model(path: Path) -> CostModel:
    """Raises ConfigError for a file that is no cost model, naming what is wrong with it."""
    try:
        model = msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"{path} is no cost model: {error}") from error
    if model.device not in ("cpu", "cuda"):
        raise ConfigError(f"{path}: device {model.device!r} is neither cpu nor cuda")
    return model
