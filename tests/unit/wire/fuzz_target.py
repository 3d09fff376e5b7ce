"""Bytes chosen by coverage (atheris, libFuzzer), for every channel's decoder: `make fuzz`, or

    python tests/unit/wire/fuzz_target.py -max_total_time=60

The first byte picks the channel. Whatever the rest is, decoding gives a message of the channel or WireError.
"""

import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import atheris
import msgspec

with atheris.instrument_imports(include=["headstart.wire", "headstart.core.messages"]):
    from headstart.core.arrays import Int32Array, int32_array
    from headstart.core.messages import ChunkNotice, decode_notice
    from headstart.wire.channels import CHANNELS
    from headstart.wire.codec import Codec
    from headstart.wire.errors import WireError
    from headstart.wire.limits import WireLimits

CODECS = [Codec(channel, WireLimits()) for channel in CHANNELS]
SIMPLE: dict[Any, Any] = {Int32Array: int32_array([1, 2]), int: 1, float: 0.5, str: "x", bytes: b"y", bool: True}


def one_input(data: bytes, decoders: list[Callable[[bytes], Any]] | None = None) -> None:
    """Raises where a decoder does anything but what it should. `decoders`: of each channel; of `CODECS` where None."""
    number, frame = (data[0] if data else 0) % len(CHANNELS), data[1:]
    try:
        decode = decoders[number] if decoders else CODECS[number].decode
        message = decode(frame)
    except WireError:
        message = None
    if message is not None and not isinstance(message, CHANNELS[number].types):
        raise AssertionError(f"{type(message).__name__} is no message of {CHANNELS[number].name}")
    notice = decode_notice(frame)
    if notice is not None and not isinstance(notice, ChunkNotice):
        raise AssertionError("a notice that is none")


def seeds() -> list[bytes]:
    """A valid input of every message of every channel."""
    return [
        bytes([number]) + CODECS[number].encode(sample(cls))
        for number, channel in enumerate(CHANNELS)
        for cls in channel.types
    ]


def sample(hint: Any) -> Any:
    """A value of a message's or a field's type."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    if get_origin(hint) is None and issubclass(hint, Enum):
        return next(iter(hint))
    if get_origin(hint) is None and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint)
        return hint(**{name: sample(hints[name]) for name in hint.__struct_fields__})
    values = [sample(inner) for inner in get_args(hint) if inner not in (Ellipsis, type(None))]
    if get_origin(hint) is dict:
        return {values[0]: values[1]}
    return tuple(values) if get_origin(hint) is tuple else values[0]


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *arguments, corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
