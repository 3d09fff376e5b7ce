"""A cost model from data sheets: physical bounds, each divided by the share of its rate that is taken to be reached."""

from dataclasses import dataclass

from headstart.config.errors import ConfigError
from headstart.plan.cost import CostModel, Experts, FrontCoefficients, StepCoefficients
from headstart.plan.gpu_specs import Card
from headstart.plan.models import DTYPE_BYTES, ModelShape
from headstart.sim.cost import LinkCost

ALL_REDUCE_S = 7e-6
"""One all-reduce of few rows over NVLink. A tensor-parallel step makes two a layer."""
RESERVED_BYTES = 2e9
"""Of each card, for activations, graphs and the runtime: neither weights nor KV."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """One worker: how many cards share a model, and in which number formats."""

    tp: int = 1
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a data sheet does not say. Shares are of the sheet's rate; None: what the card was measured to reach."""

    bandwidth_share: float | None = None  # of reading weights
    attention_share: float | None = None  # of reading KV; None: as of reading weights
    flops_share: float | None = None
    link_rate: float | None = None  # bytes/s from worker to worker; None: the card's link, a link for each card
    link_latency_s: float = 20e-6
    step_overhead_s: float = 0.5e-3  # c0 without all-reduces: scheduling, planning, launching
    request_overhead_s: float = 4e-6  # c4
    message_s: float = 0.2e-3


NO_ASSUMPTIONS = Assumptions()


@dataclass(frozen=True, slots=True)
class Rates:
    """What one worker reaches."""

    weight_read: float  # bytes/s
    kv_read: float  # bytes/s
    linear_flops: float  # FLOP/s
    attention_flops: float  # FLOP/s
    link: float  # bytes/s


def sheet_model(
    card: Card, model: ModelShape, sharding: Sharding, assumed: Assumptions = NO_ASSUMPTIONS, prefix_shared: bool = True
) -> CostModel:
    """Weights, KV and work are split evenly over a worker's cards. Attention computes in bfloat16 whatever KV's format;
    linear layers compute in the weights' format. Prefill workers never run the output projection."""
    rates = rates_of(card, sharding, assumed)
    return CostModel(
        name=f"{model.name} on {sharding.tp} x {card.name}",
        device="cuda",
        kv_token_bytes=model.kv_bytes_per_token(sharding.kv_dtype),
        decode=_step(model, sharding, rates, assumed, head_params=model.weights.head),
        prefill=_step(model, sharding, rates, assumed, head_params=0),
        link=LinkCost(assumed.link_latency_s, 1 / rates.link),
        front=FrontCoefficients(message_s=assumed.message_s),
        prefix_shared=prefix_shared,
        notes=_notes(card, sharding, rates, assumed),
    )


def rates_of(card: Card, sharding: Sharding, assumed: Assumptions = NO_ASSUMPTIONS) -> Rates:
    """Raises ConfigError for number formats that the sheet has no rate for."""
    for flag, dtype in (("--weight-dtype", sharding.weight_dtype), ("--kv-dtype", sharding.kv_dtype)):
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"{flag} {dtype}: not known; there are {', '.join(DTYPE_BYTES)}")
    tp = sharding.tp
    bandwidth_share = _first(assumed.bandwidth_share, card.bandwidth_share)
    attention_share = _first(assumed.attention_share, bandwidth_share)
    flops_share = _first(assumed.flops_share, card.flops_share)
    linear_flops = card.fp8_flops if sharding.weight_dtype == "fp8" else card.bf16_flops
    return Rates(
        weight_read=tp * card.bandwidth * bandwidth_share,
        kv_read=tp * card.bandwidth * attention_share,
        linear_flops=tp * linear_flops * flops_share,
        attention_flops=tp * card.bf16_flops * flops_share,
        link=_first(assumed.link_rate, tp * card.link * card.link_share),
    )


def pool_tokens(card: Card, model: ModelShape, sharding: Sharding, mem_fraction: float) -> int:
    """Tokens of KV that fit: `mem_fraction` of the cards' memory without weights and what the runtime needs.

    Raises ConfigError where the weights alone do not fit.
    """
    weight_bytes = model.weights.total * DTYPE_BYTES[sharding.weight_dtype]
    free = sharding.tp * (mem_fraction * card.memory_bytes - RESERVED_BYTES) - weight_bytes
    if free <= 0:
        raise ConfigError(
            f"{model.name} takes {weight_bytes / 1e9:.0f} GB in {sharding.weight_dtype} and does not fit "
            f"--tp {sharding.tp} of --card {card.name}; raise --tp or choose --weight-dtype fp8"
        )
    return int(free / model.kv_bytes_per_token(sharding.kv_dtype))


def _step(
    model: ModelShape, sharding: Sharding, rates: Rates, assumed: Assumptions, head_params: int
) -> StepCoefficients:
    weights, num_bytes = model.weights, DTYPE_BYTES[sharding.weight_dtype]
    all_reduces_s = 2 * model.attention.num_layers * ALL_REDUCE_S if sharding.tp > 1 else 0.0
    return StepCoefficients(
        fixed_s=assumed.step_overhead_s + all_reduces_s,
        weights_s=(weights.dense + head_params) * num_bytes / rates.weight_read,
        kv_token_s=model.kv_bytes_per_token(sharding.kv_dtype) / rates.kv_read,
        row_s=2 * (weights.per_token + head_params) / rates.linear_flops,
        request_s=assumed.request_overhead_s,
        pair_s=model.attention.flops_per_pair / rates.attention_flops,
        experts=Experts(weights.experts * num_bytes / rates.weight_read, weights.expert_share),
        overlaps=True,
    )


def _notes(card: Card, sharding: Sharding, rates: Rates, assumed: Assumptions) -> tuple[str, ...]:
    origin = "measured on it" if card.is_measured else "the H100's, this card was not measured"
    return (
        f"{card.name}: data sheet; shares of its rates where not given: {origin}",
        f"weights in {sharding.weight_dtype} read at {rates.weight_read / 1e12:.3g} TB/s, "
        f"KV in {sharding.kv_dtype} at {rates.kv_read / 1e12:.3g} TB/s",
        f"linear layers at {rates.linear_flops / 1e12:.4g} TFLOP/s, attention at {rates.attention_flops / 1e12:.4g} TFLOP/s",
        f"link {rates.link / 1e9:.4g} GB/s after {assumed.link_latency_s * 1e6:.3g} us",
        f"step overhead {assumed.step_overhead_s * 1e3:.3g} ms, {assumed.request_overhead_s * 1e6:.3g} us a request",
    )


def _first(chosen: float | None, otherwise: float) -> float:
    return otherwise if chosen is None else chosen
