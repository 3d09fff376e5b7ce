"""From what a configuration resolves to, the limits of a worker's scheduler. Never imports torch."""

from headstart.config.resolve import PoolPlan, StepPlan
from headstart.scheduler.limits import ANY_TOKEN_ID, DecodeLimits, PrefillLimits


def prefill_limits(step: StepPlan, pool: PoolPlan, vocab_size: int = ANY_TOKEN_ID) -> PrefillLimits:
    return PrefillLimits(
        max_running_requests=step.max_running_requests,
        chunked_prefill_size=step.chunked_prefill_size,
        credit_tokens=step.credit_tokens,
        capacity_tokens=pool.context_len,
        vocab_size=vocab_size,
    )


def decode_limits(step: StepPlan, pool: PoolPlan, vocab_size: int = ANY_TOKEN_ID) -> DecodeLimits:
    return DecodeLimits(
        max_running_requests=step.max_running_requests,
        max_queued_requests=step.max_queued_requests,
        context_len=pool.context_len,
        chunked_prefill_size=step.chunked_prefill_size,
        local_prefill_tokens=step.local_prefill_tokens,
        num_reserved_decode_tokens=step.num_reserved_decode_tokens,
        vocab_size=vocab_size,
        itl_slo_s=step.itl_slo_s,
        max_step_stretch=step.max_step_stretch,
    )
