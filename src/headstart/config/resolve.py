"""Turns "auto" into numbers, once, from what is known about the machine and the model."""

from dataclasses import dataclass

from headstart.config.errors import require
from headstart.config.settings import LEAST_AUTO_PAGE, CacheSettings, StepSettings, TransferSettings, WorkerSettings
from headstart.core.layout import page_floor, pages_for

CHUNK_S = 0.4  # a chunk of --chunked-prefill-size auto aims at this many seconds; half a second is the bound
CHUNK_RANGE = {"cpu": (32, 2048), "cuda": (512, 16384)}
CPU_POOL_CONTEXTS = 4
CPU_POOL_MIN_TOKENS = 32_768


@dataclass(frozen=True)
class DeviceFacts:
    """What a worker finds on its machine."""

    device: str
    """"cpu" or "cuda"."""
    free_bytes: int
    """Memory of the device that is free now."""
    num_sharing: int = 1
    """Workers that take their pool from the same memory."""


@dataclass(frozen=True)
class ModelFacts:
    """What a loaded model tells."""

    max_context_len: int
    """Tokens the model was made for."""
    kv_bytes_per_token: int
    """Bytes that one token of the pool takes: its KV, all layers, and what attention keeps beside the pool for it."""


@dataclass(frozen=True)
class PoolPlan:
    """Size and shape of a worker's pool."""

    page_size: int
    """Tokens of one page."""
    num_pages: int
    """Pages of the pool."""
    context_len: int
    """Longest prompt plus output of one request, in tokens; fits the pool."""
    owner_pages: int | None = None
    """Pages that one tenant may have before its own are evicted first. None: all are alike."""

    @property
    def num_tokens(self) -> int:
        return self.page_size * self.num_pages


@dataclass(frozen=True)
class StepPlan:
    """Bounds of a worker's steps and queues, all in plain numbers."""

    max_running_requests: int
    """Requests in one decode step, or prompts in progress."""
    max_queued_requests: int
    """Requests that may wait."""
    chunked_prefill_size: int
    """Prompt tokens of one step."""
    credit_tokens: int
    """Prompt tokens one decode worker may have open at one prefill worker."""
    local_prefill_tokens: int
    """Tokens of short deltas a decode step may compute."""
    num_reserved_decode_tokens: int
    """Growth set aside for each admitted request, in tokens."""


def threads_for(num_cores: int, num_compute_workers: int) -> int:
    """Threads of one worker's computation when `num_compute_workers` share `num_cores`."""
    return max(1, num_cores // max(1, num_compute_workers))


def resolve_page_size(cache: CacheSettings, device: str) -> int:
    if cache.page_size != "auto":
        return cache.page_size
    return 64 if device == "cuda" else LEAST_AUTO_PAGE


def resolve_verify(transfer: TransferSettings, device: str) -> bool:
    """Whether a decode worker on `device` verifies the pages that it is sent."""
    return transfer.verify_transfers == "on" or (transfer.verify_transfers == "auto" and device == "cpu")


def resolve_pool(settings: WorkerSettings, facts: DeviceFacts, model: ModelFacts) -> PoolPlan:
    """Choose page size, pool size and context. Raises ConfigError where the pool cannot hold two pages."""
    page_size = resolve_page_size(settings.cache, facts.device)
    wanted = settings.model.context_length
    context_len = model.max_context_len if wanted == "auto" else wanted
    require(
        context_len <= model.max_context_len,
        f"--context-length {context_len} is more than the model's {model.max_context_len}",
    )
    num_tokens = _pool_tokens(settings.cache, facts, model, context_len)
    num_pages = page_floor(num_tokens, page_size) // page_size
    require(num_pages >= 2, _too_few_pages(settings.cache, facts, num_tokens, page_size))
    share = settings.cache.tenant_cache_share
    owner_pages = max(1, int(num_pages * share)) if share < 1 else None
    return PoolPlan(page_size, num_pages, min(context_len, num_pages * page_size), owner_pages)


def _too_few_pages(cache: CacheSettings, facts: DeviceFacts, num_tokens: int, page_size: int) -> str:
    pages = f"fewer than two pages of --page-size {page_size}"
    if cache.max_total_tokens != "auto":
        return f"--max-total-tokens {num_tokens} is {pages}"
    return (
        f"{facts.free_bytes >> 20} MiB are left for the KV pools of {facts.num_sharing} workers beside their weights: "
        f"a pool of {num_tokens} tokens, {pages}; give more memory or fewer workers, or raise --mem-fraction-static"
    )


def _pool_tokens(cache: CacheSettings, facts: DeviceFacts, model: ModelFacts, context_len: int) -> int:
    if cache.max_total_tokens != "auto":
        return cache.max_total_tokens
    fraction = cache.mem_fraction_static
    if fraction == "auto":
        fraction = 0.85 if facts.device == "cuda" else 0.4
    affordable = int(facts.free_bytes * fraction / max(1, facts.num_sharing)) // model.kv_bytes_per_token
    if facts.device == "cuda" or cache.mem_fraction_static != "auto":
        return affordable
    return min(affordable, max(CPU_POOL_MIN_TOKENS, CPU_POOL_CONTEXTS * context_len))


def resolve_step(settings: StepSettings, reserved: int, pool: PoolPlan, device: str, tokens_per_s: float) -> StepPlan:
    """Choose the bounds of steps. `tokens_per_s`: prompt tokens this worker computes per second, as measured."""
    running = settings.max_running_requests
    if running == "auto":
        running = 256 if device == "cuda" else 64
    chunk = settings.chunked_prefill_size
    if chunk == "auto":
        chunk = auto_chunk(tokens_per_s, pool.page_size, device)
    credit = settings.max_prefill_tokens
    if credit == "auto":
        most: int = min(pool.num_tokens, 4 * pool.context_len)
        credit = most
    local = settings.local_prefill_tokens
    if local == "auto":
        local = 256 if device == "cuda" else pool.page_size
    return StepPlan(
        max_running_requests=running,
        max_queued_requests=settings.max_queued_requests,
        chunked_prefill_size=chunk,
        credit_tokens=credit,
        local_prefill_tokens=local,
        num_reserved_decode_tokens=reserved,
    )


def auto_chunk(tokens_per_s: float, page_size: int, device: str) -> int:
    """Whole pages of prompt that take about CHUNK_S, within the device's range."""
    least, most = CHUNK_RANGE[device]
    tokens = min(max(int(tokens_per_s * CHUNK_S), least), most)
    if tokens == least:
        return pages_for(tokens, page_size) * page_size
    return max(page_size, page_floor(tokens, page_size))
