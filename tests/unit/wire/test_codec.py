"""Every message survives the wire; nothing that is not a message does."""

import math
import pickle
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.messages import (
    Accepted,
    Cancel,
    ChunkNotice,
    Drain,
    Flush,
    Heartbeat,
    Message,
    Prefill,
    TicketRef,
    TokenDelta,
    Tokens,
    WorkerLoad,
    WorkerRef,
    decode_notice,
    encode_notice,
)
from headstart.core.request import ChoiceRef
from headstart.wire.channels import CHANNELS, FROM_WORKER, NOTICE, TO_PREFILL, TO_WORKER
from headstart.wire.codec import Codec
from headstart.wire.errors import WireError
from headstart.wire.limits import WireLimits

LIMITS = WireLimits()
CODECS = {channel.name: Codec(channel, LIMITS) for channel in CHANNELS}
INT32 = st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.lists(INT32, max_size=20).map(int32_array)


def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a struct with every field drawn, also those that have defaults."""
    hints = get_type_hints(cls)
    fields = {name: ARRAYS if hint is Int32Array else values_of(hint) for name, hint in hints.items()}
    return st.builds(cls, **{name: fields[name] for name in cls.__struct_fields__})


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint == Int32Array:
        return ARRAYS
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return messages_of(hint)
    if hint is int:
        return st.integers(-(2**63), 2**64 - 1)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if type(None) in arguments:
        return st.none() | st.one_of(*(values_of(a) for a in arguments if a is not type(None)))
    return st.from_type(hint)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def frames_of(channel: Any) -> st.SearchStrategy[bytes]:
    return st.one_of(*(messages_of(cls) for cls in channel.types)).map(CODECS[channel.name].encode)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda c: c.name)
def test_every_message_of_a_channel_survives_it(channel: Any) -> None:
    codec = CODECS[channel.name]
    for cls in channel.types:

        @given(messages_of(cls))
        @settings(max_examples=25, deadline=None)
        def survives(message: Message) -> None:
            assert same(codec.decode(codec.encode(message)), message)

        survives()


def test_every_message_class_has_a_channel() -> None:
    assert {cls for channel in CHANNELS for cls in channel.types} == set(Message.__subclasses__())


def test_arrays_come_back_read_only() -> None:
    message = Prefill(TicketRef(1, 0), int32_array([1, 2]), 0, int32_array([3]), b"", 1.0)
    decoded = CODECS[TO_PREFILL.name].decode(CODECS[TO_PREFILL.name].encode(message))
    assert isinstance(decoded, Prefill)
    with pytest.raises(ValueError, match="read-only"):
        decoded.tokens[0] = 7


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_a_wire_error_on_every_channel(frame: bytes) -> None:
    for codec in CODECS.values():
        assert_message_or_wire_error(codec, frame)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_a_message_or_a_wire_error(data: st.DataObject) -> None:
    channel = data.draw(st.sampled_from(CHANNELS))
    frame = bytearray(data.draw(frames_of(channel)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame) - 1))
        frame[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    assert_message_or_wire_error(CODECS[channel.name], bytes(frame))
    assert_message_or_wire_error(CODECS[channel.name], bytes(frame[:cut]))


def assert_message_or_wire_error(codec: Codec, frame: bytes) -> None:
    try:
        message = codec.decode(frame)
    except WireError:
        return
    assert isinstance(message, Message)


@pytest.mark.parametrize(
    "value",
    [
        b"\x91" * 50_000,  # nested beyond any stack
        b"\xdd\xff\xff\xff\xff",  # a list that claims four billion elements
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x91\x01\x02",  # a map whose key is a list
        b"\xd9\x02\xff\xfe",  # text that is not UTF-8
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode(b"123"),  # not a multiple of four
    ],
    ids=["nested", "huge list", "huge map", "huge bytes", "odd key", "bad text", "timestamp", "list", "three bytes"],
)
def test_what_is_not_an_int32_array_is_refused(value: bytes) -> None:
    with pytest.raises(WireError):
        CODECS[TO_PREFILL.name].decode(prefill_frame_with_tokens(value))


def prefill_frame_with_tokens(value: bytes) -> bytes:
    fields = {"ref": {"ticket": 1, "attempt": 0}, "start": 0, "dst_pages": b"", "namespace": b"", "remaining_s": 1.0}
    head = msgspec.msgpack.encode({"type": "Prefill", **fields})
    assert head[0] == 0x86
    return b"\x87" + head[1:] + msgspec.msgpack.encode("tokens") + value


def test_the_hand_made_prefill_frame_is_otherwise_valid() -> None:
    decoded = CODECS[TO_PREFILL.name].decode(prefill_frame_with_tokens(msgspec.msgpack.encode(b"\1\0\0\0")))
    assert isinstance(decoded, Prefill)
    assert decoded.tokens.tolist() == [1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused(protocol: int) -> None:
    for codec in CODECS.values():
        with pytest.raises(WireError):
            codec.decode(pickle.dumps({"type": "Drain"}, protocol))


def test_an_oversize_frame_is_refused_before_it_is_parsed() -> None:
    codec = Codec(TO_WORKER, WireLimits(max_message_bytes=64))
    with pytest.raises(WireError, match="exceeds 64"):
        codec.decode(b"\xc1" * 65)  # 0xc1 is never valid: parsing it would have said so
    with pytest.raises(WireError, match="exceeds 64"):
        codec.encode(Cancel(ChoiceRef("r" * 100)))


def test_an_array_beyond_the_limit_is_refused() -> None:
    codec = Codec(TO_PREFILL, WireLimits(max_array_len=2))
    fits, too_long = (
        codec.encode(Prefill(TicketRef(1, 0), int32_array(range(n)), 0, int32_array([3]), b"", 1.0)) for n in (2, 3)
    )
    assert isinstance(codec.decode(fits), Prefill)
    with pytest.raises(WireError, match="exceeds 2"):
        codec.decode(too_long)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_wherever_they_hide(number: float) -> None:
    worker, ref = WorkerRef("d", 1), ChoiceRef("r")
    hidden = [
        Heartbeat(worker, number, WorkerLoad()),
        Heartbeat(worker, 0.0, WorkerLoad(counters={"hits": number})),
        Tokens((TokenDelta(ref, 0, (1,), (-0.5, number)),)),
        Tokens((TokenDelta(ref, 0, (1,), (), (((1, -0.5), (2, number)),)),)),
    ]
    codec = CODECS[FROM_WORKER.name]
    for message in hidden:
        with pytest.raises(WireError, match="not finite"):
            codec.decode(codec.encode(message))


def test_a_channel_refuses_messages_of_another() -> None:
    with pytest.raises(WireError):
        CODECS[TO_WORKER.name].decode(CODECS[TO_WORKER.name].encode(Accepted(ChoiceRef("r"))))


def test_messages_without_fields_and_with_one_are_told_apart() -> None:
    codec = CODECS[TO_WORKER.name]
    assert isinstance(codec.decode(codec.encode(Drain())), Drain)
    flush = codec.decode(codec.encode(Flush(7)))
    assert isinstance(flush, Flush)
    assert flush.flush_id == 7


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_a_strangers_notice_is_no_notice(payload: bytes) -> None:
    assert decode_notice(payload) is None or isinstance(CODECS[NOTICE.name].decode(payload), ChunkNotice)


@pytest.mark.parametrize(
    "payload",
    [b"\x81\xa4type\xa2\xff\xfe", b"\x81\xa1\xcb\x01", b"\x81\xa1x" + b"\x91" * 50_000],
    ids=["value", "key", "nested"],
)
def test_a_notice_whose_text_is_no_text_or_nested_beyond_any_stack_is_none(payload: bytes) -> None:
    assert decode_notice(payload) is None


@given(messages_of(ChunkNotice), st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_notice_is_a_notice_or_none(notice: ChunkNotice, data: st.DataObject) -> None:
    payload = bytearray(encode_notice(notice))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    found = decode_notice(bytes(payload))
    assert found is None or isinstance(found, ChunkNotice)


@pytest.mark.parametrize("name", WireLimits.__slots__)
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        WireLimits(**{name: 0})
