"""Where requests go: to the prefix unless the queue there is too long, and to the shortest queue otherwise."""

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.arrays import int32_array
from headstart.core.messages import Heartbeat, Join, Submit, WorkerLoad, WorkerRef
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import least_loaded
from headstart.gateway.prefix_index import PrefixIndex
from headstart.gateway.registry import Registry

from .world import SPEC, World, make_request

SHARED = list(range(2000))


def place(world, request_id, prompt):
    world.submit(request_id=request_id, prompt=prompt)
    return world.submitted()[0]


def spread(num_workers=2):
    world = World()
    return world, [str(world.join(f"decode-{i}", capacity=10_000)) for i in range(num_workers)]


def end(world, request_id):
    world.dispatcher.cancel(request_id)
    world.sent.clear()


def test_a_prompt_returns_to_the_worker_that_holds_its_prefix():
    world, _ = spread(4)
    home = place(world, "a", SHARED)
    end(world, "a")
    for i in range(10):
        assert place(world, f"b{i}", [*SHARED, 7, 8, 9, i]) == home
        end(world, f"b{i}")


def test_a_long_queue_outweighs_a_short_prefix():
    world, _ = spread()
    home = place(world, "a", SHARED[:256])
    for i in range(3):
        world.submit(request_id=f"busy{i}", prompt=SHARED[:256])
    world.sent.clear()
    assert place(world, "b", SHARED[:256]) != home


def test_what_was_generated_counts_as_held_too():
    world, _ = spread(4)
    world.submit(request_id="a", prompt=SHARED[:60], max_new=600)
    to, submit = world.submitted()
    worker = next(record.ref for record in world.dispatcher.registry.all() if str(record.ref) == to)
    world.emit(worker, submit.request.ref, 0, *SHARED[60:660])
    world.finish(worker, submit.request.ref, 600)
    assert {place(world, f"b{i}", SHARED[:700]) for i in range(1)} == {to}


def test_tenants_do_not_see_each_others_prefixes():
    index = PrefixIndex(chunk_len=4)
    ref = "decode-0#1"
    index.record(index.trail(b"a", int32_array(range(8))), ref)
    assert index.match(index.trail(b"a", int32_array(range(10)))) == {ref: 8}
    assert index.match(index.trail(b"b", int32_array(range(10)))) == {}


def test_the_index_is_bounded_and_forgets_the_oldest():
    index = PrefixIndex(chunk_len=4, max_chunks=10)
    ref = "decode-0#1"
    for start in range(100):
        index.record(index.trail(b"", int32_array(range(start, start + 8))), ref)
    assert len(index) == 10
    assert index.match(index.trail(b"", int32_array(range(99, 107)))) == {ref: 8}
    assert index.match(index.trail(b"", int32_array(range(8)))) == {}


def test_what_is_used_again_is_forgotten_last_and_a_full_index_forgets_little_at_once():
    index = PrefixIndex(chunk_len=4, max_chunks=640)
    ref = "decode-0#1"
    trails = [index.trail(b"", int32_array(range(start, start + 8))) for start in range(321)]
    for trail in trails[:320]:
        index.record(trail, ref)
    index.record(trails[0], ref)
    index.record(trails[320], ref)
    assert [index.match(trail) == {} for trail in trails] == [0 < start <= 6 for start in range(321)]


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_a_trail_that_is_extended_is_the_trail_of_the_whole_sequence(tokens: list[int], cuts: list[int]):
    index = PrefixIndex(chunk_len=4)
    trail, bounds = index.trail(b"a", int32_array(())), [0, *sorted(cuts), len(tokens)]
    for start, stop in pairwise(bounds):
        trail.extend(int32_array(tokens[start:stop]).tobytes())
    assert trail.keys == index.trail(b"a", int32_array(tokens)).keys
    assert len(trail.keys) == len(tokens) // 4


def test_least_loaded_counts_what_workers_report_and_what_is_under_way():
    world = World()
    world.dispatcher = Dispatcher(
        world.clock, lambda to, message: world.sent.append((to, message)), Random(0), DispatchLimits(), least_loaded
    )
    busy, idle = world.join("decode-0"), world.join("decode-1")
    world.beat(busy, load=WorkerLoad(num_running=3, num_waiting=1))
    for i in range(4):
        assert place(world, f"r{i}", 40) == str(idle)
    world.submit(request_id="fifth")
    world.submit(request_id="sixth")
    assert {to for to, _ in world.take(Submit)} == {str(busy), str(idle)}


def test_prefill_workers_are_ranked_by_queue_and_charged_until_they_report():
    world = World()
    world.join("decode-0", capacity=10_000)
    a, b = (world.join(name, role="prefill", capacity=500) for name in ("prefill-a", "prefill-b"))
    world.join("prefill-small", role="prefill", capacity=10)
    world.beat(b, load=WorkerLoad(queued_tokens=50))
    rankings = []
    for i in range(3):
        world.submit(request_id=f"r{i}", prompt=40)
        rankings.append(world.submitted()[1].prefill_ranking)
    assert rankings == [("prefill-a", "prefill-b"), ("prefill-a", "prefill-b"), ("prefill-b", "prefill-a")]
    world.beat(a)
    world.submit(request_id="later", prompt=40)
    assert world.submitted()[1].prefill_ranking[0] == "prefill-a"


def test_a_suspect_prefill_worker_is_not_offered():
    world = World()
    world.join("decode-0")
    gone = world.join("prefill-a", role="prefill")
    world.beating.discard(gone)
    world.run(1.6)
    world.dispatcher.submit(make_request(), type("Sink", (), {})())
    assert world.submitted()[1].prefill_ranking == ()


def test_who_takes_new_work_is_known_anew_after_every_change():
    registry = Registry(DispatchLimits())

    def names(num_tokens=0):
        by_name = [record.ref.name for record in registry.alive_by_name("decode", num_tokens)]
        assert by_name == sorted(record.ref.name for record in registry.alive("decode", num_tokens))
        return by_name

    def join(name, incarnation=1, capacity=100, role="decode"):
        registry.join(Join(WorkerRef(name, incarnation), role, SPEC, "", capacity), now=0.0)

    join("b")
    assert names() == ["b"]
    join("a", capacity=50)
    assert names() == names(50) == ["a", "b"]
    assert names(51) == ["b"]
    assert names(101) == []
    registry.heartbeat(Heartbeat(WorkerRef("a", 1), 0.0, WorkerLoad()), now=2.0)
    registry.judge(2.0)
    assert names() == ["a"]
    registry.heartbeat(Heartbeat(WorkerRef("b", 1), 0.0, WorkerLoad()), now=2.0)
    registry.judge(2.0)
    assert names() == ["a", "b"]
    registry.end(WorkerRef("a", 1))
    assert names(60) == names() == ["b"]
    join("b", incarnation=2, capacity=20)
    assert names(20) == ["b"]
    assert names(21) == []
    join("b", incarnation=3, role="prefill")
    assert names() == []


def test_a_worker_has_as_many_choices_as_it_says_or_as_are_known_to_be_there():
    registry, ref = Registry(DispatchLimits()), WorkerRef("a", 1)
    registry.join(Join(ref, "decode", SPEC, "", 100), now=0.0)
    (record,) = registry.alive("decode")
    registry.count_open(ref, 3)
    assert record.num_choices == 3
    registry.heartbeat(Heartbeat(ref, 0.0, WorkerLoad(num_running=3, num_waiting=2)), now=0.0)
    assert record.num_choices == 5
    registry.count_open(ref, 4)
    assert record.num_choices == 7
    registry.count_open(ref, -7)
    assert record.num_choices == 5
    registry.heartbeat(Heartbeat(ref, 0.0, WorkerLoad()), now=0.0)
    assert record.num_choices == 0
