"""From options to a cluster: the cost model, and the sizes and limits of its workers."""

from dataclasses import dataclass, replace
from pathlib import Path

from headstart.config.errors import ConfigError, require
from headstart.config.resolve import PoolPlan, StepPlan, resolve_page_size, resolve_step
from headstart.config.settings import CacheSettings, StepSettings
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import POLICIES
from headstart.plan.calibrate import calibrate
from headstart.plan.cost import CostModel, DecodeCost, load_model
from headstart.plan.gpu_specs import card_named
from headstart.plan.models import model_named
from headstart.plan.options import Auto, CostOptions, DeploymentOptions, LimitOptions, SheetOptions
from headstart.plan.roofline import Assumptions, Sharding, pool_tokens, sheet_model
from headstart.sim.cost import StepShape
from headstart.sim.spec import ClusterSpec, Modelling, Timing
from headstart.worker.limits import decode_limits, prefill_limits

MAX_UNFINISHED = 1 << 20
"""The simulated gateway takes whatever the workload sends."""
VOCAB_SIZE = 30_000
TRIAL_CHUNK = 2048
"""Tokens of the chunk by which a prefill worker's speed is judged, as a real worker does when it starts."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What workers run on. None where the costs do not tell."""

    costs: CostModel
    pool_tokens: int | None = None
    context_len: int | None = None
    page_size: int | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster to simulate."""

    costs: CostModel
    spec: ClusterSpec
    caches_on_decode: bool = True
    request_timeout_s: float = 3600.0


def deployment_of(options: DeploymentOptions) -> Deployment:
    """Everything resolved. Raises ConfigError."""
    cluster, limits = options.cluster, options.limits
    chunk = limits.chunked_prefill_size
    chunk_tokens = None if chunk == "auto" else chunk
    hardware = hardware_of(options.cost, options.sheet_rates, cluster.mem_fraction_static, chunk_tokens)
    if cluster.naive_attention:
        hardware = replace(hardware, costs=replace(hardware.costs, prefix_shared=False))
    return Deployment(
        hardware.costs,
        cluster_spec(hardware, options),
        caches_on_decode=cluster.cache == "both" and not cluster.disable_radix_cache,
        request_timeout_s=limits.request_timeout,
    )


def hardware_of(
    cost: CostOptions, rates: SheetOptions, mem_fraction: float, chunk_tokens: int | None = None
) -> Hardware:
    """From measurements (of prefill steps of up to `chunk_tokens`), from a file of coefficients, or from a card's data sheet
    and a model's shape."""
    if cost.calibrate:
        found = calibrate(Path(cost.calibrate), chunk_tokens)
        return Hardware(found.costs, context_len=found.context_len, page_size=found.page_size)
    if cost.sheet:
        return Hardware(load_model(Path(cost.sheet)))
    card, model = card_named(cost.card or "H100"), model_named(cost.model or "Qwen3-8B")
    sharding = Sharding(cost.tp, cost.weight_dtype, cost.kv_dtype)
    pool = pool_tokens(card, model, sharding, mem_fraction)
    return Hardware(sheet_model(card, model, sharding, assumptions(rates)), pool, model.context_len)


def assumptions(rates: SheetOptions) -> Assumptions:
    return Assumptions(
        bandwidth_share=_number(rates.bandwidth_share),
        attention_share=_number(rates.attention_share),
        flops_share=_number(rates.compute_share),
        link_rate=None if rates.link_gb_s == "auto" else rates.link_gb_s * 1e9,
        link_latency_s=rates.link_latency_us / 1e6,
        step_overhead_s=rates.step_overhead_ms / 1e3,
        request_overhead_s=rates.request_overhead_us / 1e6,
        message_s=rates.message_ms / 1e3,
    )


def cluster_spec(hardware: Hardware, options: DeploymentOptions) -> ClusterSpec:
    """Workers with the limits that real ones on such a device would resolve."""
    costs, cluster, limits = hardware.costs, options.cluster, options.limits
    page_size = _page_size(cluster.page_size, hardware)
    decode_tokens = _pool(cluster.pool_tokens, hardware.pool_tokens)
    prefill_tokens = _pool(cluster.prefill_pool_tokens, decode_tokens)
    decode = _pool_plan("--pool-tokens", decode_tokens, page_size, limits, hardware.context_len)
    prefill = _pool_plan("--prefill-pool-tokens", prefill_tokens, page_size, limits, hardware.context_len)
    message_s = costs.front.message_s
    return ClusterSpec(
        num_prefill=options.workers.num_prefill,
        num_decode=options.workers.num_decode,
        page_size=page_size,
        vocab_size=VOCAB_SIZE,
        prefill_pages=prefill.num_pages,
        decode_pages=decode.num_pages,
        prefill=prefill_limits(_steps(limits, prefill, costs), prefill),
        decode=decode_limits(_steps(limits, decode, costs), decode),
        make_policy=POLICIES[limits.load_balance_method],
        dispatch=DispatchLimits(max_unfinished=MAX_UNFINISHED),
        timing=Timing(
            control_delay_s=(message_s, message_s),
            link=costs.link,
            prefill_cost=costs.prefill_time,
            decode_cost=DecodeCost(costs),
        ),
        modelling=Modelling(
            "none",
            page_bytes=page_size * costs.kv_token_bytes,
            cacheable_calls=not cluster.disable_radix_cache,
            jumps=True,
        ),
        verify_transfers=False,
    )


def tokens_per_s(costs: CostModel) -> float:
    """Prompt tokens that a prefill worker computes per second, in chunks of an empty context."""
    n = TRIAL_CHUNK
    return n / costs.prefill_time(StepShape(0, n, n, n, n * (n + 1) // 2))


def _page_size(wanted: int | Auto, hardware: Hardware) -> int:
    if wanted == "auto" and hardware.page_size is not None:
        return hardware.page_size
    return resolve_page_size(CacheSettings(page_size=wanted), hardware.costs.device)


def _pool(wanted: int | str, known: int | None) -> int:
    if isinstance(wanted, int):
        return wanted
    if known is None:
        raise ConfigError("--pool-tokens is needed: a file of coefficients does not say how much KV a worker holds")
    return known


def _pool_plan(flag: str, tokens: int, page_size: int, limits: LimitOptions, model_len: int | None) -> PoolPlan:
    num_pages = tokens // page_size
    require(num_pages >= 2, f"{flag} {tokens} is fewer than two pages of --page-size {page_size}")
    wanted = limits.context_length
    if wanted != "auto" and model_len is not None:
        require(wanted <= model_len, f"--context-length {wanted} is more than the model's {model_len}")
    most = num_pages * page_size
    return PoolPlan(page_size, num_pages, min(most, (model_len or most) if wanted == "auto" else wanted))


def _steps(limits: LimitOptions, pool: PoolPlan, costs: CostModel) -> StepPlan:
    settings = StepSettings(
        max_running_requests=limits.max_running_requests,
        max_queued_requests=limits.max_queued_requests,
        chunked_prefill_size=limits.chunked_prefill_size,
        max_prefill_tokens=limits.max_prefill_tokens,
        local_prefill_tokens=limits.local_prefill_tokens,
    )
    return resolve_step(settings, limits.num_reserved_decode_tokens, pool, costs.device, tokens_per_s(costs))


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else value
