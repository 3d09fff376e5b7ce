"""Small worlds, and what every test says of their requests."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from headstart.core.request import RequestStats
from headstart.kv.cache import PageCounts
from headstart.scheduler.limits import DecodeLimits, PrefillLimits
from headstart.sim.client import Handle
from headstart.sim.spec import SMALL_DECODE, SMALL_PREFILL, Timing, WorldSpec
from headstart.sim.watermarks import Draw, oracle
from headstart.sim.world import World

VOCAB = 97


def make_world(
    *,
    seed: int = 0,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    timing: dict[str, Any] | None = None,
    **spec: Any,
) -> World:
    """A world in which every worker has joined. Keywords replace fields of the spec and its parts."""
    assert {field.name for field in fields(PrefillLimits)} >= set(prefill or {})
    assert {field.name for field in fields(DecodeLimits)} >= set(decode or {})
    parts = {
        "prefill": replace(SMALL_PREFILL, **(prefill or {})),
        "decode": replace(SMALL_DECODE, **(decode or {})),
        "timing": Timing(**(timing or {})),
    }
    world = World(WorldSpec(**parts, **spec), seed)
    world.run_for(0.1)
    return world


def prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * i + 31 * first + i * i * first) % VOCAB for i in range(length)]


def expected(handle: Handle) -> list[int]:
    request = handle.request
    draw = Draw(request.sampling, request.ref.choice, request.stop.stop_token_ids, request.stop.min_new_tokens)
    return oracle(request.prompt, request.stop.max_new_tokens, VOCAB, request.namespace, draw)


def assert_right(*handles: Handle) -> None:
    """Each finished, with the oracle's output."""
    for handle in handles:
        assert handle.finished is not None, handle.failed
        assert handle.tokens == expected(handle)
        assert handle.finished.num_tokens == len(handle.tokens)


def submit(world: World, tokens: Iterable[int], max_new_tokens: int = 4, **changes: Any) -> Handle:
    """A greedy request, or one that differs in `changes` of its fields or its stop criteria."""
    request = world.request(tokens, max_new_tokens)
    stop = {name: changes.pop(name) for name in ("stop_token_ids", "min_new_tokens") if name in changes}
    return world.submit(structs.replace(request, stop=structs.replace(request.stop, **stop), **changes))


def serve(world: World, tokens: Iterable[int], max_new_tokens: int = 4, **changes: Any) -> Handle:
    """Submit one request and wait for its right answer."""
    handle = submit(world, tokens, max_new_tokens, **changes)
    world.finish()
    assert_right(handle)
    return handle


def stats(handle: Handle) -> RequestStats:
    assert handle.finished is not None, handle.failed
    return handle.finished.stats


def pages_moved(world: World, handle: Handle) -> int:
    num_pages, rest = divmod(stats(handle).bytes_moved, world.spec.page_bytes)
    assert rest == 0
    return num_pages


def settle(world: World) -> None:
    """Everything has ended, and nothing is held but the caches."""
    world.finish()
    world.run_until(world.is_quiet, limit_s=30.0)
    world.check_idle()


def pages(world: World, name: str = "decode-0") -> PageCounts:
    return world.workers[name].organs.cache.counts()


def state(world: World, handle: Handle) -> str:
    """Where the decode worker has a request: the name of its entry's type, or "gone"."""
    for worker in world.workers.values():
        entries = getattr(worker.organs.scheduler, "_queues", None)
        for ref, entry in entries.entries.items() if entries else ():
            if ref.request_id == handle.request.ref.request_id and ref.choice == handle.request.ref.choice:
                name = type(entry).__name__.lower()
                return "retracted" if getattr(entry, "retracted", False) else name
    return "gone"
