"""The two generating endpoints: checks a body and prepares the generation."""

import time

from headstart.gateway.api.auth import Tenant
from headstart.gateway.api.body_reader import Received
from headstart.gateway.api.errors import ApiError, invalid
from headstart.gateway.api.output_budget import Wanted, output_budget
from headstart.gateway.api.params import Common, read_common, stop_criteria
from headstart.gateway.api.prepared import Prepared
from headstart.gateway.api.prompts import encode, read_prompts, render_chat
from headstart.gateway.api.request_bodies import (
    COMPLETION_DEFAULT_TOKENS,
    MAX_TOP_LOGPROBS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from headstart.gateway.api.response_format import ChatFormat, CompletionFormat, ResponseEnvelope
from headstart.gateway.api.usage import MemoryUsage
from headstart.gateway.api.validation import Problems
from headstart.gateway.generation import GenerationSpec
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import ChoiceOutput
from headstart.gateway.token_memory import Recalled


async def prepare_chat(state: GatewayState, received: Received, tenant: Tenant) -> Prepared:
    body = received.as_struct(ChatBody)
    common = _read(state, body)
    top_logprobs = _chat_logprobs(body)
    namespace = tenant.namespace(body.cache_salt)
    render = render_chat(body, state.model)
    special = body.add_special_tokens is True
    recalled = Recalled([]) if special else state.memory.recall(namespace, render)  # it has no special tokens in front
    rest = await encode(
        state.model.tokenizer, render[recalled.num_chars :], add_special_tokens=special, name="messages"
    )
    prompt = recalled.ids + rest
    is_new_name = body.max_completion_tokens is not None
    wanted = Wanted(
        "max_completion_tokens" if is_new_name else "max_tokens", body.max_completion_tokens or body.max_tokens
    )
    max_tokens = output_budget("messages", len(prompt), wanted, state.context_limit)
    spec = _spec(common, (prompt,), max_tokens, namespace, top_logprobs)

    def remember(answer: ChoiceOutput) -> None:
        if not special:
            state.memory.remember(namespace, render, prompt, "".join(answer.text), answer.token_ids)

    envelope = _envelope(state, "chatcmpl", common, spec)
    return Prepared(
        envelope.response_id,
        "chat",
        spec,
        common.output,
        ChatFormat(envelope, state.model.tokenizer),
        MemoryUsage(len(recalled.ids), recalled.divergence),
        remember,
    )


async def prepare_completion(state: GatewayState, received: Received, tenant: Tenant) -> Prepared:
    body = received.as_struct(CompletionBody)
    common = _read(state, body)
    top_logprobs = _completion_logprobs(body)
    prompts = await read_prompts(body, state.model)
    wanted = Wanted("max_tokens", body.max_tokens, COMPLETION_DEFAULT_TOKENS)
    max_tokens = output_budget("prompt", max(map(len, prompts)), wanted, state.context_limit)
    spec = _spec(common, prompts, max_tokens, tenant.namespace(body.cache_salt), top_logprobs)
    envelope = _envelope(state, "cmpl", common, spec)
    response_format = CompletionFormat(envelope, state.model.tokenizer)
    return Prepared(envelope.response_id, "completions", spec, common.output, response_format, MemoryUsage())


def check_model(state: GatewayState, body: GenerationBody | TokenizeBody) -> None:
    if body.model and body.model != state.model.name:
        message = f"the model {body.model[:200]!r} is not served here; {state.model.name!r} is"
        raise ApiError(404, message, "model", "model_not_found")


def _read(state: GatewayState, body: GenerationBody) -> Common:
    check_model(state, body)
    return read_common(body, state.model, state.rng, state.limits.request_timeout_s)


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs", "invalid_value")
    return body.top_logprobs if body.logprobs else None


def _completion_logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is True:
        problems = Problems()
        problems.must_be("logprobs", f"an integer from 0 to {MAX_TOP_LOGPROBS} or false", True)
        problems.refuse()
    return None if isinstance(body.logprobs, bool) else body.logprobs


def _spec(
    common: Common, prompts: tuple[list[int], ...], max_tokens: int, namespace: bytes, top_logprobs: int | None
) -> GenerationSpec:
    return GenerationSpec(
        prompts=prompts,
        num_choices=common.num_choices,
        sampling=common.sampling,
        stop=stop_criteria(common, max_tokens),
        rules=common.rules,
        namespace=namespace,
        deadline_s=common.deadline_s,
        num_top_logprobs=top_logprobs,
        skip_special_tokens=common.output.skip_special_tokens,
    )


def _envelope(state: GatewayState, prefix: str, common: Common, spec: GenerationSpec) -> ResponseEnvelope:
    return ResponseEnvelope(
        response_id=f"{prefix}-{state.rng.getrandbits(128):032x}",
        created=int(time.time()),
        model=state.model.name,
        prompts=spec.prompts,
        num_choices=spec.num_choices,
        return_token_ids=common.output.return_token_ids,
        with_logprobs=spec.num_top_logprobs is not None,
    )
