"""The tables of fields in docs/http-api.md. `python -m headstart.gateway.api.fields_doc` prints them."""

from collections.abc import Iterable
from typing import Any

from msgspec import NODEFAULT, Struct, inspect
from msgspec.structs import fields as struct_fields

from headstart.gateway.api.known_fields import ACCEPTED, REFUSED, REFUSED_IN_MESSAGES, UnbuiltField
from headstart.gateway.api.request_bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions, TokenizeBody
from headstart.gateway.api.validation import shown, type_text


def tables() -> str:
    """What is built, what has no effect, and what is refused."""
    shared = {info.name for info in struct_fields(GenerationBody)}
    parts = [
        "Fields of `/v1/chat/completions` and `/v1/completions`:",
        _built(GenerationBody, ()),
        "Of `/v1/chat/completions` alone:",
        _built(ChatBody, shared),
        "Of `/v1/completions` alone:",
        _built(CompletionBody, shared),
        "Of `stream_options`:",
        _built(StreamOptions, ()),
        "Of `/tokenize`:",
        _built(TokenizeBody, ()),
        "Accepted, whatever they hold, because they have no effect on the answer:",
        _unbuilt(ACCEPTED, has_values=False),
        "Refused by name, because they would change the answer and are not built:",
        _unbuilt(REFUSED, has_values=True),
        "Refused in a message:",
        _unbuilt(REFUSED_IN_MESSAGES, has_values=True),
    ]
    return "\n\n".join(parts)


def _built(kind: type[Struct], left_out: Iterable[str]) -> str:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    rows = ["| field | must be | default | meaning |", "|---|---|---|---|"]
    for part in info.fields:
        if part.name not in left_out:
            default = "required" if part.required else _default(part.default)
            rows.append(f"| `{part.encode_name}` | {type_text(part.type)} | {default} | {_description(part.type)} |")
    return "\n".join(rows)


def _default(value: Any) -> str:
    """Lists and objects are empty by default, and have a factory in place of a value."""
    return "" if value is None or value is NODEFAULT or value == "" else f"`{shown(value)}`"


def _description(kind: inspect.Type) -> str:
    """The outermost one."""
    while isinstance(kind, inspect.Metadata):
        if (text := (kind.extra_json_schema or {}).get("description")) is not None:
            return str(text)
        kind = kind.type
    return ""


def _unbuilt(known: Iterable[UnbuiltField], *, has_values: bool) -> str:
    values = " means the same as leaving it out |" if has_values else ""
    rows = [f"| field | known to |{values} |", "|---|---|---|" + "---|" * has_values]
    for one in known:
        neutral = f" {', '.join(f'`{shown(value)}`' for value in one.neutral)} |" if has_values else ""
        rows.append(f"| `{one.name}` | {', '.join(one.known_to)} |{neutral} {one.note} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(tables())
