"""The cluster itself: one seed is one history, sockets keep their order, processes live and die as the launcher says."""

import random

from headstart.core.messages import Cancel, Membership, Message, TokenDelta, Tokens, WorkerRef
from headstart.core.request import ChoiceRef
from headstart.sim.clock import Agenda, VirtualClock
from headstart.sim.cluster import SimCluster
from headstart.sim.network import NO_FAULT, ControlNetwork, MessageFault
from headstart.sim.spec import ClusterSpec, Timing


def history(seed: int) -> tuple[list[tuple[float | None, float | None]], int, float]:
    cluster = SimCluster(ClusterSpec(num_decode=2, timing=Timing(restart_s=0.1)), seed)
    cluster.run_for(0.1)
    for first in range(12):
        cluster.submit(cluster.request([first, *range(30)], 6))
        cluster.run_for(0.01)
    cluster.kill("prefill-0")
    cluster.finish()
    return [(h.first_token_at, h.ended_at) for h in cluster.handles], cluster.control.num_sent, cluster.clock.now()


def test_one_seed_is_one_history_and_another_is_another() -> None:
    assert history(1) == history(1)
    assert history(1) != history(2)


class Post:
    """Two names on a network."""

    def __init__(self) -> None:
        self.clock, self.agenda = VirtualClock(), Agenda()
        self.network = ControlNetwork(random.Random(0), self.clock, self.agenda, (0.0, 1.0))
        self.received: list[str] = []
        self.network.attach("b", lambda sender, message: self.received.append(_name(message)))

    def send(self, name: str) -> None:
        self.network.send("a", "b", Cancel(ChoiceRef(name)))

    def arrive(self) -> list[str]:
        self.clock.advance_to(100.0)
        self.agenda.run_due(100.0)
        return self.received


def _name(message: Message) -> str:
    assert isinstance(message, Cancel)
    return message.ref.request_id


def test_messages_of_a_pair_keep_their_order() -> None:
    post = Post()
    names = [str(i) for i in range(50)]
    for name in names:
        post.send(name)
    assert post.arrive() == names


def test_messages_are_lost_doubled_and_overtaken_on_request() -> None:
    post = Post()
    faults = {"lost": MessageFault(0), "doubled": MessageFault(2), "late": MessageFault(1, 5.0)}
    post.network.injector = lambda sender, recipient, message: faults.get(_name(message), NO_FAULT)
    for name in ("lost", "late", "doubled", "plain"):
        post.send(name)
    received = post.arrive()
    assert sorted(received) == ["doubled", "doubled", "late", "plain"]
    assert received[-1] == "late"


def test_late_tokens_are_handed_out_once_and_as_of_their_arrivals_whenever_somebody_asks() -> None:
    clock, agenda = VirtualClock(), Agenda()
    network = ControlNetwork(random.Random(0), clock, agenda, (0.5, 0.5))
    received: list[tuple[int, tuple[int, ...], list[float]]] = []

    def receive(sender: str, message: Message) -> None:
        assert isinstance(message, Tokens)
        (delta,) = message.deltas
        received.append((delta.index, delta.token_ids, clock.arrivals(len(delta.token_ids))))

    network.attach("b", receive)
    clock.advance_to(1.0)
    network.send_late("a", "b", TokenDelta(ChoiceRef("r"), 3, (70, 71)), [0.25, 0.75])
    network.send_late("a", "b", TokenDelta(ChoiceRef("r"), 5, (72, 73, 74, 75)), [0.875, 1.0, 1.25, 1.5])
    assert received == [(3, (70, 71), [0.25, 0.75])]
    network.hand_out_arrived()
    network.hand_out_arrived()
    assert received[1:] == [(5, (72, 73), [0.875, 1.0])]
    clock.advance_to(1.5)
    network.hand_out_arrived()
    assert received[2:] == [(7, (74,), [1.25])]
    agenda.run_due(1.5)
    network.hand_out_arrived()
    assert received[3:] == [(8, (75,), [1.5])]


def test_a_message_to_nobody_is_dropped() -> None:
    post = Post()
    post.network.detach("b")
    post.send("x")
    assert post.arrive() == []


def test_a_killed_worker_comes_back_as_its_next_incarnation_and_only_after_its_exit_was_reported() -> None:
    cluster = SimCluster(ClusterSpec(timing=Timing(exit_report_s=0.05, restart_s=0.1)))
    cluster.run_for(0.1)
    assert cluster.workers["decode-0"].ref == WorkerRef("decode-0", 1)
    cluster.kill("decode-0")
    cluster.run_for(0.14)
    assert "decode-0" not in cluster.workers
    cluster.run_for(0.02)
    assert cluster.workers["decode-0"].ref == WorkerRef("decode-0", 2)


def test_a_stalled_worker_does_nothing_and_goes_on_where_it_was() -> None:
    cluster = SimCluster()
    cluster.run_for(0.1)
    handle = cluster.submit(cluster.request(range(40), 8))
    cluster.run_for(0.05)
    cluster.stall("decode-0")
    cluster.run_for(0.5)
    assert handle.tokens == []
    cluster.resume("decode-0")
    cluster.finish()
    assert handle.finished is not None
    cluster.run_until(cluster.is_free)
    cluster.check_idle()


def test_a_busy_worker_is_not_looked_at_at_times_that_no_longer_matter() -> None:
    cluster = SimCluster()
    for first in range(40):
        cluster.submit(cluster.request([first, *range(30)], 6))
        cluster.run_for(0.05)
        assert all(len(worker.looks) <= 3 for worker in cluster.workers.values())
        assert all(worker.looks == sorted(worker.looks, reverse=True) for worker in cluster.workers.values())
    cluster.finish()


def test_a_message_to_a_stalled_worker_is_taken_when_it_goes_on() -> None:
    cluster = SimCluster()
    cluster.run_for(0.1)
    cluster.stall("decode-0")
    handle = cluster.submit(cluster.request(range(30), 2))
    cluster.run_for(0.2)
    assert cluster.workers["decode-0"].mailbox
    cluster.resume("decode-0")
    cluster.run_for(0.0)
    assert not cluster.workers["decode-0"].mailbox
    cluster.finish()
    assert handle.finished is not None


def test_membership_is_told_once_a_beat_however_many_workers_say_that_they_live() -> None:
    cluster = SimCluster(ClusterSpec(num_prefill=4, num_decode=8))
    cluster.run_for(1.0)
    told: list[str] = []

    def listen(sender: str, recipient: str, message: Message) -> MessageFault:
        if isinstance(message, Membership):
            told.append(recipient)
        return NO_FAULT

    cluster.inject_message_faults(listen)
    cluster.run_for(5.0)
    assert 9 * 8 <= len(told) <= 11 * 8


def test_time_stands_where_it_was_asked_to() -> None:
    cluster = SimCluster()
    cluster.run_for(1.25)
    assert cluster.clock.now() == 1.25


def test_time_goes_on_when_every_worker_is_dead_or_stalled_with_writes_open() -> None:
    cluster = SimCluster()
    cluster.run_for(0.1)
    cluster.submit(cluster.request(range(40), 8))
    cluster.run_until(lambda: cluster.links.num_open_writes() > 0)
    cluster.stall("prefill-0")
    cluster.kill("decode-0")
    before = cluster.clock.now()
    for _ in range(200):
        cluster.step()
    assert cluster.clock.now() > before + 1.0


def test_a_worker_with_nothing_to_do_for_a_minute_is_still_trusted() -> None:
    cluster = SimCluster()
    cluster.run_for(60.0)
    handle = cluster.submit(cluster.request(range(12)))
    cluster.finish()
    assert handle.finished is not None
    assert cluster.load("decode-0")["prefill_calls"] == 1
