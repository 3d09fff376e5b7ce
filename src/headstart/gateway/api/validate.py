"""Reads a request's fields by name: each check knows the field and says what it wants instead."""

from collections.abc import Iterable, Mapping
from typing import Any

from headstart.gateway.api.errors import ApiError, invalid


class Fields:
    """A JSON object's fields. A field that is null counts as absent. `path` is where the object stands."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path

    def name(self, field: str) -> str:
        return f"{self._path}.{field}" if self._path else field

    def raw(self, field: str) -> Any:
        return self._body.get(field)

    def has(self, field: str) -> bool:
        return self._body.get(field) is not None

    def error(self, field: str, wanted: str) -> ApiError:
        return invalid(f"'{self.name(field)}' must be {wanted}", self.name(field), "invalid_value")

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def integer(self, field: str, default: int, least: int, most: int) -> int:
        value = self.raw(field)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_int(value) or not least <= value <= most:
            raise self.error(field, f"an integer from {least} to {most}")
        return int(value)

    def number(self, field: str, default: float, least: float, most: float, *, above: bool = False) -> float:
        """`above`: `least` itself is not allowed."""
        value = self.raw(field)
        if value is None:
            return default
        fits = _is_number(value) and least <= value <= most and not (above and value == least)  # also no NaN
        if not fits:
            raise self.error(
                field, f"a number {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {most:g}"
            )
        return float(value)

    def text(self, field: str, default: str = "", max_len: int = 1 << 20) -> str:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > max_len:
            raise self.error(field, f"a string of at most {max_len} characters")
        return value

    def object(self, field: str) -> "Fields":
        value = self.raw(field)
        if value is None:
            return Fields({}, self.name(field))
        if not isinstance(value, dict):
            raise self.error(field, "an object")
        return Fields(value, self.name(field))

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._body.items()

    def strings(self, field: str, most: int, max_len: int) -> tuple[str, ...]:
        """A string, or a list of up to `most`; none of them empty."""
        value = self.raw(field)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        wanted = f"a non-empty string or a list of up to {most} of them, each at most {max_len} characters"
        if not isinstance(values, list) or len(values) > most:
            raise self.error(field, wanted)
        if not all(isinstance(item, str) and 0 < len(item) <= max_len for item in values):
            raise self.error(field, wanted)
        return tuple(values)

    def token_ids(self, field: str, vocab_size: int, most: int) -> tuple[int, ...]:
        value = self.raw(field)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most:
            raise self.error(field, f"a list of up to {most} token ids")
        check_token_ids(value, vocab_size, self.name(field))
        return tuple(value)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse fields that are not built, unless they hold null or one of their neutral values."""
        for field, allowed in neutral.items():
            value = self.raw(field)
            if value is not None and not any(value == other and type(value) is type(other) for other in allowed):
                raise invalid(f"'{self.name(field)}' is not supported", self.name(field), "unsupported_parameter")


def check_token_ids(values: list[Any], vocab_size: int, name: str) -> None:
    for position, value in enumerate(values):
        if not _is_int(value) or not 0 <= value < vocab_size:
            wanted = f"a token id from 0 to {vocab_size - 1}"
            raise invalid(f"'{name}[{position}]' must be {wanted}", f"{name}[{position}]", "invalid_value")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
