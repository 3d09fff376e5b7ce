"""What the API's own document says, and whether the server keeps to it whatever is sent."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from msgspec import to_builtins
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup

from headstart.gateway.api.auth import KeyRing
from headstart.gateway.api.openapi import describe
from tests.support.scripted_gateway import MODEL, ScriptedWorld, run

DOCUMENT = to_builtins(describe(MODEL, asks_for_keys=True, asks_for_admin_key=True))
OPERATIONS = [(method.upper(), path) for path, operations in DOCUMENT["paths"].items() for method in operations]
MODES = {"as described": GenerationMode.POSITIVE, "otherwise": GenerationMode.NEGATIVE}
LEFT_OUT = {
    "not_a_server_error",  # a deadline may be a microsecond, and is then a 504; a 500 is refused below
    "positive_data_acceptance",  # what a document cannot say is refused too: lengths in tokens, pairs of fields
    "negative_data_rejection",  # null means "left out" and whole floats are integers: more is taken than is described
}
load_all_checks()
CHECKED = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in LEFT_OUT]


@contextmanager
def served(world: ScriptedWorld) -> Iterator[str]:
    """The app behind a real server in a thread of its own; yields its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # who connects before the thread has begun waits for it
    server = uvicorn.Server(uvicorn.Config(world.app, log_config=None, access_log=False, lifespan="off"))

    async def serve() -> None:
        async with world.client():
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def fuzz(method: str, path: str, mode: str, num_examples: int, document: dict[str, Any] = DOCUMENT) -> ScriptedWorld:
    """Send what the document describes, or what it does not, and hold every answer to it."""
    world = ScriptedWorld(keys=KeyRing(("alpha",), "operator"))
    operation = schemathesis.openapi.from_dict(document)[path][method]
    with served(world) as url, requests.Session() as session:

        @settings(
            max_examples=num_examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(MODES[mode]))
        def keeps_to_it(case: schemathesis.Case) -> None:
            headers = {"Authorization": "Bearer operator"}
            answer = case.call_and_validate(base_url=url, session=session, headers=headers, checks=CHECKED, timeout=30)
            assert answer.status_code in (504, *range(500)), answer.text

        keeps_to_it()
    return world


def is_fuzzable(method: str, path: str, mode: str) -> bool:
    """An operation without parameters has nothing that could be sent otherwise."""
    return mode == "as described" or (method == "POST" and path != "/flush_cache")


CASES = [(*operation, mode) for operation in OPERATIONS for mode in MODES if is_fuzzable(*operation, mode)]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_one_that_the_document_describes(method: str, path: str, mode: str) -> None:
    world = fuzz(method, path, mode, num_examples=10)
    assert world.dispatcher.num_unfinished == 0
    assert not world.state.generations.open


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "path", "mode"), [case for case in CASES if case[0] == "POST" and case[1] != "/flush_cache"]
)
def test_every_answer_is_one_that_the_document_describes_at_length(method: str, path: str, mode: str) -> None:
    world = fuzz(method, path, mode, num_examples=150)
    assert world.dispatcher.num_unfinished == 0
    assert not world.state.generations.open


@pytest.mark.parametrize("status", ["200", "400"])
def test_an_answer_that_is_not_described_would_be_found(status: str) -> None:
    document = deepcopy(DOCUMENT)
    del document["paths"]["/tokenize"]["post"]["responses"][status]
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        fuzz("POST", "/tokenize", "as described" if status == "200" else "otherwise", 10, document)


def test_every_path_of_the_server_is_described() -> None:
    routes = {(method, route.path) for route in ScriptedWorld().app.routes for method in route.methods - {"HEAD"}}
    served_paths = {(method, path.replace("{name:path}", "{name}")) for method, path in routes}
    own = {"/docs", "/redoc", "/docs/oauth2-redirect", "/openapi.json"}
    assert {entry for entry in served_paths if entry[1] not in own} == {
        entry for entry in OPERATIONS if entry[1] not in own
    }


@pytest.mark.parametrize("keys", [KeyRing(()), KeyRing(("alpha",), "operator")])
def test_the_document_says_which_keys_are_asked_for(keys: KeyRing) -> None:
    async def go():
        world = ScriptedWorld(keys=keys)
        async with world.client() as http:
            return (await http.get("/openapi.json")).json()

    paths = run(go())["paths"]
    asks = {path for path in paths if any("security" in operation for operation in paths[path].values())}
    public = {"/health", "/ready", "/openapi.json"}
    assert asks == (paths.keys() - public if keys.asks_for_keys else set())
