"""Clients that open connections and say nothing, too slowly or too much."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import h11
import pytest
import uvicorn

from headstart.gateway.api.sse import WRITE_CHUNK
from headstart.worker.http_protocol import ConnectionLimits, TimeoutH11Protocol, connection_limits
from tests.unit.steady import PATIENCE_S, run_steadily

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT = ConnectionLimits(max_connections=50, head_timeout_s=0.2, read_timeout_s=0.2)
LARGE = b"x" * (16 << 20)  # more than the kernel takes off our hands


async def leave(receive, left: list[str]) -> None:
    """Note that the client of this request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    left.append("left")


async def stream_events(scope, send, num_events: int) -> None:
    """By the extension, if it is offered: as the gateway does."""
    write_chunk = scope.get("extensions", {}).get(WRITE_CHUNK)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for index in range(num_events):
        event = b"data: %d\n\n" % index
        if write_chunk is None or not write_chunk(event):
            await send({"type": "http.response.body", "body": event, "more_body": True})


LEFT: list[str] = []


async def app(scope, receive, send) -> None:
    if scope["path"].startswith("/until-left"):
        if scope["path"].endswith("stream"):
            await stream_events(scope, send, 2)
        await leave(receive, LEFT)
        return
    if scope["path"] == "/events":
        await stream_events(scope, send, 20)
        await send({"type": "http.response.body", "body": b"data: last\n\n"})
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * SHORT.head_timeout_s)
    body = LARGE if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    protocol = partial(TimeoutH11Protocol, limits)
    size = limits.max_head_bytes
    config = uvicorn.Config(app, http=protocol, h11_max_incomplete_event_size=size, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await task


def with_server(
    limits: ConnectionLimits, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> None:
    async def go() -> None:
        async with serving(limits) as port, asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await talk(reader, writer)
            writer.close()

    run_steadily(go())


async def is_hung_up_on(reader: asyncio.StreamReader) -> bool:
    """Nothing comes but the end: a reset, where something was under way to the server."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def write_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_does_not_finish_its_head_is_hung_up_on(said: bytes) -> None:
    async def talk(reader, writer) -> None:
        writer.write(said)
        assert await is_hung_up_on(reader)

    with_server(SHORT, talk)


def test_a_client_that_sends_a_byte_now_and_then_gains_no_time() -> None:
    async def talk(reader, writer) -> None:
        reading = asyncio.create_task(is_hung_up_on(reader))
        sent = 0
        while not reading.done():
            writer.write(b"G" if sent == 0 else b"E")
            sent += 1
            await asyncio.wait([reading], timeout=0.02)
        assert sent > 5
        assert reading.result()

    with_server(SHORT, talk)


def test_a_client_that_has_asked_may_wait_longer_for_its_answer_than_for_its_question() -> None:
    async def talk(reader, writer) -> None:
        for _ in range(2):
            writer.write(GET.replace(b"/ ", b"/slow ", 1))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    with_server(SHORT, talk)


def test_the_time_starts_anew_for_the_head_of_the_next_request() -> None:
    async def talk(reader, writer) -> None:
        writer.write(GET + b"GET /")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b" HTTP/1.1\r\n")
        assert await is_hung_up_on(reader)

    with_server(SHORT, talk)


def test_a_client_that_drips_the_body_of_an_answered_request_gains_no_time() -> None:
    async def talk(reader, writer) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        reading = asyncio.create_task(is_hung_up_on(reader))
        while not reading.done():
            writer.write(b"x")
            await asyncio.wait([reading], timeout=0.02)
        assert reading.result()

    with_server(SHORT, talk)


def test_a_body_that_ends_after_its_answer_keeps_the_connection() -> None:
    async def talk(reader, writer) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"xxx" + GET)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    with_server(SHORT, talk)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n", b"Content-Length: 9\r\n"])
def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection(more: bytes) -> None:
    async def talk(reader, writer) -> None:
        writer.transport.pause_reading()
        writer.write(GET.replace(b"/ ", b"/large ", 1).replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n"))
        with pytest.raises(ConnectionError):
            await write_for_ever(writer)

    with_server(SHORT, talk)


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it() -> None:
    async def talk(reader, writer) -> None:
        loop = asyncio.get_running_loop()
        writer.write(GET.replace(b"/ ", b"/large ", 1))
        await reader.readuntil(b"\r\n\r\n")
        began, left = loop.time(), len(LARGE)
        while left:
            left -= len(await reader.read(1 << 16))
            await asyncio.sleep(0.002)
        assert loop.time() - began > SHORT.read_timeout_s

    with_server(SHORT, talk)


def test_headers_beyond_the_limit_are_a_400() -> None:
    async def talk(reader, writer) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")

    with_server(ConnectionLimits(max_connections=5), talk)


def test_one_connection_too_many_is_a_503_at_once_and_the_others_go_on() -> None:
    async def go() -> None:
        async with serving(ConnectionLimits(max_connections=3)) as port, asyncio.timeout(PATIENCE_S):
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in head.lower()
            assert json.loads(body)["error"]["code"] == "unavailable"
            for other_reader, other_writer in first:
                other_writer.write(GET)
                assert (await other_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                other_writer.close()
            writer.close()

    run_steadily(go())


def test_there_are_descriptors_left_beside_all_clients() -> None:
    import resource

    assert 0 < connection_limits().max_connections < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---- clients that send no more ---------------------------------------------------------------------------------------------


EVENTS = b"".join(b"data: %d\n\n" % index for index in range(20)) + b"data: last\n\n"


def body_of(answer: bytes) -> bytes:
    """The body of the one final response in `answer`, as h11's client reads it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    client.receive_data(b"")
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.InformationalResponse | h11.Response | h11.Data), event
        if isinstance(event, h11.Response):
            assert event.status_code == 200
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    return body


@pytest.mark.parametrize(("path", "body"), [(b"/", b"ok"), (b"/slow", b"ok"), (b"/events", EVENTS)])
def test_a_client_that_shuts_down_its_sending_half_gets_its_whole_answer(path: bytes, body: bytes) -> None:
    async def talk(reader, writer) -> None:
        writer.write(GET.replace(b"/ ", path + b" ", 1))
        writer.write_eof()
        assert body_of(await reader.read()) == body

    with_server(SHORT, talk)


def test_chunks_past_h11_are_framed_as_its_own_are_and_the_connection_stays() -> None:
    async def talk(reader, writer) -> None:
        for _ in range(2):
            writer.write(GET.replace(b"/ ", b"/events ", 1))
            assert body_of(await reader.readuntil(b"0\r\n\r\n")) == EVENTS

    with_server(SHORT, talk)


def test_an_old_client_gets_events_until_the_connection_ends() -> None:
    async def talk(reader, writer) -> None:
        writer.write(b"GET /events HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == EVENTS

    with_server(SHORT, talk)


@pytest.mark.parametrize("path", [b"/until-left", b"/until-left/stream"])
def test_a_client_that_has_left_for_good_is_noticed_although_it_looks_like_one_that_sends_no_more(path: bytes) -> None:
    LEFT.clear()

    async def talk(reader, writer) -> None:
        writer.write(GET.replace(b"/ ", path + b" ", 1))
        if path.endswith(b"stream"):
            await reader.readuntil(b"data: 1\n\n\r\n")
        writer.close()
        while not LEFT:
            await asyncio.sleep(0.01)

    with_server(SHORT, talk)


def test_a_client_that_ends_in_the_middle_of_its_body_is_hung_up_on() -> None:
    async def talk(reader, writer) -> None:
        writer.write(b"POST /until-left HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        writer.write_eof()
        assert await is_hung_up_on(reader)

    with_server(SHORT, talk)
