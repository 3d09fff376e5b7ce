"""From a JSON object to a request struct: every field that is wrong is named at once, with what it must be.

Types and bounds are those of the struct; `msgspec.convert` checks one field at a time, and the texts are made from the
field's type.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from msgspec.structs import fields as struct_fields

from headstart.gateway.api.errors import invalid

MAX_SHOWN = 60  # characters of a wrong value in a message
MAX_PROBLEMS = 8  # named in one message
_PATH = re.compile(r" - at `\$?(.*?)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_STEPS = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(slots=True)
class Problems:
    """What is wrong with a body, in the order in which it was found."""

    found: list[tuple[str, str, str]] = field(default_factory=list)  # (param, message, code)

    def add(self, param: str, message: str, code: str = "invalid_value") -> None:
        self.found.append((param, message, code))

    def must_be(self, param: str, wanted: str, value: Any) -> None:
        self.add(param, f"'{param}' must be {wanted}, got {shown(value)}")

    def refuse(self) -> None:
        """Raise ApiError 400 if anything was found: all messages, and the first one's field and code."""
        if not self.found:
            return
        param, _, code = self.found[0]
        messages = [message for _, message, _ in self.found[:MAX_PROBLEMS]]
        if len(self.found) > MAX_PROBLEMS:
            messages.append(f"and {len(self.found) - MAX_PROBLEMS} more")
        raise invalid("; ".join(messages), param, code)


def convert_body(kind: type[Body], body: Mapping[str, Any], problems: Problems) -> Body:
    """`body` as a struct of `kind`. Fields that are not in it are not looked at. Raises ApiError 400 for all of `problems`,
    those that were found before and the wrong fields."""
    values: dict[str, Any] = {}
    for info in struct_fields(kind):
        value = body.get(info.encode_name)
        if value is None:
            if info.required:
                wanted = type_text(_type_of(kind, info.name))
                problems.add(info.encode_name, f"'{info.encode_name}' is missing; it must be {wanted}")
            continue
        value = _whole(value, _type_of(kind, info.name))
        try:
            values[info.name] = msgspec.convert(value, info.type)
        except msgspec.ValidationError as error:
            _explain(problems, info.encode_name, value, _type_of(kind, info.name), str(error))
    problems.refuse()
    return kind(**values)


def shown(value: Any) -> str:
    """A value as JSON, cut if it is long."""
    if isinstance(value, list | dict) and len(value) > MAX_SHOWN:
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {part.name: part.type for part in info.fields}


def _type_of(kind: type[msgspec.Struct], name: str) -> inspect.Type:
    return _types(kind)[name]


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, null apart."""
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [part for member in kind.types for part in _alternatives(member)]
    return [] if isinstance(kind, inspect.NoneType) else [kind]


def _whole(value: Any, kind: inspect.Type) -> Any:
    """A float without a fraction counts as an integer: some languages have no other numbers."""
    if isinstance(value, float) and value.is_integer():
        parts = _alternatives(kind)
        if any(isinstance(part, inspect.IntType) for part in parts):
            return int(value)
    return value


# ---- what is wrong -----------------------------------------------------------------------------------------------------


def _explain(problems: Problems, name: str, value: Any, kind: inspect.Type, error: str) -> None:
    if isinstance(value, dict) and isinstance(kind_of_entries := _dict_type(kind), inspect.DictType):
        _explain_entries(problems, name, value, kind_of_entries)
        return
    where = _PATH.search(error)
    path, value, kind = _descend(name, value, kind, where.group(1) if where else "")
    if missing := _MISSING.search(error):
        path, value, kind = _descend(path, value, kind, f".{missing.group(1)}")
    problems.must_be(path, type_text(kind), value)


def _dict_type(kind: inspect.Type) -> inspect.Type | None:
    return next((part for part in _alternatives(kind) if isinstance(part, inspect.DictType)), None)


def _explain_entries(problems: Problems, name: str, value: dict[str, Any], kind: inspect.DictType) -> None:
    """The library does not name the entry of a dictionary that is wrong."""
    if kind.max_length is not None and len(value) > kind.max_length:
        problems.must_be(name, type_text(kind), value)
        return
    pattern = getattr(kind.key_type, "pattern", None)
    for key, entry in value.items():
        if pattern is not None and not re.search(pattern, key):
            problems.add(name, f"'{name}' has the key {shown(key)}, which is no token id")
        elif not _fits(entry, kind.value_type):
            problems.must_be(f"{name}.{key}", type_text(kind.value_type), entry)


def _fits(value: Any, kind: inspect.Type) -> bool:
    if not isinstance(kind, inspect.FloatType):
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = kind.ge, kind.le
    return is_number and (low is None or value >= low) and (high is None or value <= high)


def _descend(path: str, value: Any, kind: inspect.Type, steps: str) -> tuple[str, Any, inspect.Type]:
    """Follow the library's path from a field to the value inside it that is wrong."""
    for name, index in _STEPS.findall(steps):
        parts = _alternatives(kind)
        if index:
            path, value = f"{path}[{index}]", value[int(index)]
            kind = next(part.item_type for part in parts if isinstance(part, inspect.ListType))
        else:
            path, value = f"{path}.{name}", value.get(name) if isinstance(value, dict) else None
            struct = next(part for part in parts if isinstance(part, inspect.StructType))
            if name == struct.tag_field:
                return path, value, inspect.LiteralType((struct.tag,))
            kind = next(part.type for part in struct.fields if part.encode_name == name)
    return path, value, kind


# ---- what it must be -----------------------------------------------------------------------------------------------------


def type_text(kind: inspect.Type) -> str:
    """A type in words: "an integer from 1 to 128", "a string or a list of up to 16 strings"."""
    parts = _alternatives(kind)
    return " or ".join(dict.fromkeys(_text(part) for part in parts)) or "null"


def _text(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.StrType():
            return _string(kind)
        case inspect.ListType():
            return _list(kind)
        case inspect.LiteralType():
            return " or ".join(shown(value) for value in kind.values)
        case inspect.StructType():
            required = [f"'{part.encode_name}'" for part in kind.fields if part.required]
            return "an object" + (f" with {' and '.join(required)}" if required else "")
        case inspect.DictType(max_length=int(most)):
            return f"an object of at most {most} entries"
        case inspect.DictType():
            return "an object"
    return "something else"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    above, low, high = (None if bound is None else shown(bound) for bound in (kind.gt, kind.ge, kind.le))
    if above is not None:
        return f" above {above}" + ("" if high is None else f" up to {high}")
    if low is None:
        return ""
    return f" of at least {low}" if high is None else f" from {low} to {high}"


def _string(kind: inspect.StrType) -> str:
    text = "a non-empty string" if kind.min_length else "a string"
    return text if kind.max_length is None else f"{text} of at most {kind.max_length} characters"


def _list(kind: inspect.ListType) -> str:
    size = "a non-empty list" if kind.min_length else "a list"
    nouns = {_NOUNS.get(type(part), "values") for part in _alternatives(kind.item_type)}
    noun = nouns.pop() if len(nouns) == 1 else "values"
    return f"{size} of {noun}" if kind.max_length is None else f"{size} of at most {kind.max_length} {noun}"


_NOUNS: dict[type[inspect.Type], str] = {
    inspect.IntType: "integers",
    inspect.StrType: "strings",
    inspect.StructType: "objects",
}
