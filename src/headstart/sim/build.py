"""Composition root of a simulated worker."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from headstart.core.layout import PoolRegion
from headstart.core.messages import Join, Message, Prefill, Role, Send, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.protocol import Scheduler
from headstart.sim.clock import VirtualClock
from headstart.sim.deferred_output import DeferredOutput
from headstart.sim.drafter import SimDrafter
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.kv_fingerprints import ContextBook
from headstart.sim.network import ControlNetwork
from headstart.sim.spec import ClusterSpec
from headstart.sim.synthetic_executor import SyntheticExecutor, TokenTape
from headstart.sim.worker import Organs, SimWorker
from headstart.transfer.contract import PageDigests
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import LoopbackNetwork
from headstart.worker.decision_log import DecisionLog, Head
from headstart.worker.recorder import Recorder, recorded_ports
from headstart.worker.schedulers import DecodeSpec, PrefillSpec, SchedulerPorts, SchedulerSpec, scheduler_over

MakeCache = Callable[[int, int], PrefixCache]
"""(num_pages, page_size): a test may take something away from the real one."""
OpenLog = Callable[[str, Head], DecisionLog]
"""(name, head): a decision log for a worker or the gateway."""


@dataclass(frozen=True, slots=True)
class SimEnv:
    """What the workers of a cluster share."""

    spec: ClusterSpec
    clock: VirtualClock
    links: LoopbackNetwork
    control: ControlNetwork
    book: ContextBook
    tape: TokenTape
    make_cache: MakeCache = PrefixCache
    open_log: OpenLog | None = None


def build_worker(ref: WorkerRef, number: int, around: SimEnv) -> SimWorker:
    """A worker of the role its name begins with, with an empty pool; the `number`-th that its cluster starts."""
    spec = around.spec
    is_prefill = ref.name.startswith(Role.PREFILL)
    num_pages = spec.prefill_pages if is_prefill else spec.decode_pages
    device = _device(ref, is_prefill, num_pages, around)
    transport = around.links.transport(str(ref), device.memory, device.region)
    cache = around.make_cache(num_pages, spec.page_size)

    send: Send = partial(around.control.send, str(ref))
    if spec.modelling.cacheable_calls and not is_prefill:
        send = partial(_send_cacheable, send)
    delay_s = spec.timing.control_delay_s[0]
    deferred = DeferredOutput(around.clock, delay_s, send, partial(around.control.send_late, str(ref)))
    jumps = spec.modelling.jumps and not is_prefill
    drafter = None if is_prefill or not spec.decode.num_draft_tokens else SimDrafter(number, spec.vocab_size)
    ports = SchedulerPorts(transport, device.digests, around.clock, deferred.send if jumps else send, drafter)
    parts = _scheduler_spec(ref, is_prefill, transport.descriptor(), around)
    if around.open_log is None:
        scheduler, recorded = scheduler_over(parts, ports, cache), None
    else:
        recorder = Recorder(around.open_log(str(ref), parts), around.clock)
        recorded_by = recorded_ports(ports, recorder)
        scheduler = recorder.build(lambda: scheduler_over(parts, recorded_by, cache))
        recorded = recorder.part(cast(Scheduler, scheduler), Scheduler)
    capacity = spec.prefill.capacity_tokens if is_prefill else spec.decode.context_len
    join = Join(
        ref, Role.PREFILL if is_prefill else Role.DECODE, spec.kv_spec, f"sim://{ref}", capacity, lock_domain="sim"
    )
    worker = SimWorker(join, Organs(scheduler, cache, transport, device.executor, recorded), around.clock, send, number)
    if jumps:
        worker.fast_forward(deferred)
    return worker


def _send_cacheable(send: Send, recipient: str, message: Message) -> None:
    """Every call asks its prefill worker to keep what it computes."""
    send(recipient, structs.replace(message, cacheable=True) if isinstance(message, Prefill) else message)


def _scheduler_spec(ref: WorkerRef, is_prefill: bool, descriptor: bytes, around: SimEnv) -> SchedulerSpec:
    spec = around.spec
    if is_prefill:
        return PrefillSpec(ref, spec.kv_spec, spec.prefill, spec.prefill_pages, descriptor)
    verifies = spec.verify_transfers and spec.modelling.content != "none"
    return DecodeSpec(ref, spec.kv_spec, spec.decode, spec.decode_pages, descriptor, spec.page_bytes, verifies=verifies)


@dataclass(frozen=True, slots=True)
class _Device:
    """`memory` [num_pages * fingerprint_bytes] uint8 of the pool; None where there is none."""

    memory: NDArray[np.uint8] | None
    region: PoolRegion
    digests: PageDigests
    executor: FakeExecutor | SyntheticExecutor


def _device(ref: WorkerRef, is_prefill: bool, num_pages: int, around: SimEnv) -> _Device:
    spec, size = around.spec, around.spec.page_size
    allowed = spec.modelling.prefill_steps_in_flight if is_prefill else spec.modelling.decode_steps_in_flight
    max_steps = allowed[int(ref.name.split("-")[1]) % len(allowed)]
    cost = spec.timing.prefill_cost if is_prefill else spec.timing.decode_cost
    region = PoolRegion(0, num_pages, spec.fingerprint_bytes)
    if spec.modelling.content == "none":
        nothing = np.zeros((num_pages, 0), dtype=np.uint8)
        return _Device(
            None, region, HostDigests(nothing), SyntheticExecutor(around.tape, cost, size, around.clock, max_steps)
        )
    pool = np.zeros((num_pages, size), dtype=np.uint64)
    memory = pool.reshape(-1).view(np.uint8)
    executor = FakeExecutor(Model(around.book, spec.vocab_size, size, cost), pool, around.clock, max_steps)
    return _Device(memory, region, HostDigests(memory.reshape(num_pages, -1)), executor)
