"""Where requests go: to the prefix unless the queue there is too long, and to the shortest queue otherwise."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.arrays import int32_array
from headstart.core.messages import Heartbeat, Join, Submit, WorkerLoad, WorkerRef
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import PrefixAffinity, least_loaded
from headstart.gateway.prefix_index import PrefixIndex
from headstart.gateway.registry import Registry
from tests.support.dispatchers import SPEC, World, make_request

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


def ids(*tokens):
    return int32_array(tokens).tobytes()


def test_tenants_do_not_see_each_others_prefixes():
    index = PrefixIndex(chunk_len=4)
    index.record(b"a", ids(*range(8)), "decode-0#1")
    assert index.match(b"a", ids(*range(10))) == {"decode-0#1": 8}
    assert index.match(b"b", ids(*range(10))) == {}


def test_the_index_is_bounded_and_forgets_the_oldest():
    index = PrefixIndex(chunk_len=4, max_chunks=10)
    for start in range(100):
        index.record(b"", ids(*range(start, start + 8)), "decode-0#1")
        index.check()
    assert len(index) == 10
    assert index.match(b"", ids(*range(99, 107))) == {"decode-0#1": 8}
    assert index.match(b"", ids(*range(8))) == {}


def test_the_index_keeps_no_more_than_workers_can_hold():
    index = PrefixIndex(chunk_len=4, max_chunks=10)
    for start in range(0, 40, 8):
        index.record(b"", ids(*range(start, start + 8)), "decode-0#1")
    index.limit(23)
    assert len(index) == 5
    assert index.match(b"", ids(*range(32, 40))) == {"decode-0#1": 8}
    index.limit(1000)
    for start in range(0, 80, 8):
        index.record(b"", ids(*range(start, start + 8)), "decode-0#1")
    assert len(index) == 10
    index.check()


def test_a_prefix_that_no_pool_can_still_hold_is_forgotten():
    index = PrefixIndex()
    world = World()
    world.dispatcher = Dispatcher(
        world.clock,
        lambda to, message: world.sent.append((to, message)),
        Random(0),
        DispatchLimits(),
        lambda rng: PrefixAffinity(rng, index),
    )
    worker = world.join("decode-0", capacity=10_000)
    for name, prompt in (("old", SHARED[:128]), ("new", SHARED[512:640])):
        place(world, name, prompt)
        end(world, name)
    assert len(index) == 4
    world.beat(worker, load=WorkerLoad(free_pages=3, cached_pages=5))
    world.clock.time += DispatchLimits().beat_s
    world.dispatcher.advance()
    assert len(index) == 2
    assert index.match(make_request().namespace, ids(*SHARED[512:640])) == {str(worker): 128}


def test_a_prefix_outlives_what_follows_it_and_what_was_used_longer_ago():
    index = PrefixIndex(chunk_len=4, max_chunks=6)
    index.record(b"", ids(*range(16)), "a")
    index.record(b"other", ids(*range(8)), "b")
    index.record(b"", ids(*range(4)), "c")
    index.record(b"new", ids(*range(8)), "d")
    assert index.match(b"", ids(*range(16))) == {"a": 8, "c": 4}
    index.record(b"new", ids(*range(20)), "d")
    assert index.match(b"", ids(*range(16))) == {"a": 4, "c": 4}
    assert index.match(b"other", ids(*range(8))) == {}
    index.check()


class NaiveIndex:
    """Unbounded: the workers of each prefix of whole chunks."""

    def __init__(self):
        self.holders = {}

    def record(self, namespace, tokens, worker):
        for end in range(4, len(tokens) + 1, 4):
            known = self.holders.get((namespace, *tokens[:end]), ())
            self.holders[namespace, *tokens[:end]] = known if worker in known else (*known, worker)[-4:]

    def match(self, namespace, tokens):
        ends = range(4, len(tokens) + 1, 4)
        return {worker: end for end in ends for worker in self.holders.get((namespace, *tokens[:end]), ())}


SEQUENCES = st.tuples(
    st.sampled_from([b"a", b"b"]), st.lists(st.integers(0, 1), max_size=40), st.sampled_from("uvwxyz")
)


@given(st.lists(SEQUENCES, max_size=30))
def test_the_index_knows_what_a_naive_one_knows(sequences):
    index, naive = PrefixIndex(chunk_len=4), NaiveIndex()
    for namespace, tokens, worker in sequences:
        assert index.match(namespace, ids(*tokens)) == naive.match(namespace, tokens)
        index.record(namespace, ids(*tokens), worker)
        naive.record(namespace, tokens, worker)
        index.check()
    assert len(index) == len(naive.holders)


@given(st.lists(SEQUENCES, max_size=30), st.integers(10, 30))
def test_a_full_index_knows_at_least_what_was_last_recorded(sequences, max_chunks):
    index = PrefixIndex(chunk_len=4, max_chunks=max_chunks)
    for namespace, tokens, worker in sequences:
        index.record(namespace, ids(*tokens), worker)
        index.check()
        assert index.match(namespace, ids(*tokens)).get(worker, 0) == len(tokens) // 4 * 4


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
