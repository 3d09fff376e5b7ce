"""Every field that OpenAI, vLLM or SGLang know for our routes, and what becomes of it here.

built      a field of a struct in `request_bodies`
accepted   it has no effect on the answer, whatever it holds
refused    it would change the answer and is not built: 400, unless its value means the same as leaving it out
typo       nobody knows the name, but it is within a letter or two of one that the route takes: 400
unknown    served all the same, logged, and named in the answer's `x-headstart-ignored-fields`; 400 with --strict-fields
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import fields as struct_fields

from headstart.gateway.api.request_bodies import ChatBody, ChatMessage, CompletionBody, StreamOptions, TokenizeBody
from headstart.gateway.api.validation import Problems

OPENAI, VLLM, SGLANG = "OpenAI", "vLLM", "SGLang"
MAX_NAME_LEN = 64  # of a name that is looked at for typos, logged or sent back
MAX_NAMED = 16  # unknown fields that are looked at for typos, and named in the log and the header


@dataclass(frozen=True, slots=True)
class UnbuiltField:
    """A field that is known elsewhere. `neutral` values mean the same as leaving it out."""

    name: str
    known_to: tuple[str, ...]
    neutral: tuple[Any, ...] = ()
    note: str = ""


ACCEPTED = (
    UnbuiltField("user", (OPENAI, VLLM, SGLANG), note="names the client's end user"),
    UnbuiltField("metadata", (OPENAI,), note="kept by nobody"),
    UnbuiltField("store", (OPENAI,), note="nothing is stored"),
    UnbuiltField("service_tier", (OPENAI,), note="there is one tier"),
    UnbuiltField("safety_identifier", (OPENAI,), note="names the client's end user"),
    UnbuiltField("prompt_cache_key", (OPENAI,), note="prefixes are found without it"),
    UnbuiltField("prompt_cache_retention", (OPENAI,), note="pages stay until others need the room"),
    UnbuiltField("parallel_tool_calls", (OPENAI, VLLM, SGLANG), note="there are no tool calls"),
    UnbuiltField("request_id", (VLLM,), note="the `x-request-id` header names a request"),
    UnbuiltField("rid", (SGLANG,), note="the `x-request-id` header names a request"),
    UnbuiltField("session_id", (VLLM, SGLANG), note="turns are found by their tokens"),
    UnbuiltField("include_reasoning", (VLLM,), note="there is no reasoning parser: all text is content"),
    UnbuiltField("separate_reasoning", (SGLANG,), note="there is no reasoning parser: all text is content"),
    UnbuiltField("stream_reasoning", (SGLANG,), note="there is no reasoning parser: all text is content"),
    UnbuiltField("bootstrap_host", (SGLANG,), note="sent by sglang-router; workers find each other"),
    UnbuiltField("bootstrap_port", (SGLANG,), note="sent by sglang-router; workers find each other"),
    UnbuiltField("bootstrap_room", (SGLANG,), note="sent by sglang-router; workers find each other"),
    UnbuiltField("data_parallel_rank", (SGLANG,), note="the gateway picks the workers"),
    UnbuiltField("routed_dp_rank", (SGLANG,), note="the gateway picks the workers"),
    UnbuiltField("disagg_prefill_dp_rank", (SGLANG,), note="the gateway picks the workers"),
    UnbuiltField("custom_labels", (SGLANG,), note="labels of SGLang's metrics"),
    UnbuiltField("log_metrics", (SGLANG,), note="metrics count every request"),
    UnbuiltField("no_logs", (SGLANG,), note="prompts are never logged"),
    UnbuiltField("stream_interval", (VLLM,), note="each step is sent as it comes"),
    UnbuiltField("return_token_offsets", (VLLM,), note="of vLLM's render endpoints"),
    UnbuiltField("return_mm_kwargs", (VLLM,), note="of vLLM's render endpoints"),
    UnbuiltField("routed_experts_prompt_start", (VLLM,), note="means nothing without `return_routed_experts`"),
    UnbuiltField("routed_experts_start_len", (SGLANG,), note="means nothing without `return_routed_experts`"),
)
"""What has no effect on the answer."""

REFUSED = (
    UnbuiltField("tools", (OPENAI, VLLM, SGLANG), ([],)),
    UnbuiltField("tool_choice", (OPENAI, VLLM, SGLANG), ("none", "auto")),
    UnbuiltField("functions", (OPENAI,), ([],)),
    UnbuiltField("function_call", (OPENAI,), ("none", "auto")),
    UnbuiltField("response_format", (OPENAI, VLLM, SGLANG), ({"type": "text"},)),
    UnbuiltField("modalities", (OPENAI,), (["text"],)),
    UnbuiltField("audio", (OPENAI,)),
    UnbuiltField("prediction", (OPENAI,)),
    UnbuiltField("web_search_options", (OPENAI,)),
    UnbuiltField("moderation", (OPENAI,)),
    UnbuiltField("verbosity", (OPENAI,), ("medium",)),
    UnbuiltField(
        "reasoning_effort", (OPENAI, VLLM, SGLANG), note="a template's own switch goes in `chat_template_kwargs`"
    ),
    UnbuiltField("reasoning", (SGLANG,), ({},), note="a template's own switch goes in `chat_template_kwargs`"),
    UnbuiltField("thinking_token_budget", (VLLM,), (-1,)),
    UnbuiltField("echo", (OPENAI, VLLM, SGLANG), (False,)),
    UnbuiltField("best_of", (OPENAI, SGLANG), (1,)),
    UnbuiltField("suffix", (OPENAI, VLLM, SGLANG), ("",)),
    UnbuiltField("use_beam_search", (VLLM,), (False,)),
    UnbuiltField("length_penalty", (VLLM,), (1, 1.0)),
    UnbuiltField("watermarking", (VLLM,), (False,)),
    UnbuiltField("repetition_detection", (VLLM,)),
    UnbuiltField("spaces_between_special_tokens", (VLLM,), (True,)),
    UnbuiltField("truncate_prompt_tokens", (VLLM,)),
    UnbuiltField("truncation_side", (VLLM,), note="means nothing without `truncate_prompt_tokens`"),
    UnbuiltField("prompt_logprobs", (VLLM,)),
    UnbuiltField("input_logprobs", (SGLANG,), (False,)),
    UnbuiltField("logprob_token_ids", (VLLM,)),
    UnbuiltField("return_tokens_as_token_ids", (VLLM,), (False,), note="`return_token_ids` has the ids"),
    UnbuiltField("return_token_strs", (VLLM,), (False,)),
    UnbuiltField("return_prompt_text", (VLLM,), (False,)),
    UnbuiltField("return_prompt_token_ids", (SGLANG,), (False,), note="`return_token_ids` has them"),
    UnbuiltField("return_cached_tokens_details", (SGLANG,), (False,), note="`usage.headstart` has them"),
    UnbuiltField("return_meta_info", (SGLANG,), (False,)),
    UnbuiltField("return_hidden_states", (SGLANG,), (False,)),
    UnbuiltField("return_routed_experts", (SGLANG,), (False,)),
    UnbuiltField("return_text_in_logprobs", (SGLANG,), (False, True), note="logprobs have the tokens' text"),
    UnbuiltField("return_bytes", (SGLANG,), (False,)),
    UnbuiltField("return_entropy", (SGLANG,), (False,)),
    UnbuiltField("background", (SGLANG,), (False,)),
    UnbuiltField("structured_outputs", (VLLM,)),
    UnbuiltField("structural_tag", (VLLM, SGLANG)),
    UnbuiltField("guided_json", (VLLM,)),
    UnbuiltField("guided_regex", (VLLM,)),
    UnbuiltField("guided_choice", (VLLM,)),
    UnbuiltField("guided_grammar", (VLLM,)),
    UnbuiltField("guided_decoding_backend", (VLLM,)),
    UnbuiltField("guided_whitespace_pattern", (VLLM,)),
    UnbuiltField("json_schema", (SGLANG,)),
    UnbuiltField("regex", (SGLANG,)),
    UnbuiltField("ebnf", (SGLANG,)),
    UnbuiltField("stop_regex", (SGLANG,), ("", [])),
    UnbuiltField("no_stop_trim", (SGLANG,), (False,), note="`include_stop_str_in_output` does this"),
    UnbuiltField("logits_processors", (VLLM,), ([],)),
    UnbuiltField("custom_logit_processor", (SGLANG,)),
    UnbuiltField("custom_params", (SGLANG,), ({},)),
    UnbuiltField("vllm_xargs", (VLLM,), ({},)),
    UnbuiltField("kv_transfer_params", (VLLM,), ({},), note="workers move KV by themselves"),
    UnbuiltField("ec_transfer_params", (VLLM,), ({},)),
    UnbuiltField("prompt_embeds", (VLLM,)),
    UnbuiltField("input_ids", (SGLANG,), note="/v1/completions takes ids as its `prompt`"),
    UnbuiltField("input_embeds", (SGLANG,)),
    UnbuiltField("chat_template", (VLLM,)),
    UnbuiltField("continue_final_message", (VLLM, SGLANG), (False,)),
    UnbuiltField("documents", (VLLM,), ([],)),
    UnbuiltField("task", (SGLANG,)),
    UnbuiltField("mm_processor_kwargs", (VLLM,), ({},)),
    UnbuiltField("media_io_kwargs", (VLLM,), ({},)),
    UnbuiltField("images_config", (SGLANG,), ({},)),
    UnbuiltField("max_dynamic_patch", (SGLANG,)),
    UnbuiltField("min_dynamic_patch", (SGLANG,)),
    UnbuiltField("use_audio_in_video", (SGLANG,), (False,)),
    UnbuiltField("lora_path", (SGLANG,)),
    UnbuiltField("session_params", (SGLANG,), ({},)),
    UnbuiltField("priority", (VLLM, SGLANG), (0,), note="requests are served in the order of their arrival"),
    UnbuiltField("extra_key", (SGLANG,), note="`cache_salt` divides the cache"),
    UnbuiltField("ngram_corpus_id", (SGLANG,)),
)
"""What would change the answer, and is not built."""

REFUSED_IN_MESSAGES = (
    UnbuiltField("tool_calls", (OPENAI, VLLM, SGLANG), ([],)),
    UnbuiltField("function_call", (OPENAI,)),
    UnbuiltField("tool_call_id", (OPENAI, VLLM, SGLANG)),
    UnbuiltField("audio", (OPENAI,)),
    UnbuiltField("tools", (SGLANG,), ([],)),
)
ACCEPTED_IN_MESSAGES = frozenset({"refusal", "annotations", "reasoning", "id"})
"""What clients send back of an assistant's message."""

_ACCEPTED = {known.name for known in ACCEPTED}
_REFUSED = {known.name: known for known in REFUSED}
_REFUSED_IN_MESSAGES = {known.name: known for known in REFUSED_IN_MESSAGES}
_ROUTES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
}
_EMPTY: tuple[Any, ...] = ([], {}, "", False)


def built(kind: type[Struct]) -> frozenset[str]:
    """Names of a struct's fields, as they are sent."""
    return frozenset(info.encode_name for info in struct_fields(kind))


_STRUCTS: tuple[type[Struct], ...] = (*_ROUTES.values(), ChatMessage, StreamOptions)
_BUILT = {kind: built(kind) for kind in _STRUCTS}


def check_names(kind: type[Struct], body: Mapping[str, Any], problems: Problems) -> list[str]:
    """Note in `problems` which fields cannot be served. Returns the names that nobody knows."""
    unknown: list[str] = []
    own = _BUILT[kind]
    for name, value in body.items():
        if name in own or name in _ACCEPTED or value is None:
            continue
        if (known := _REFUSED.get(name)) is not None:
            _check_neutral(known, name, value, problems)
        elif (route := _other_route(kind, name)) is not None:
            if kind is not TokenizeBody and not _is_one_of(value, _EMPTY):
                problems.add(name, f"'{name}' is a field of {route}", "unsupported_parameter")
        elif len(unknown) < MAX_NAMED and (meant := typo_of(name, (*own, *_ACCEPTED, *_REFUSED))) is not None:
            problems.add(name, f"there is no field '{name}': did you mean '{meant}'?", "unknown_parameter")
        else:
            unknown.append(name)
    return [*unknown, *_check_options(body, problems), *_check_messages(body, problems)]


def note_unknown(names: Iterable[str], problems: Problems) -> None:
    for name in names:
        problems.add(name, f"there is no field '{printable(name)}' (--strict-fields)", "unknown_parameter")


def printable(name: str) -> str:
    """A name that a client chose, for logs and headers: what is no plain ASCII is percent-encoded."""
    return quote(name[:MAX_NAME_LEN], safe="[]", errors="backslashreplace") or '""'


def ignored_header(names: list[str]) -> str:
    """The value of `x-headstart-ignored-fields`."""
    shown = [printable(name) for name in names[:MAX_NAMED]]
    return ", ".join([*shown, *(["..."] if len(names) > MAX_NAMED else [])])


def _check_neutral(known: UnbuiltField, param: str, value: Any, problems: Problems) -> None:
    if not _is_one_of(value, known.neutral):
        note = f": {known.note}" if known.note else ""
        problems.add(param, f"'{param}' is not supported{note}", "unsupported_parameter")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == other and type(value) is type(other) for other in values)


def _other_route(kind: type[Struct], name: str) -> str | None:
    return next((route for route, other in _ROUTES.items() if other is not kind and name in _BUILT[other]), None)


def _check_options(body: Mapping[str, Any], problems: Problems) -> Iterator[str]:
    options = body.get("stream_options")
    if not isinstance(options, dict):
        return
    own = _BUILT[StreamOptions]
    for name in options:
        if name in own:
            continue
        if len(options) <= MAX_NAMED and (meant := typo_of(name, own)) is not None:
            param = f"stream_options.{name}"
            problems.add(param, f"there is no field '{param}': did you mean '{meant}'?", "unknown_parameter")
        else:
            yield f"stream_options.{name}"


def _check_messages(body: Mapping[str, Any], problems: Problems) -> Iterator[str]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    own = _BUILT[ChatMessage]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() <= own:
            continue
        for name, value in message.items():
            param = f"messages[{index}].{name}"
            if value is None or name in own or name in ACCEPTED_IN_MESSAGES:
                continue
            if (known := _REFUSED_IN_MESSAGES.get(name)) is not None:
                _check_neutral(known, param, value, problems)
            else:
                yield param


# ---- typos -------------------------------------------------------------------------------------------------------------


def typo_of(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be: two letters off where it is long, one where it is short."""
    allowed = 2 if len(name) >= 7 else 1 if len(name) >= 4 else 0
    if not allowed or len(name) > MAX_NAME_LEN:
        return None
    near = [(letters_apart(name, other, allowed), other) for other in known if abs(len(name) - len(other)) <= allowed]
    distance, meant = min(near, default=(allowed + 1, ""))
    return meant if distance <= allowed else None


def letters_apart(one: str, other: str, most: int) -> int:
    """Letters to insert, leave out, replace or swap with their neighbour; any number above `most` if it is more.

    Optimal string alignment (a restricted Damerau-Levenshtein distance).
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        row = [i]
        for j, right in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and one[i - 2] == right:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
        before, last = last, row
    return last[-1]
