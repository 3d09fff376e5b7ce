"""Messages to frames and back: msgpack, typed, bounded.

A message is a msgpack map with its class name under "type". An Int32Array is a msgpack bin of little-endian int32.
Whatever a frame holds, decoding returns a message of the channel or raises WireError.
"""

import math
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np

from headstart.core.messages import Message
from headstart.wire.channels import Channel
from headstart.wire.errors import WireError
from headstart.wire.limits import WireLimits

_ENCODED_INT32 = np.dtype("<i4")

IsFinite = Callable[[Any], bool]


class Codec:
    """Encodes any message; decodes those of one channel. Thread-safe."""

    def __init__(self, receives: Channel, limits: WireLimits) -> None:
        self._channel = receives
        self._limits = limits
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        union: Any = reduce(or_, receives.types)
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=self._decode_array)
        self._finite = {cls: _finite_check(msgspec.inspect.type_info(cls)) for cls in receives.types}

    def encode(self, message: Message) -> bytes:
        """Raises WireError for a message beyond the limits."""
        frame = self._encoder.encode(message)
        if len(frame) > self._limits.max_message_bytes:
            raise WireError(f"{type(message).__name__} of {len(frame)} bytes exceeds {self._limits.max_message_bytes}")
        return frame

    def decode(self, frame: bytes) -> Message:
        """Raises WireError, and nothing else, for a frame that is not a message of this channel within the limits."""
        if len(frame) > self._limits.max_message_bytes:
            raise WireError(f"frame of {len(frame)} bytes exceeds {self._limits.max_message_bytes}")
        try:
            message: Message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise WireError(f"not a message from {self._channel.name}: {error}") from error
        finite = self._finite[type(message)]
        if finite is not None and not finite(message):
            raise WireError(f"{type(message).__name__} carries a number that is not finite")
        return message

    def _decode_array(self, kind: type, value: Any) -> Any:
        if not isinstance(value, bytes):
            raise ValueError(f"expected bytes of an int32 array, got {type(value).__name__}")
        if len(value) % 4:
            raise ValueError(f"{len(value)} bytes are no int32 array")
        if len(value) > 4 * self._limits.max_array_len:
            raise ValueError(f"array of {len(value) // 4} elements exceeds {self._limits.max_array_len}")
        return np.frombuffer(value, dtype=_ENCODED_INT32)  # read-only, because bytes are


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return value.astype(_ENCODED_INT32, copy=False).tobytes()
    raise TypeError(f"{type(value).__name__} does not travel")


# ---- finite numbers --------------------------------------------------------------------------------------------------


def _finite_check(info: msgspec.inspect.Type) -> IsFinite | None:
    """A check of every float that a value of this type can hold, or None where it can hold none: long token lists are
    not walked."""
    match info:
        case msgspec.inspect.FloatType():
            return math.isfinite
        case msgspec.inspect.StructType(fields=fields):
            checks = [(f.name, check) for f in fields if (check := _finite_check(f.type)) is not None]
            return _each_field(checks) if checks else None
        case msgspec.inspect.VarTupleType(item_type=item):
            return _each_item(_finite_check(item))
        case msgspec.inspect.TupleType(item_types=items):
            return _each_position([_finite_check(item) for item in items])
        case msgspec.inspect.DictType(value_type=value):
            check = _each_item(_finite_check(value))
            return None if check is None else lambda mapping: check(mapping.values())
        case msgspec.inspect.UnionType(types=options):
            return _optional([c for option in options if (c := _finite_check(option)) is not None])
        case _:
            return None


def _each_field(checks: list[tuple[str, IsFinite]]) -> IsFinite:
    def is_finite(struct: Any) -> bool:
        for name, check in checks:  # noqa: SIM110 (a generator costs more than the checks)
            if not check(getattr(struct, name)):
                return False
        return True

    return is_finite


def _each_item(check: IsFinite | None) -> IsFinite | None:
    if check is None:
        return None
    return lambda items: all(map(check, _iterable(items)))


def _each_position(checks: list[IsFinite | None]) -> IsFinite | None:
    if not any(checks):
        return None
    return lambda items: all(check is None or check(item) for check, item in zip(checks, items, strict=True))


def _optional(checks: list[IsFinite]) -> IsFinite | None:
    """Messages use unions only as `X | None`."""
    if not checks:
        return None
    (check,) = checks
    return lambda value: value is None or check(value)


def _iterable(items: Any) -> Iterable[Any]:
    return items  # type: ignore[no-any-return]
