"""What a request cost, in OpenAI's fields and ours."""

from collections.abc import Sequence
from typing import Any

from headstart.gateway.generation import GenerationSpec
from headstart.gateway.stream import Done


def build_usage(spec: GenerationSpec, ends: Sequence[Done], extra: dict[str, Any]) -> dict[str, Any]:
    """`cached_tokens`: prompt tokens whose KV was not computed for this request, so of sibling choices the least."""
    prompt_tokens = sum(map(len, spec.prompts))
    completion_tokens = sum(end.num_tokens for end in ends)
    cached = sum(min(_least(ends, prompt, spec.num_choices), len(tokens)) for prompt, tokens in enumerate(spec.prompts))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "headstart": {**_costs(ends), **extra},
    }


def _least(ends: Sequence[Done], prompt: int, num_choices: int) -> int:
    mine = (end.stats.cached_tokens for end in ends if end.choice // num_choices == prompt)
    return min(mine, default=0)


def _costs(ends: Sequence[Done]) -> dict[str, Any]:
    """Of one choice as it is; of several: prefixes of the first, sums of the rest."""
    if not ends:
        return {}
    first = min(ends, key=lambda end: end.choice).stats
    return {
        "decode_prefix_len": first.decode_prefix_len,
        "prefill_prefix_len": first.prefill_prefix_len,
        "bytes_moved": sum(end.stats.bytes_moved for end in ends),
        "miss_reason": first.miss_reason,
        "num_retractions": sum(end.stats.num_retractions for end in ends),
        "num_attempts": max(end.num_attempts for end in ends),
        "stage_s": {stage: round(seconds, 6) for stage, seconds in first.stage_s.items()},
    }
