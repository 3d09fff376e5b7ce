"""Who may ask for what, and for how much at once."""

import asyncio

import pytest

from headstart.core.identity import cache_owner
from headstart.gateway.api.auth import KeyRing, Tenant
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.state import HttpLimits
from tests.support.scripted_gateway import ScriptedWorld, chat_body, completion_body, run, saying
from tests.support.steady import PATIENCE_S

CHAT = "/v1/chat/completions"
ADMIN_PATHS = (("GET", "/cluster"), ("GET", "/metrics"), ("POST", "/flush_cache"), ("GET", "/flush_cache"))


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def statuses(ring, key=None):
    """What each admin path answers to `key`."""

    async def go():
        world = ScriptedWorld(keys=ring)
        async with world.client(headers=bearer(key) if key else {}) as http:
            return {(await http.request(method, path)).status_code for method, path in ADMIN_PATHS}

    return run(go())


@pytest.mark.behaviour("O5")
def test_without_keys_this_machine_alone_may_operate_the_server():
    assert statuses(KeyRing((), is_local=True)) == {200}
    assert statuses(KeyRing((), is_local=False)) == {403}
    assert statuses(KeyRing((), is_local=False), "a guess") == {403}


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.behaviour("O5")
def test_where_keys_are_set_only_the_admin_key_operates_the_server(is_local):
    ring = KeyRing(("alpha",), "operator", is_local=is_local)
    assert statuses(ring) == {401}
    assert statuses(ring, "nobody's") == {401}
    assert statuses(ring, "alpha") == {403}
    assert statuses(ring, "operator") == {200}
    assert statuses(KeyRing(("alpha",), is_local=is_local), "alpha") == {403}


def test_an_admin_key_alone_guards_operation_and_leaves_generation_open():
    async def go():
        world = ScriptedWorld(keys=KeyRing((), "operator"))
        async with world.client() as http:
            assert (await http.post(CHAT, json=chat_body())).status_code == 200
            assert (await http.get("/cluster")).status_code == 401
            assert (await http.get("/cluster", headers=bearer("operator"))).status_code == 200

    run(go())


def test_a_refused_operation_changes_nothing_and_says_which_key_it_needs():
    async def go():
        world = ScriptedWorld(keys=KeyRing(("alpha",), "operator"))
        async with world.client(headers=bearer("alpha")) as http:
            reply = await http.post("/flush_cache")
        assert reply.json()["error"]["code"] == "admin_key_needed"
        assert reply.json()["error"]["type"] == "permission_error"
        assert world.flushes == 0

    run(go())


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_a_page_of_another_site_cannot_operate_a_server_that_trusts_its_machine(site, status):
    async def go():
        world = ScriptedWorld()
        async with world.client(headers={"Sec-Fetch-Site": site}) as http:
            for method, path in ADMIN_PATHS:
                assert (await http.request(method, path)).status_code == status
        assert bool(world.flushes) == (status == 200)

    run(go())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("rebound.example:8000", 403),
        ("127.0.0.1.rebound.example", 403),
        ("localhost@rebound.example", 403),
        ("[::1", 403),
    ],
)
def test_a_foreign_name_that_leads_to_a_trusted_machine_gains_its_pages_nothing(host, status):
    async def go():
        world = ScriptedWorld()
        async with world.client(headers={"Host": host, "Sec-Fetch-Site": "same-origin"}) as http:
            for method, path in ADMIN_PATHS:
                assert (await http.request(method, path)).status_code == status
        assert bool(world.flushes) == (status == 200)
        keyed = ScriptedWorld(keys=KeyRing((), "operator"))
        async with keyed.client(headers={"Host": host, **bearer("operator")}) as http:
            assert (await http.get("/cluster")).status_code == 200

    run(go())


def test_the_admin_key_is_a_tenant_of_its_own():
    async def go():
        world = ScriptedWorld(keys=KeyRing(("alpha",), "operator"))
        async with world.client() as http:
            for key in ("alpha", "operator"):
                assert (await http.post(CHAT, json=chat_body(), headers=bearer(key))).status_code == 200
        alpha, operator = (cache_owner(request.namespace) for request in world.requests)
        assert alpha != operator

    run(go())


def test_whatever_a_client_salts_its_cache_with_it_stays_its_own_for_quotas():
    alpha, beta = Tenant(b"alpha"), Tenant(b"beta")
    namespaces = [alpha.namespace(salt) for salt in ("", "a", "b", "\ud800")]
    assert len(set(namespaces)) == 4
    assert {cache_owner(namespace) for namespace in namespaces} == {cache_owner(alpha.namespace(""))}
    assert cache_owner(beta.namespace("")) != cache_owner(alpha.namespace(""))
    assert beta.namespace("a") not in namespaces


# ---- quotas ----------------------------------------------------------------------------------------------------------


async def opened(world, http, count, **kwargs):
    """`count` requests that the worker holds after a token."""
    before = len(world.requests)
    tasks = [asyncio.create_task(http.post(CHAT, json=chat_body(), **kwargs)) for _ in range(count)]
    while len(world.requests) < before + count:
        await asyncio.sleep(0)
    return tasks


def test_a_key_with_as_many_requests_open_as_it_may_have_is_told_to_wait_and_others_are_not():
    async def go():
        world = ScriptedWorld(keys=("alpha", "beta"))
        world.state.generations.max_per_tenant = 2
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            held = await opened(world, http, 2, headers=bearer("alpha"))
            salted = await http.post(CHAT, json=chat_body(cache_salt="x"), headers=bearer("alpha"))
            assert salted.status_code == 429
            assert salted.headers["retry-after"] == "1"
            assert salted.json()["error"]["code"] == "busy"
            assert salted.json()["error"]["type"] == "rate_limit_error"
            others = await opened(world, http, 2, headers=bearer("beta"))
            for task in (*held, *others):
                task.cancel()
            await asyncio.gather(*held, *others, return_exceptions=True)
            world.script = saying("Hello world.")
            while world.state.generations.open:
                await asyncio.sleep(0)
            assert (await http.post(CHAT, json=chat_body(), headers=bearer("alpha"))).status_code == 200
        assert not world.state.generations._num_open

    run(go())


def test_every_choice_counts_and_more_than_a_key_may_ever_have_is_its_own_mistake():
    async def go():
        world = ScriptedWorld()
        world.state.generations.max_per_tenant = 3
        async with world.client() as http:
            assert (await http.post("/v1/completions", json=completion_body(n=3))).status_code == 200
            too_many = await http.post("/v1/completions", json=completion_body(["a", "b"], n=2))
            assert too_many.status_code == 400
            assert too_many.json()["error"]["param"] == "n"
            world.script = saying("Hello world.", hold_after=1)
            (held,) = await opened(world, http, 1)
            assert (await http.post("/v1/completions", json=completion_body(n=3))).status_code == 429
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)

    run(go())


def test_however_a_request_ends_its_place_is_free_again():
    async def go():
        world = ScriptedWorld()
        world.state.generations.max_per_tenant = 1
        async with world.client() as http:
            for body, status in (
                (chat_body(), 200),
                (chat_body(stream=True), 200),
                (chat_body(temperature=9), 400),
                (chat_body(n=2), 400),
            ):
                assert (await http.post(CHAT, json=body)).status_code == status
            world.script = saying("Hello world.", fail_after=1)
            assert (await http.post(CHAT, json=chat_body())).status_code == 500
            world.script = saying("Hello world.", hold_after=1)
            assert (await http.post(CHAT, json=chat_body(deadline_s=0.05))).status_code == 504
            world.script = saying("Hello world.")
            assert (await http.post(CHAT, json=chat_body())).status_code == 200
        assert not world.state.generations._num_open

    run(go())


def test_long_prompts_that_wait_are_bounded_in_sum_and_one_alone_is_always_taken():
    async def go():
        world = ScriptedWorld()
        world.state.generations.max_prompt_tokens = 100
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            first = asyncio.create_task(http.post("/v1/completions", json=completion_body([5] * 200)))
            while not world.requests:
                await asyncio.sleep(0)
            second = await http.post("/v1/completions", json=completion_body([5]))
            assert second.status_code == 429
            assert second.headers["retry-after"] == "1"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            world.script = saying("Hello world.")
            assert (await http.post("/v1/completions", json=completion_body([5], n=2))).status_code == 200

    run(go())


def test_overload_is_told_to_come_back_and_what_was_taken_is_served():
    async def go():
        world = ScriptedWorld(dispatch=DispatchLimits(max_unfinished=20))
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            flood = [asyncio.create_task(http.post(CHAT, json=chat_body(deadline_s=30))) for _ in range(200)]
            while sum(task.done() for task in flood) < 180:
                await asyncio.sleep(0)
            refused = [task.result() for task in flood if task.done()]
            assert {(reply.status_code, reply.headers["retry-after"]) for reply in refused} == {(429, "1")}
            assert world.dispatcher.num_unfinished == len(world.requests) == 20
            while not all(choice.tokens for choice in world.dispatcher.iter_choices()):
                await asyncio.sleep(0)
            for request in world.requests:
                world.say_finished(request)
            served = await asyncio.gather(*(task for task in flood if not task.done()))
            assert {reply.status_code for reply in served} == {200}
            assert len(served) == 20

    run(go())


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_in_time_is_a_408():
    async def go():
        world = ScriptedWorld(limits=HttpLimits(body_timeout_s=0.05))
        reply = await ask(world, [{"type": "http.request", "body": b'{"a":', "more_body": True}])
        assert reply["status"] == 408
        assert (b"connection", b"close") in [(name.lower(), value) for name, value in reply["headers"]]

    run(go())


async def ask(world, messages, path=CHAT, arrived=None, key=None):
    """The start of the answer to a request whose body comes as `messages`, and after these nothing."""
    coming = list(messages)
    started = asyncio.get_running_loop().create_future()

    async def receive():
        if coming:
            return coming.pop(0)
        if arrived is not None:
            arrived.set()
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.start":
            started.set_result(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "headers": []}
    scope |= {"path": path, "raw_path": b"", "query_string": b"", "scheme": "http"}
    if key is not None:
        scope["headers"] = [(b"authorization", b"Bearer " + key.encode())]
    serving = asyncio.create_task(world.app(scope, receive, send))
    try:
        return await asyncio.wait_for(started, PATIENCE_S)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_many_large_bodies_at_once_are_refused_before_they_fill_the_memory():
    async def go():
        world = ScriptedWorld(limits=HttpLimits(max_body_bytes=1000, max_read_bytes=2500))
        part = {"type": "http.request", "body": b" " * 900, "more_body": True}
        arrived = [asyncio.Event(), asyncio.Event()]
        slow = [asyncio.create_task(ask(world, [part], arrived=event)) for event in arrived]
        for event in arrived:
            await event.wait()
        assert (await ask(world, [part]))["status"] == 429
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        async with world.client() as http:
            assert (await http.post(CHAT, json=chat_body())).status_code == 200

    run(go())


def test_slow_uploads_of_one_key_leave_room_for_those_of_others():
    async def go():
        world = ScriptedWorld(("alpha", "beta"), limits=HttpLimits(max_body_bytes=1000, max_read_bytes=4000))
        part = {"type": "http.request", "body": b" " * 900, "more_body": True}
        arrived = [asyncio.Event() for _ in range(2)]
        slow = [asyncio.create_task(ask(world, [part], arrived=event, key="alpha")) for event in arrived]
        for event in arrived:
            await event.wait()
        for path in (CHAT, "/tokenize"):
            assert (await ask(world, [part], path, key="alpha"))["status"] == 429
        async with world.client(headers=bearer("beta")) as http:
            assert (await http.post(CHAT, json=chat_body())).status_code == 200
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        async with world.client(headers=bearer("alpha")) as http:
            assert (await http.post(CHAT, json=chat_body())).status_code == 200

    run(go())


@pytest.mark.parametrize("reason", ["no key", "key with enough open", "full", "draining"])
def test_a_request_without_a_place_is_refused_before_its_body_is_read(reason):
    async def go():
        keys, most = (("alpha",) if reason == "no key" else ()), (1 if reason == "full" else 9)
        world = ScriptedWorld(keys, dispatch=DispatchLimits(max_unfinished=most))
        status = {"no key": 401, "key with enough open": 429, "full": 429, "draining": 503}[reason]
        if reason == "key with enough open":
            world.state.generations.max_per_tenant = 1
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            held = [] if reason == "no key" else await opened(world, http, 1)
            world.state.generations.is_draining = reason == "draining"
            reply = await ask(world, [])
            assert reply["status"] == status
            if status != 401:
                assert (b"retry-after", b"1") in reply["headers"]
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    run(go())
