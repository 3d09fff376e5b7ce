"""Real processes over NIXL under a steady multi-turn load: workers are killed, stopped past their peers' patience and
started again, and no token is lost, wrong or doubled.

Every turn's prompt and answer are known from a quiet run, so each answer under fire is compared token by token.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import pytest
from cluster import Cluster, until
from load import Ask, Load, Refused, conversations, greedy, listen, some

from headstart.gateway.limits import DispatchLimits

pytestmark = pytest.mark.full
NUM_CONVERSATIONS = 4
NUM_TURNS = 3
STOP_S = 4.0
SILENCE_S = DispatchLimits().dead_after_s + DispatchLimits().beat_s
"""Until silence is a death: it is looked for every `beat_s`."""
MARGIN_S = 1.0
MANY_PAGES = 100
"""More than the steady load ever has under tickets."""


@dataclass(frozen=True)
class Blow:
    name: str
    strike: Callable[[Cluster], None]
    detection_s: float


def busy(cluster: Cluster, role: str) -> str:
    """A worker of the role that has something to do."""

    def found() -> str | None:
        workers = cluster.alive(role)
        loads = {worker["name"]: worker["load"]["num_running"] + worker["open_choices"] for worker in workers}
        return max(loads, key=lambda name: loads[name]) if any(loads.values()) or role == "prefill" else None

    return str(until(found, f"work on a {role} worker"))


def kill(cluster: Cluster, role: str) -> None:
    """kill -9, and wait until the launcher has started it again under the same name."""
    name = busy(cluster, role)
    before = cluster.kill(name)
    until(
        lambda: any(w["name"] == name and w["incarnation"] > before for w in cluster.alive(role)),
        f"{name} started again",
        90,
    )


def stop_and_go_on(cluster: Cluster, role: str) -> None:
    """SIGSTOP a worker for longer than its peers wait for it, then let it go on."""
    with cluster.stopped(busy(cluster, role)):
        time.sleep(STOP_S)
    until(lambda: len(cluster.alive(role)) == 2, f"both {role} workers", 90)


BLOWS = (
    Blow("nothing", lambda cluster: None, 0.0),
    Blow("kill -9 of a prefill worker", lambda cluster: kill(cluster, "prefill"), 0.0),
    Blow("kill -9 of a decode worker", lambda cluster: kill(cluster, "decode"), 0.0),
    Blow(
        f"SIGSTOP of a prefill worker for {STOP_S:g} s", lambda cluster: stop_and_go_on(cluster, "prefill"), SILENCE_S
    ),
    Blow(f"SIGSTOP of a decode worker for {STOP_S:g} s", lambda cluster: stop_and_go_on(cluster, "decode"), SILENCE_S),
)


def test_case_E8_workers_die_stop_and_return_under_load_and_no_token_is_lost_wrong_or_doubled(pairs: Cluster) -> None:
    talks = conversations(pairs, NUM_CONVERSATIONS, NUM_TURNS)
    pairs.http.post("/flush_cache")
    report = []
    with Load(pairs, talks) as load:
        load.wait_for_answers(NUM_CONVERSATIONS * NUM_TURNS)
        recompute_s = load.take_stall()  # the first pass finds nothing in the caches
        for blow in BLOWS:
            load.wait_for_answers(4)
            load.take_stall()
            blow.strike(pairs)
            load.wait_for_answers(8)
            report.append((blow, load.take_stall(), blow.detection_s + recompute_s + MARGIN_S))
    print(f"\n{load.count.answers} answers; cold, the longest wait for a token is {recompute_s:.2f} s")
    for blow, stall, goal in report:
        print(f"  {blow.name}: longest stall {stall:.2f} s, goal {goal:.2f} s")
    assert not load.count.errors
    assert load.count.damage == (0, 0, 0)
    assert [blow.name for blow, stall, goal in report if stall > goal] == []
    pairs.wait_until_free(timeout_s=30)


def test_a_writer_stopped_past_the_deadline_of_its_calls_leaves_every_page_intact_when_it_goes_on(
    pairs: Cluster,
) -> None:
    """Requests end by their deadline while the writer of their pages stands still; others use the pool meanwhile."""
    rng = Random(81)
    hurried = [Ask.quietly(pairs, greedy(some(rng, 7000), 4)) for _ in range(6)]
    pairs.http.post("/flush_cache")
    stopped = [pairs.pid(worker["name"]) for worker in pairs.alive("prefill")]
    with Load(pairs, conversations(pairs, 2, NUM_TURNS)) as load, ThreadPoolExecutor(len(hurried)) as pool:
        ends = [pool.submit(_end_of, pairs, ask) for ask in hurried]
        until(lambda: any(worker["load"]["num_running"] for worker in pairs.alive("prefill")), "prefill at work")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        codes = [end.result(timeout=30) for end in ends]
        load.wait_for_answers(4)  # computed by the decode workers themselves
        num_fenced = sum(worker["load"]["inflight_pages"] for worker in pairs.workers("decode"))
        for pid in stopped:
            with suppress(ProcessLookupError):  # after 5 s its peers may have had it killed
                os.kill(pid, signal.SIGCONT)
        until(lambda: len(pairs.alive("prefill")) == 2, "both prefill workers", 90)
        load.wait_for_answers(8)
        again = [listen(pairs, ask.body) for ask in hurried]
    print(f"\nwith a deadline of 2 s and both writers stopped: {codes}, {num_fenced} pages fenced")
    assert set(codes) <= {200, 504}
    assert num_fenced > MANY_PAGES, "the writers had calls open"
    assert not load.count.errors
    assert load.count.damage == (0, 0, 0)
    assert all(ask.is_answered_by(0, heard.choices[0]) for ask, heard in zip(hurried, again, strict=True))
    pairs.wait_until_free(timeout_s=30)


def _end_of(cluster: Cluster, ask: Ask) -> int:
    """The status that a deadline of 2 s brings; 200 where the answer came in time, and then it is right."""
    try:
        heard = listen(cluster, {**ask.body, "deadline_s": 2.0})
    except Refused as refused:
        return refused.status
    assert ask.is_answered_by(0, heard.choices[0])
    return 200
