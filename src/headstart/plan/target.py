"""A simulated cluster as bench sees a server: a client to ask, a cache to flush, facts for the report."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from headstart.bench.api_backends import PromptInput
from headstart.bench.errors import BenchError
from headstart.bench.records import Answer, Arrival, ReportedUsage
from headstart.plan.deployment import Deployment
from headstart.plan.virtual import VirtualTime
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster


@dataclass(frozen=True, slots=True)
class SimClient:
    """Satisfies `bench.load_generator.LoadClient`."""

    cluster: SimCluster
    time: VirtualTime
    deployment: Deployment
    returns_ids: bool = True

    async def generate(self, prompt: PromptInput, output_len: int) -> Answer:
        """The answer, at the time its last token reaches the client. Raises BenchError for a prompt of text."""
        if isinstance(prompt, str):
            raise BenchError("a simulated cluster has no tokenizer; leave --prompt-format at ids")
        sent_s, front = self.time.now(), self.deployment.costs.front
        if front.before_s:
            await self.time.sleep(front.before_s)
        handle = await self._serve(np.asarray(prompt, np.int32), output_len)
        if front.after_s:
            await self.time.sleep(front.after_s)
        if handle.failed is not None:
            return Answer(sent_s, error=f"{handle.failed.code.value}: {handle.failed.message}")
        arrivals = tuple(Arrival(at_s + front.after_s, 1) for at_s in handle.token_times)
        return Answer(sent_s, arrivals, tuple(handle.tokens), "", _usage(handle))

    async def _serve(self, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", output_len: int) -> Handle:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = self.cluster.request(prompt, output_len, deadline_s=self.deployment.request_timeout_s)
        if not self.deployment.caches_on_decode:
            request = structs.replace(request, cacheable=False)
        handle = self.cluster.submit(request, lambda: self.time.wake(ended, None))
        await ended
        self.cluster.handles.remove(handle)  # with its prompt, of which a long run would keep gigabytes
        return handle


@dataclass(frozen=True, slots=True)
class SimTarget:
    """Satisfies `bench.measure.Measured`."""

    label: str
    client: SimClient
    facts: dict[str, Any]
    backend: str = "headstart simulate"

    async def flush(self) -> bool:
        """Raises BenchError if a worker refuses."""
        flushed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        time = self.client.time
        self.client.cluster.gateway.flush(lambda ok, num_pages: time.wake(flushed, ok))
        if not await flushed:
            raise BenchError("a simulated worker could not empty its cache")
        return True


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """What bench reports about a server, and what the times were computed from."""
    spec, costs = deployment.spec, deployment.costs
    return {
        "model": costs.name,
        "max_model_len": spec.decode.context_len,
        "num_prefill": spec.num_prefill,
        "num_decode": spec.num_decode,
        "page_size": spec.page_size,
        "pool_tokens": {"prefill": spec.prefill_pages * spec.page_size, "decode": spec.decode_pages * spec.page_size},
        "caches": {"prefill": spec.modelling.cacheable_calls, "decode": deployment.caches_on_decode},
        "prefix_shared": costs.prefix_shared,
        "notes": list(costs.notes),
    }


def _usage(handle: Handle) -> ReportedUsage:
    assert handle.finished is not None
    stats = handle.finished.stats
    return ReportedUsage(
        len(handle.request.prompt),
        handle.finished.num_tokens,
        stats.cached_tokens,
        stats.decode_prefix_len,
        stats.bytes_moved,
        stats.stage_s,
    )
