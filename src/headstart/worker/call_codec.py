"""Calls of a protocol's methods as bytes: what a decision log keeps of arguments and results.

Everything is read off the protocol's annotations. A parameter that is itself a protocol or a callable is a port: its
name stands in its place. A result or an argument whose type has a summary is kept as that summary.
"""

import collections.abc
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import Raw, Struct, msgpack

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, PendingToken, Row
from headstart.core.messages import Message
from headstart.wire.channels import CHANNELS

CALLABLE = "__call__"
"""The one method of a port that is a callable."""
_ANY_MESSAGE: Any = reduce(or_, dict.fromkeys(kind for channel in CHANNELS for kind in channel.types))


class RowSummary(Struct, frozen=True, array_like=True):
    """A scheduled row, with the CRC-32 of its page table in place of the table."""

    row_id: int
    start: int
    tokens: Int32Array
    num_pages: int
    pages_crc: int
    pending: PendingToken | None
    num_drafts: int
    output_index: int  # of the first token that it samples; -1: none


class BatchSummary(Struct, frozen=True, array_like=True):
    step_id: int
    rows: tuple[RowSummary, ...]


def summarize(value: Any) -> Any:
    """What a log keeps of a value: of a batch less than all of it, since page tables are long."""
    if not isinstance(value, Batch):
        return value
    return BatchSummary(value.step_id, tuple(map(_summary, value.rows)))


def _summary(row: Row) -> RowSummary:
    return RowSummary(
        row.row_id,
        row.start,
        row.tokens,
        len(row.pages),
        zlib.crc32(np.ascontiguousarray(row.pages, "<i4").tobytes()),
        row.pending,
        row.num_drafts,
        -1 if row.sample is None else row.sample.output_index,
    )


@dataclass(frozen=True, slots=True)
class MethodCodec:
    """One method: `ports` maps the positions of arguments that are ports to their kinds."""

    name: str
    signature: inspect.Signature  # without self
    ports: dict[int, Any]
    arguments: msgpack.Decoder[Any]
    result: msgpack.Decoder[Any]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, defaults included."""
        if not kwargs and len(args) == len(self.signature.parameters):
            return args
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def describe(self, arguments: Raw) -> str:
        """The call for people."""
        decoded = ", ".join(" ".join(str(argument).split()) for argument in self.arguments.decode(arguments))
        text = decoded if self.name == CALLABLE else f"{self.name} {decoded}"
        return text if len(text) <= 400 else f"{text[:400]}..."


def encode(value: Any) -> Raw:
    return Raw(_ENCODER.encode(value))


@cache
def codecs_of(kind: Any) -> dict[str, MethodCodec]:
    """A codec for each method of a protocol, or for a callable's one."""
    if get_origin(kind) is collections.abc.Callable:
        parameters, result = get_args(kind)
        names = [inspect.Parameter(f"p{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(len(parameters))]
        return {CALLABLE: _codec(CALLABLE, inspect.Signature(names), parameters, result)}
    methods = {name: method for name, method in vars(kind).items() if inspect.isfunction(method) and name[0] != "_"}
    return {name: _method_codec(name, method) for name, method in methods.items()}


def _method_codec(name: str, method: Callable[..., Any]) -> MethodCodec:
    hints = get_type_hints(method)
    result = hints.pop("return", None)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return _codec(name, inspect.Signature(parameters), [hints[each.name] for each in parameters], result)


def _codec(name: str, signature: inspect.Signature, parameters: Any, result: Any) -> MethodCodec:
    ports = {index: kind for index, kind in enumerate(parameters) if _is_port(kind)}
    types = tuple(str if index in ports else _travelling(kind) for index, kind in enumerate(parameters))
    return MethodCodec(name, signature, ports, _decoder(tuple[types]), _decoder(_travelling(result)))  # type: ignore[valid-type]


def _is_port(kind: Any) -> bool:
    return get_origin(kind) is collections.abc.Callable or bool(getattr(kind, "_is_protocol", False))


def _travelling(kind: Any) -> Any:
    """The type to decode in place of an annotation."""
    if kind is Message:
        return _ANY_MESSAGE
    if Batch in get_args(kind):
        return BatchSummary | None
    return kind


def _decoder(kind: Any) -> msgpack.Decoder[Any]:
    return msgpack.Decoder(kind, dec_hook=lambda _, data: np.frombuffer(data, dtype="<i4"))


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return np.ascontiguousarray(value, "<i4").tobytes()
    raise TypeError(f"{type(value).__name__} is nothing that a decision log keeps")


_ENCODER = msgpack.Encoder(enc_hook=_encode_array)
