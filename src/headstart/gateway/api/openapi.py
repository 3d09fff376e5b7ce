"""The API as an OpenAPI 3.1 document, for tools: what may be sent, and every status that may come back.

Bodies are described by the structs that decode and encode them. What a schema cannot say (lengths in tokens, pairs of
fields, ids of the served model's vocabulary) is a 400 that says so.
"""

from typing import Any

import msgspec
from msgspec import Struct

from headstart.gateway.api import response_bodies as answers
from headstart.gateway.api.request_bodies import ChatBody, ChatMessage, CompletionBody, StreamOptions, TokenizeBody

Json = dict[str, Any]

REQUESTS = (ChatBody, CompletionBody, TokenizeBody)
OPTIONAL_BY_NULL = (*REQUESTS, StreamOptions, ChatMessage)
"""What clients send: a field that is null counts as left out."""
ANSWERS = (
    answers.ChatCompletion,
    answers.TextCompletion,
    answers.TokenizedText,
    answers.ModelList,
    answers.ModelCard,
    answers.FlushedCaches,
    answers.ClusterReport,
    answers.HealthReport,
    answers.ReadyReport,
    answers.OpenApiDocument,
    answers.ErrorBody,
)
STATUSES = {
    400: "A field is wrong, or prompt and output cannot fit",
    401: "No valid key",
    403: "Not the admin key, or a page of another site",
    404: "Unknown model or path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Queues are full, or this key has enough open; Retry-After has the seconds until another try",
    499: "The client has left",
    500: "Our bug; the server's log has it",
    502: "The workers that ran the request died",
    503: "No worker can serve it now; Retry-After has the seconds until another try",
    504: "Its deadline passed",
}
BODY_REFUSALS = (400, 403, 404, 408, 413, 429, 499)
RUN_FAILURES = (500, 502, 503, 504)
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def describe(model: str, *, asks_for_keys: bool, asks_for_admin_key: bool) -> answers.OpenApiDocument:
    """The document of a server with this model. The two flags decide which operations want a bearer token."""
    keyed, admin = (401,) * asks_for_keys, (*(401,) * asks_for_admin_key, 403)
    generated = (*keyed, *BODY_REFUSALS, *RUN_FAILURES)
    flushed = _gives("flush_cache", answers.FlushedCaches, (*admin, 400, 500))
    paths: Json = {
        "/v1/chat/completions": {"post": _streams("chat", ChatBody, answers.ChatCompletion, generated)},
        "/v1/completions": {"post": _streams("completions", CompletionBody, answers.TextCompletion, generated)},
        "/tokenize": {"post": _takes("tokenize", TokenizeBody, answers.TokenizedText, (*keyed, *BODY_REFUSALS, 500))},
        "/v1/models": {"get": _gives("models", answers.ModelList, (*keyed, 500))},
        "/v1/models/{name}": {"get": _gives("model", answers.ModelCard, (*keyed, 404, 500)) | {"parameters": [_NAME]}},
        "/flush_cache": {"get": flushed | {"operationId": "flush_cache_get"}, "post": flushed},
        "/cluster": {"get": _gives("cluster", answers.ClusterReport, (*admin, 500))},
        "/metrics": {"get": _operation("metrics", {"text/plain": {"schema": {"type": "string"}}}, (*admin, 500))},
        "/health": {"get": _probes("health", answers.HealthReport)},
        "/ready": {"get": _probes("ready", answers.ReadyReport)},
        "/openapi.json": {"get": _gives("openapi", answers.OpenApiDocument, (500,))},
    }
    for operations in paths.values():
        for operation in operations.values():
            if "401" in operation["responses"]:
                operation["security"] = [{"bearer": []}]
    return answers.OpenApiDocument(
        openapi="3.1.0",
        info={"title": "Headstart", "version": "1"},
        paths=paths,
        components={
            "schemas": schemas(model),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    )


def schemas(model: str) -> Json:
    """The schema of every body, made from its struct."""
    _, found = msgspec.json.schema_components([*REQUESTS, *ANSWERS], ref_template=_ref("{name}"))
    for kind in OPTIONAL_BY_NULL:
        properties, required = found[kind.__name__]["properties"], found[kind.__name__]["required"]
        for name in properties.keys() - set(required):
            properties[name] = _or_null(properties[name])
    for kind in REQUESTS:
        found[kind.__name__]["properties"]["model"]["enum"] = [model, None]
    return found


def _or_null(schema: Json) -> Json:
    if "anyOf" in schema:
        others = [option for option in schema["anyOf"] if option != {"type": "null"}]
        return schema | {"anyOf": [*others, {"type": "null"}]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


# ---- operations ------------------------------------------------------------------------------------------------------


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"


def _content(kind: type[Struct]) -> Json:
    return {"application/json": {"schema": {"$ref": _ref(kind.__name__)}}}


def _operation(name: str, content: Json, failures: tuple[int, ...]) -> Json:
    responses: Json = {"200": {"description": "Success", "content": content}}
    for status in failures:
        responses[str(status)] = {"description": STATUSES[status], "content": _content(answers.ErrorBody)}
    return {"operationId": name, "responses": responses}


def _gives(name: str, answer: type[Struct], failures: tuple[int, ...]) -> Json:
    return _operation(name, _content(answer), failures)


def _takes(name: str, body: type[Struct], answer: type[Struct], failures: tuple[int, ...]) -> Json:
    return _gives(name, answer, failures) | {"requestBody": {"required": True, "content": _content(body)}}


def _streams(name: str, body: type[Struct], answer: type[Struct], failures: tuple[int, ...]) -> Json:
    operation = _takes(name, body, answer, failures)
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _probes(name: str, answer: type[Struct]) -> Json:
    operation = _gives(name, answer, (500,))
    operation["responses"]["503"] = {"description": "Not now", "content": _content(answer)}
    return operation
