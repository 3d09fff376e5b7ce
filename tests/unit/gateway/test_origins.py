"""Pages of other sites in a visitor's browser, and the ids and lines that requests leave behind."""

import json
import logging

import pytest

from headstart.config.errors import ConfigError
from headstart.config.settings import HttpSettings
from headstart.gateway.api.auth import KeyRing
from headstart.gateway.state import HttpLimits

from .scripted import ScriptedWorld, chat_body, completion_body, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EVIL, GOOD, HERE = "https://evil.example", "https://good.example", "http://localhost"
ROUTES = [
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/small"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("GET", "/cluster"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/openapi.json"),
]


def ask(method, path, headers, world=None, **kwargs):
    world = world or ScriptedWorld()

    async def go():
        async with world.client() as http:
            return await http.request(method, path, headers=headers, **kwargs)

    return run(go()), world


def world_for(*origins, **kwargs):
    return ScriptedWorld(limits=HttpLimits(cors_origins=origins), **kwargs)


# ---- without --cors-origins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"origin": EVIL}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (COMPLETIONS, completion_body())])
def test_a_page_of_another_site_makes_nobody_generate(path, body, kind, headers):
    reply, world = ask("POST", path, {**headers, "content-type": kind}, content=json.dumps(body))
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "cross_site"
    assert not world.requests


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("headers", [{"origin": EVIL}, {"origin": "null"}, {"sec-fetch-site": "same-site"}])
def test_a_page_of_another_site_flushes_nothing(method, headers):
    reply, world = ask(method, "/flush_cache", headers)
    assert reply.status_code == 403
    assert not world.flushes


@pytest.mark.parametrize(
    "headers", [{}, {"origin": HERE}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}]
)
def test_programs_and_our_own_pages_are_served_whatever_type_they_state(headers):
    stated = {**headers, "content-type": "text/plain"}
    reply, world = ask("POST", COMPLETIONS, stated, content=json.dumps(completion_body()))
    assert reply.status_code == 200, reply.text
    assert ask("POST", "/flush_cache", headers, world)[0].status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_answer_invites_other_sites_unless_asked_to(method, path):
    reply, _ = ask(method, path, {"origin": EVIL})
    assert "access-control-allow-origin" not in reply.headers


# ---- with it ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_preflight_requests_are_answered_on_every_route(method, path):
    headers = {
        "origin": GOOD,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type",
    }
    reply, _ = ask("OPTIONS", path, headers, world_for(GOOD))
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == GOOD
    assert method in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()
    refused, _ = ask("OPTIONS", path, {**headers, "origin": EVIL}, world_for(GOOD))
    assert refused.headers.get("access-control-allow-origin") != EVIL


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_of_an_allowed_site_gets_answers_and_errors_that_it_may_read(stream):
    headers = {"origin": GOOD, "sec-fetch-site": "cross-site"}
    for body, status in ((chat_body(stream=stream), 200), (chat_body(n=0), 400)):
        reply, _ = ask("POST", CHAT, headers, world_for(GOOD), json=body)
        assert reply.status_code == status, reply.text
        assert reply.headers["access-control-allow-origin"] == GOOD
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
    assert ask("POST", CHAT, {"origin": EVIL}, world_for(GOOD), json=chat_body())[0].status_code == 403


def test_all_sites_may_generate_but_operate_only_with_a_key():
    headers = {"origin": EVIL, "sec-fetch-site": "cross-site"}
    assert ask("POST", CHAT, headers, world_for("*"), json=chat_body())[0].status_code == 200
    assert ask("POST", "/flush_cache", headers, world_for("*"))[0].status_code == 403
    guarded = world_for("*", keys=KeyRing((), "operator"))
    with_key = {**headers, "authorization": "Bearer operator"}
    assert ask("POST", "/flush_cache", with_key, guarded)[0].status_code == 200


@pytest.mark.parametrize(
    "text", ["example.org", "https://", "https://example.org/", "ftp://example.org", "https://a,,"]
)
def test_what_is_no_origin_is_refused_at_start(text):
    with pytest.raises(ConfigError, match="--cors-origins"):
        HttpSettings(cors_origins=text)


def test_origins_are_separated_by_commas():
    assert HttpSettings(cors_origins="https://a.example, http://b:8080").origins == (
        "https://a.example",
        "http://b:8080",
    )
    assert HttpSettings().origins == ()


# ---- ids and lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/nowhere"), ("GET", CHAT)])
def test_every_answer_has_an_id_of_its_own_or_the_clients(method, path):
    first, second = (ask(method, path, {})[0].headers["x-request-id"] for _ in range(2))
    assert first
    assert second
    assert first != second
    assert ask(method, path, {"x-request-id": "client-7"})[0].headers["x-request-id"] == "client-7"


@pytest.mark.parametrize("given", ["", "x" * 129, "b\xe4h", "tab\there"])
def test_an_id_that_is_too_long_or_not_printable_is_replaced(given):
    reply, _ = ask("GET", "/health", [(b"x-request-id", given.encode("latin-1"))])
    assert reply.headers["x-request-id"].startswith("req-")


def test_a_bug_of_ours_has_the_id_that_the_log_has():
    world = ScriptedWorld()
    world.app.add_api_route("/bug", lambda: 1 / 0)
    reply, _ = ask("GET", "/bug", {"x-request-id": "client-9"}, world)
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "client-9")


def lines_of(caplog, *, is_on):
    caplog.set_level(logging.INFO, logger="headstart.gateway.requests")
    world = ScriptedWorld(limits=HttpLimits(log_requests=is_on))
    secret = "a secret prompt"
    ask("POST", f"{CHAT}?key=secret-query", {"x-request-id": "client-1"}, world, json=chat_body(secret))
    ask("GET", "/nowhere", {"x-request-id": "client-2"}, world)
    return [record for record in caplog.records if record.name == "headstart.gateway.requests"]


def test_log_requests_leaves_a_line_for_each_answer_and_no_prompt(caplog):
    lines = lines_of(caplog, is_on=True)
    assert [(one.request_id, one.method, one.path, one.status) for one in lines] == [
        ("client-1", "POST", CHAT, 200),
        ("client-2", "GET", "/nowhere", 404),
    ]
    assert all(one.seconds >= 0 for one in lines)
    assert "secret" not in str([one.__dict__ for one in lines])


def test_no_lines_are_left_unless_asked_for(caplog):
    assert not lines_of(caplog, is_on=False)


def test_a_path_that_is_not_there_and_a_method_that_it_does_not_take_are_named():
    reply, _ = ask("GET", "/v1/nowhere", {})
    assert "'/v1/nowhere'" in reply.json()["error"]["message"]
    reply, _ = ask("DELETE", CHAT, {})
    assert reply.status_code == 405
    assert "DELETE" in reply.json()["error"]["message"]
    assert CHAT in reply.json()["error"]["message"]
