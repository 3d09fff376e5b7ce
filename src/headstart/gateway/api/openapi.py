"""The API as an OpenAPI 3.1 document, for tools: what may be sent, and every status that may come back.

Bounds are those that `params` and `prompts` check. What is not described (`deadline_s` beyond the server's, prompts
beyond its context) is a 400 that says so.
"""

from typing import Any

from headstart.gateway.api.params import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_IDS,
    MAX_STOP_LEN,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)
from headstart.gateway.api.prompts import MAX_MESSAGES, ROLES

Json = dict[str, Any]

STATUSES = {
    400: "A field is wrong, or prompt and output cannot fit",
    401: "No valid key",
    403: "Not the admin key, or a page of another site",
    404: "Unknown model or path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Queues are full, or this key has enough open; Retry-After says when to try again",
    499: "The client has left",
    500: "Our bug; the server's log has it",
    502: "The workers that ran the request died",
    503: "No worker can serve it now; Retry-After says when to try again",
    504: "Its deadline passed",
}
BODY_REFUSALS = (400, 404, 408, 413, 429, 499)
RUN_FAILURES = (500, 502, 503, 504)


def describe(model: str, *, asks_for_keys: bool, asks_for_admin_key: bool) -> Json:
    """The document of a server with this model. The two claims say which operations want a bearer token."""
    keyed, admin = (401,) * asks_for_keys, (*(401,) * asks_for_admin_key, 403)
    generated = (*keyed, *BODY_REFUSALS, *RUN_FAILURES)
    paths = {
        "/v1/chat/completions": {"post": _generates("chat", _chat(model), generated)},
        "/v1/completions": {"post": _generates("completions", _completion(model), generated)},
        "/tokenize": {"post": _takes("tokenize", _tokenize(model), _answers(_TOKENS), (*keyed, *BODY_REFUSALS, 500))},
        "/v1/models": {"get": _gives("models", _answers(_LIST), (*keyed, 500))},
        "/v1/models/{name}": {"get": _gives("model", _answers(_OBJECT), (*keyed, 404, 500)) | {"parameters": [_NAME]}},
        "/flush_cache": {
            "get": _gives("flush_cache_get", _answers(_FLUSHED), (*admin, 400, 500)),
            "post": _gives("flush_cache", _answers(_FLUSHED), (*admin, 400, 500)),
        },
        "/cluster": {"get": _gives("cluster", _answers(_OBJECT), (*admin, 500))},
        "/metrics": {"get": _gives("metrics", {"text/plain": {"schema": {"type": "string"}}}, (*admin, 500))},
        "/health": {"get": _probes("health")},
        "/ready": {"get": _probes("ready")},
        "/openapi.json": {"get": _gives("openapi", _answers(_OBJECT), (500,))},
    }
    for operations in paths.values():
        for operation in operations.values():
            if "401" in operation["responses"]:
                operation["security"] = [{"bearer": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headstart", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


# ---- operations ------------------------------------------------------------------------------------------------------


def _gives(name: str, content: Json, failures: tuple[int, ...]) -> Json:
    responses: Json = {"200": {"description": "Success", "content": content}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in failures:
        responses[str(status)] = {"description": STATUSES[status], "content": error}
    return {"operationId": name, "responses": responses}


def _takes(name: str, body: Json, content: Json, failures: tuple[int, ...]) -> Json:
    sent = {"required": True, "content": {"application/json": {"schema": body}}}
    return _gives(name, content, failures) | {"requestBody": sent}


def _generates(name: str, body: Json, failures: tuple[int, ...]) -> Json:
    return _takes(name, body, _answers(_ANSWER) | {"text/event-stream": {}}, failures)


def _probes(name: str) -> Json:
    operation = _gives(name, _answers(_OBJECT), (500,))
    operation["responses"]["503"] = {"description": "Not now", "content": _answers(_OBJECT)}
    return operation


def _answers(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


# ---- what is sent ----------------------------------------------------------------------------------------------------


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties}


def _or_null(kind: str, **bounds: Any) -> Json:
    return {"type": [kind, "null"], **bounds}


def _list(items: Json, most: int, least: int = 0) -> Json:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _common(model: str) -> Json:
    return {
        "model": {"enum": [model, None]},
        "n": _or_null("integer", minimum=1, maximum=MAX_CHOICES),
        "max_tokens": _or_null("integer", minimum=1),
        "min_tokens": _or_null("integer", minimum=0),
        "temperature": _or_null("number", minimum=0, maximum=2),
        "top_p": _or_null("number", exclusiveMinimum=0, maximum=1),
        "top_k": _or_null("integer", minimum=-1, maximum=1 << 31),
        "min_p": _or_null("number", minimum=0, maximum=1),
        "presence_penalty": _or_null("number", minimum=-2, maximum=2),
        "frequency_penalty": _or_null("number", minimum=-2, maximum=2),
        "repetition_penalty": _or_null("number", exclusiveMinimum=0, maximum=10),
        "logit_bias": _or_null(
            "object",
            maxProperties=MAX_BIASES,
            propertyNames={"pattern": "^[0-9]{1,9}$"},
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
        "seed": _or_null("integer", minimum=-(1 << 63), maximum=(1 << 64) - 1),
        "stop": {"anyOf": [{"type": "null"}, _STOP, _list(_STOP, MAX_STOPS)]},
        "stop_token_ids": {"anyOf": [{"type": "null"}, _list(_TOKEN_ID, MAX_STOP_IDS)]},
        "ignore_eos": _or_null("boolean"),
        "skip_special_tokens": _or_null("boolean"),
        "return_token_ids": _or_null("boolean"),
        "deadline_s": _or_null("number", exclusiveMinimum=0),
        "cache_salt": _or_null("string"),
        "stream": _or_null("boolean"),
        "stream_options": _or_null("object", properties={"include_usage": _or_null("boolean")}),
    }


def _chat(model: str) -> Json:
    own = {
        "messages": _list(_MESSAGE, MAX_MESSAGES, least=1),
        "max_completion_tokens": _or_null("integer", minimum=1),
        "logprobs": _or_null("boolean"),
        "top_logprobs": _or_null("integer", minimum=0, maximum=MAX_TOP_LOGPROBS),
        **_TEMPLATE,
    }
    return _object(["messages"], **own, **_common(model))


def _completion(model: str) -> Json:
    texts = {"type": "string", "minLength": 1}
    ids = _list(_TOKEN_ID, 1 << 24, least=1)
    prompt = {"anyOf": [texts, ids, _list({"anyOf": [texts, ids]}, MAX_CHOICES, least=1)]}
    logprobs = {"anyOf": [_or_null("integer", minimum=0, maximum=MAX_TOP_LOGPROBS), {"const": False}]}
    return _object(["prompt"], prompt=prompt, logprobs=logprobs, **_common(model))


def _tokenize(model: str) -> Json:
    fields = {
        "model": {"enum": [model, None]},
        "prompt": {"type": "string"},
        "add_special_tokens": _or_null("boolean"),
        "messages": _list(_MESSAGE, MAX_MESSAGES, least=1),
        **_TEMPLATE,
    }
    return _object([], **fields) | {"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}


_TOKEN_ID: Json = {"type": "integer", "minimum": 0}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}
_PART = _object(["type", "text"], type={"const": "text"}, text={"type": "string"})
_CONTENT: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_MESSAGE: Json = _object(["role", "content"], role={"enum": list(ROLES)}, content=_CONTENT)
_TEMPLATE: Json = {"add_generation_prompt": _or_null("boolean"), "chat_template_kwargs": _or_null("object")}
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

# ---- what comes back -------------------------------------------------------------------------------------------------

_OBJECT: Json = {"type": "object"}
_LIST = _object(["object", "data"], object={"const": "list"}, data={"type": "array", "items": _OBJECT})
_FLUSHED = _object(["flushed", "num_pages"], flushed={"const": True}, num_pages={"type": "integer", "minimum": 0})
_TOKENS = _object(["count", "tokens"], count={"type": "integer"}, tokens={"type": "array", "items": _TOKEN_ID})
_USAGE = _object(
    ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "headstart"],
    prompt_tokens={"type": "integer", "minimum": 1},
    completion_tokens={"type": "integer", "minimum": 0},
    total_tokens={"type": "integer", "minimum": 1},
    prompt_tokens_details=_object(["cached_tokens"], cached_tokens={"type": "integer", "minimum": 0}),
    headstart=_OBJECT,
)
_CHOICE = _object(["index", "finish_reason"], index={"type": "integer"}, finish_reason={"enum": ["stop", "length"]})
_ANSWER = _object(
    ["id", "object", "created", "model", "choices", "usage"],
    id={"type": "string"},
    created={"type": "integer"},
    choices={"type": "array", "items": _CHOICE, "minItems": 1},
    usage=_USAGE,
)
_ERROR = _object(
    ["error"],
    error=_object(
        ["message", "type", "param", "code"],
        message={"type": "string", "minLength": 1},
        type={"type": "string"},
        param=_or_null("string"),
        code=_or_null("string"),
    ),
)
