"""The canary: without the fence, a writer that was stopped past its deadline spoils the pages of another request, and the
watermarks tell. With it, nothing is spoilt."""

import pytest

from headstart.core.arrays import Int32Array
from headstart.kv.cache import PrefixCache
from headstart.sim.client import Handle
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import oracle
from headstart.sim.world import World
from headstart.transfer.loopback import Fate

WRITTEN_TOO_LATE = "holds another sequence's KV|changed while a step read it|was written while a step wrote it"


class Unfenced(PrefixCache):
    """A page that a peer may still write is nobody's as soon as its request has left."""

    def open_write(self, pages: Int32Array) -> None: ...

    def close_write(self, pages: Int32Array) -> None: ...


def stop_the_writer_past_its_deadline(world: World) -> Handle:
    """Its writes are in the air, their request has ended, and another uses the pool when the writer goes on."""
    world.run_for(0.1)
    world.judge_writes(lambda posted: Fate(delay_s=1.0))
    left = world.submit(world.request(range(41), deadline_s=0.5))
    world.run_for(0.2)
    assert world.links.num_open_writes()
    world.stall("prefill-0")
    world.run_for(3.5)
    assert left.is_done  # at half its time it went on without the writer, onto new pages
    other = world.submit(world.request(range(30, 90), 8))
    world.run_until(lambda: len(other.tokens) == 2)
    world.judge_writes(lambda posted: Fate())
    world.resume("prefill-0")
    return other


def test_a_writer_stopped_past_its_deadline_leaves_every_watermark_intact_when_it_goes_on() -> None:
    world = World(WorldSpec(decode_pages=32))
    other = stop_the_writer_past_its_deadline(world)
    while not (other.is_done and world.is_quiet()):
        world.step()
        world.check()
    assert other.tokens == oracle(other.request.prompt, 8, world.spec.vocab_size)
    world.check_idle()


def test_with_the_fence_removed_the_same_writer_is_caught_by_the_watermarks() -> None:
    world = World(WorldSpec(decode_pages=32), make_cache=Unfenced)
    stop_the_writer_past_its_deadline(world)
    with pytest.raises(AssertionError, match=WRITTEN_TOO_LATE):
        world.finish()
