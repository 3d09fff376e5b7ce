"""What a request cost, in OpenAI's fields and ours."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from headstart.gateway.api.response_bodies import AnswerUsage, PromptTokensDetails, UsageDetails
from headstart.gateway.generation import GenerationSpec
from headstart.gateway.stream import Done


class MemoryUsage(NamedTuple):
    """What a chat took from the gateway's token memory; unset where there is none."""

    remembered_tokens: int | UnsetType = UNSET
    text_divergence: int | UnsetType | None = UNSET


def build_usage(spec: GenerationSpec, ends: Sequence[Done], memory: MemoryUsage) -> AnswerUsage:
    """`cached_tokens`: prompt tokens whose KV was not computed for this request, so of sibling choices the least."""
    prompt_tokens = sum(map(len, spec.prompts))
    completion_tokens = sum(end.num_tokens for end in ends)
    cached = sum(_least(ends, prompt, spec.num_choices) for prompt in range(len(spec.prompts)))
    return AnswerUsage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached),
        _details(ends, memory),
    )


def usage_so_far(spec: GenerationSpec, num_tokens: int) -> AnswerUsage:
    """Of a stream that goes on: what was cached is not known yet."""
    prompt_tokens = sum(map(len, spec.prompts))
    return AnswerUsage(prompt_tokens, num_tokens, prompt_tokens + num_tokens)


def _least(ends: Sequence[Done], prompt: int, num_choices: int) -> int:
    mine = (end.stats.cached_tokens for end in ends if end.choice // num_choices == prompt)
    return min(mine, default=0)


def _details(ends: Sequence[Done], memory: MemoryUsage) -> UsageDetails:
    """Of one choice as it is; of several: prefixes of the first, sums of the rest."""
    if not ends:
        return UsageDetails(remembered_tokens=memory.remembered_tokens, text_divergence=memory.text_divergence)
    first = min(ends, key=lambda end: end.choice).stats
    return UsageDetails(
        decode_prefix_len=first.decode_prefix_len,
        prefill_prefix_len=first.prefill_prefix_len,
        bytes_moved=sum(end.stats.bytes_moved for end in ends),
        miss_reason=first.miss_reason,
        num_retractions=sum(end.stats.num_retractions for end in ends),
        num_attempts=max(end.num_attempts for end in ends),
        stage_s={stage: round(seconds, 6) for stage, seconds in first.stage_s.items()},
        remembered_tokens=memory.remembered_tokens,
        text_divergence=memory.text_divergence,
    )
