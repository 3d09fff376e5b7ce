"""Any history of submits, cancels, deaths, stalls and faulty links: the ledger is exact at each operation, every reader
reads its own KV (the executor checks), and in the end every request had one end and every output is the oracle's."""

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from headstart.core.messages import Join, KillRequest, LauncherHello, Message, WorkerExited
from headstart.sim.cluster import SimCluster
from headstart.sim.kv_fingerprints import oracle
from headstart.sim.network import NO_FAULT, MessageFault
from headstart.sim.spec import SMALL_DECODE, SMALL_PREFILL, ClusterSpec, Timing
from headstart.transfer.loopback import Fault, Posted

NUM_EXAMPLES = int(os.environ.get("HEADSTART_LIFECYCLE_EXAMPLES", "500"))
NUM_STEPS = 200
CONTEXT_LEN = 40
MAX_LEFT = 16
"""Requests that are waited for at the end of a history; those before them are cancelled."""
STEMS = [[random.Random(i).randrange(97) for _ in range(24)] for i in range(3)]
NAMESPACES = (b"", b"", b"tenant")

MESSAGE_FATES = (MessageFault(0), MessageFault(2), MessageFault(1, 0.05), MessageFault(1, 1.5), MessageFault(2, 0.3))
WRITE_FATES = (
    Fault(refused=True),
    Fault(fails=True),
    Fault(delay_s=0.1),
    Fault(delay_s=3.0),
    Fault(num_notices=0),
    Fault(num_notices=2),
    Fault(notice_delay_s=0.2),
)
RELIABLE = (Join, WorkerExited, LauncherHello, KillRequest)
"""What the launcher and a process's start say is repeated by the real sockets until it arrives."""


def cluster_spec(page_size: int, num_prefill: int, num_decode: int, slack: int, local: int) -> ClusterSpec:
    """Pools in which one or two of the longest requests fit."""
    pages = CONTEXT_LEN // page_size + 1
    return ClusterSpec(
        num_prefill,
        num_decode,
        page_size,
        prefill_pages=pages * (1 + slack),
        decode_pages=pages + slack * pages // 2,
        prefill=replace(SMALL_PREFILL, chunked_prefill_size=8, capacity_tokens=CONTEXT_LEN, credit_tokens=64),
        decode=replace(SMALL_DECODE, chunked_prefill_size=8, context_len=CONTEXT_LEN, local_prefill_tokens=local),
        timing=Timing(restart_s=0.2),
    )


class Lifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.message_fates: list[MessageFault] = []
        self.write_fates: list[Fault] = []

    @initialize(
        page_size=st.sampled_from((1, 4, 8)),
        num_prefill=st.integers(1, 2),
        num_decode=st.integers(1, 2),
        slack=st.integers(0, 2),
        local=st.sampled_from((0, 4)),
        seed=st.integers(0, 1000),
    )
    def begin(self, page_size: int, num_prefill: int, num_decode: int, slack: int, local: int, seed: int) -> None:
        self.cluster = SimCluster(cluster_spec(page_size, num_prefill, num_decode, slack, local), seed)
        self.cluster.inject_message_faults(self.judge_message)
        self.cluster.inject_write_faults(self.judge_write)
        self.cluster.run_for(0.01)

    def judge_message(self, sender: str, recipient: str, message: Message) -> MessageFault:
        if isinstance(message, RELIABLE) or not self.message_fates:
            return NO_FAULT
        return self.message_fates.pop()

    def judge_write(self, posted: Posted) -> Fault:
        return self.write_fates.pop() if self.write_fates else Fault()

    @rule(code=st.integers(0, 6 * 24 * 7 * 8 - 1))
    def submit(self, code: int) -> None:
        """Prompts share stems; one in six has a deadline of 0.3 s."""
        code, cut = divmod(code, 24)
        code, tail = divmod(code, 7)
        size, stem = divmod(code, 6)
        prompt = STEMS[stem % 3][: cut + 1] + [tail] * tail
        deadline_s = 0.3 if stem == 5 else 30.0
        namespace = NAMESPACES[tail % 3]
        self.cluster.submit(self.cluster.request(prompt, size + 1, deadline_s=deadline_s, namespace=namespace))
        self.cluster.check()

    @rule(which=st.integers(0, 7), size=st.integers(1, 6))
    def next_turn(self, which: int, size: int) -> None:
        """A conversation goes on, with what was said so far as its prompt."""
        said = [handle for handle in self.cluster.handles[-40:] if handle.finished]
        if said:
            before = said[which % len(said)]
            prompt = [*before.request.prompt.tolist(), *before.tokens, which][: CONTEXT_LEN - size]
            self.cluster.submit(self.cluster.request(prompt, size, namespace=before.request.namespace))
        else:
            self.cluster.submit(self.cluster.request(STEMS[which % 3][: 3 * which + 1], size))
        self.cluster.check()

    @rule()
    def next_event(self) -> None:
        self.cluster.step()
        self.cluster.check()

    @rule()
    def event_after_that(self) -> None:
        self.next_event()

    @rule()
    def one_more_event(self) -> None:
        self.next_event()

    @rule(num_events=st.integers(2, 4))
    def several_events(self, num_events: int) -> None:
        for _ in range(num_events):
            self.cluster.step()
        self.cluster.check()

    @rule(seconds=st.sampled_from((0.01, 0.02, 0.1)))
    def time_passes(self, seconds: float) -> None:
        self.cluster.run_for(seconds)
        self.cluster.check()

    @rule(which=st.integers(0, 15))
    def cancel(self, which: int) -> None:
        unfinished = [handle for handle in self.cluster.handles[-16:] if not handle.is_done]
        if unfinished:
            self.cluster.cancel(unfinished[which % len(unfinished)])
        self.cluster.check()

    @rule(which=st.integers(0, 15))
    def kill_or_stall(self, which: int) -> None:
        """One in four kills (the launcher reports the exit and restarts the worker), the others stall."""
        names = sorted(self.cluster.workers)
        if names and which < 4:
            self.cluster.kill(names[which % len(names)])
        elif names and not self.stalled():
            self.cluster.stall(names[which % len(names)])
        self.cluster.check()

    def stalled(self) -> list[str]:
        return [name for name, worker in self.cluster.workers.items() if worker.is_stalled]

    @precondition(lambda self: self.stalled())
    @rule()
    def resume(self) -> None:
        for name in self.stalled():
            self.cluster.resume(name)
        self.cluster.check()

    @rule(which=st.integers(0, len(MESSAGE_FATES) + len(WRITE_FATES) - 1))
    def a_message_or_a_write_meets_its_fate(self, which: int) -> None:
        """The next ones are lost, late or doubled, or fail."""
        if which < len(MESSAGE_FATES):
            self.message_fates[:] = [*self.message_fates[-2:], MESSAGE_FATES[which]]
        else:
            self.write_fates[:] = [*self.write_fates[-2:], WRITE_FATES[which - len(MESSAGE_FATES)]]
        self.cluster.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        self.message_fates.clear()
        self.write_fates.clear()
        for name in self.stalled():
            cluster.resume(name)
        unfinished = [handle for handle in cluster.handles if not handle.is_done]
        for handle in unfinished[:-MAX_LEFT]:
            cluster.cancel(handle)
        cluster.finish(limit_s=60.0)
        cluster.run_until(cluster.is_quiet, limit_s=30.0)
        cluster.check_idle()
        for handle in cluster.handles:
            request = handle.request
            expected = oracle(request.prompt, request.stop.max_new_tokens, cluster.spec.vocab_size, request.namespace)
            assert handle.tokens == expected[: len(handle.tokens)]
            assert handle.failed or handle.tokens == expected


@pytest.mark.behaviour("34")
def test_any_history_keeps_the_ledger_and_gives_every_request_its_one_end() -> None:
    """NUM_EXAMPLES histories of NUM_STEPS operations: 100,000."""
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
