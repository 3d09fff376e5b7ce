"""The app behind a real HTTP server on a real socket: what in-process transports cannot show."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import httpx
import uvicorn

from headstart.gateway.state import HttpLimits
from tests.support.scripted_gateway import Script, ScriptedWorld, chat_body, run, saying
from tests.support.small_tokenizers import byte_level
from tests.support.steady import PATIENCE_S


@asynccontextmanager
async def serving(world):
    """The app on a free port, yielding that port."""
    listener = socket.socket()
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384
    )  # inherited: what a client leaves unread shows soon
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(world.app, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    async with world.client():
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = server.force_exit = True
        await task


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def send_raw(port, data):
    """Everything the server answers to `data` until it closes or pauses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.5):
            while chunk := await reader.read(65536):
                answer += chunk
    writer.close()
    return answer


def test_bytes_that_are_no_http_do_not_hurt_the_server():
    async def go():
        world = ScriptedWorld()
        async with serving(world) as port:
            for data in (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00",
                b"\x16\x03\x01\x02\x00",
                b"\x80\x04\x95pickle",
            ):
                answer = await send_raw(port, data)
                assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/health")).status_code == 200

    run(go())


def test_a_body_of_fifty_megabytes_gets_its_413_over_a_socket():
    async def go():
        world = ScriptedWorld()
        async with serving(world) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            stated = await http.post("/v1/chat/completions", content=b"x" * (50 << 20))

            async def chunks():
                for _ in range(50):
                    yield b"x" * (1 << 20)

            unstated = await http.post("/v1/chat/completions", content=chunks())
            assert stated.status_code == unstated.status_code == 413
            assert stated.json()["error"]["code"] == "body_too_large"
            assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 200

    run(go())


def test_a_client_that_hangs_up_cancels_its_request_before_and_after_the_first_token():
    async def go():
        world = ScriptedWorld()
        async with serving(world) as port:
            for tokens, stream in ((0, False), (0, True), (3, True), (3, False)):
                world.script = saying("Hello world, how are you?", hold_after=tokens)
                body = json.dumps(chat_body(stream=stream)).encode()
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await until(lambda: world.dispatcher.num_unfinished == 1)
                await until(lambda: all(len(c.tokens) == tokens for c in world.dispatcher.iter_choices()))  # noqa: B023
                writer.close()
                await until(lambda: world.dispatcher.num_unfinished == 0)
        assert len(world.cancelled) == 4
        assert not world.state.generations.open

    run(go())


def test_a_client_that_stops_reading_is_cancelled_and_loses_its_place_and_one_that_reads_does_not():
    async def go():
        world = ScriptedWorld(limits=HttpLimits(max_buffered_events=64, send_timeout_s=0.5))
        world.script = Script(byte_level().encode("a") * 400, ends_with_eos=False, pace_s=0.001)
        wanted = chat_body(stream=True, logprobs=True, top_logprobs=20, max_tokens=400)
        async with serving(world) as port:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                reply = await http.post("/v1/chat/completions", json=wanted)
            assert reply.text.endswith("data: [DONE]\n\n")
            assert not world.cancelled
            body = json.dumps(wanted).encode()
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
            client.connect(("127.0.0.1", port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: len(world.requests) == 2)
            await until(lambda: world.dispatcher.num_unfinished == 0)
            assert world.cancelled
            await until(lambda: not world.state.generations.open)
            client.close()

    run(go())


def test_streams_arrive_while_they_are_made():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world, how are you?", hold_after=3)
        async with serving(world) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            async with http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as reply:
                assert reply.status_code == 200
                assert reply.headers["content-type"].startswith("text/event-stream")
                seen = ""
                async for line in reply.aiter_lines():
                    seen += line
                    if seen.count('"content"') >= 4:
                        break
            await until(lambda: world.dispatcher.num_unfinished == 0)

    run(go())


def test_open_streams_end_with_an_error_event_when_the_server_gives_them_up():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world, how are you?", hold_after=3)
        async with serving(world) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
            await until(lambda: any(len(c.tokens) == 3 for c in world.dispatcher.iter_choices()))
            world.state.generations.is_draining = True
            world.state.generations.abandon()
            reply = await asking
        events = [event for event in reply.text.split("\n\n") if event]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"

    run(go())
