"""The two generating endpoints: checks a body and prepares the spec."""

import time
from typing import Any

from headstart.gateway.api.auth import Tenant
from headstart.gateway.api.errors import ApiError, invalid
from headstart.gateway.api.params import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    Common,
    output_budget,
    read_common,
    stop_criteria,
)
from headstart.gateway.api.prompts import encode, read_prompts, render_chat
from headstart.gateway.api.respond import Prepared
from headstart.gateway.api.response_format import ChatFormat, CompletionFormat, ResponseEnvelope
from headstart.gateway.api.validate import Fields
from headstart.gateway.generation import GenerationSpec
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import ChoiceOutput

COMPLETION_DEFAULT_TOKENS = 16
MAX_SALT_LEN = 1024


async def prepare_chat(state: GatewayState, body: dict[str, Any], tenant: Tenant) -> Prepared:
    fields = Fields(body)
    common = _read(state, fields)
    namespace = tenant.namespace(_client_salt(fields))
    render = render_chat(fields, state.model)
    recalled = state.memory.recall(namespace, render)
    rest = await encode(state.model.tokenizer, render[recalled.num_chars :], add_special_tokens=False, name="messages")
    prompt = recalled.ids + rest
    names = ("max_completion_tokens", "max_tokens")
    max_tokens = output_budget(fields, names, len(prompt), state.context_len, None)
    top_logprobs = _chat_logprobs(fields)
    spec = _spec(common, (prompt,), max_tokens, namespace, top_logprobs)

    def remember(answer: ChoiceOutput) -> None:
        state.memory.remember(namespace, render, prompt, "".join(answer.text), answer.token_ids)

    envelope = _envelope(state, "chatcmpl", common, spec)
    return Prepared(
        envelope.response_id,
        "chat",
        spec,
        common,
        ChatFormat(envelope, state.model.tokenizer),
        {"remembered_tokens": len(recalled.ids), "text_divergence": recalled.divergence},
        remember,
    )


async def prepare_completion(state: GatewayState, body: dict[str, Any], tenant: Tenant) -> Prepared:
    fields = Fields(body)
    common = _read(state, fields)
    namespace = tenant.namespace(_client_salt(fields))
    prompts = await read_prompts(fields, state.model, MAX_CHOICES)
    if len(prompts) * common.num_choices > MAX_CHOICES:
        raise invalid(f"'n' times the number of prompts must be at most {MAX_CHOICES}", "n", "invalid_value")
    longest = max(map(len, prompts))
    names = ("max_tokens",)
    max_tokens = output_budget(fields, names, longest, state.context_len, COMPLETION_DEFAULT_TOKENS)
    top_logprobs = None
    if fields.has("logprobs") and fields.raw("logprobs") is not False:
        top_logprobs = fields.integer("logprobs", 0, 0, MAX_TOP_LOGPROBS)
    spec = _spec(common, prompts, max_tokens, namespace, top_logprobs)
    envelope = _envelope(state, "cmpl", common, spec)
    format = CompletionFormat(envelope, state.model.tokenizer)
    return Prepared(envelope.response_id, "completions", spec, common, format)


def check_model(state: GatewayState, fields: Fields) -> None:
    name = fields.text("model", state.model.name)
    if name != state.model.name:
        message = f"the model {name[:200]!r} is not served here; {state.model.name!r} is"
        raise ApiError(404, message, "model", "model_not_found")


def _read(state: GatewayState, fields: Fields) -> Common:
    check_model(state, fields)
    return read_common(fields, state.model.bounds, state.rng, state.limits.request_timeout_s)


def _client_salt(fields: Fields) -> str:
    return fields.text("cache_salt", max_len=MAX_SALT_LEN)


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if num_top and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs", "invalid_value")
    return num_top if wanted else None


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
        skip_special_tokens=common.skip_special_tokens,
    )


def _envelope(state: GatewayState, prefix: str, common: Common, spec: GenerationSpec) -> ResponseEnvelope:
    return ResponseEnvelope(
        response_id=f"{prefix}-{state.rng.getrandbits(128):032x}",
        created=int(time.time()),
        model=state.model.name,
        prompts=spec.prompts,
        num_choices=spec.num_choices,
        return_token_ids=common.return_token_ids,
        with_logprobs=spec.num_top_logprobs is not None,
    )
