"""The server under measurement: what it is, how it is spoken to, how its cache is emptied."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from headstart.bench.api_backends import ApiBackend, OpenAICompletions, SGLangGenerate
from headstart.bench.client import Client, HttpTransport
from headstart.bench.errors import BenchError
from headstart.bench.options import Backend
from headstart.core.clock import Clock

RETURNS_IDS = ("headstart", "vllm")
"""`owned_by` of servers whose completions answer `return_token_ids`."""
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
FLUSH_TRIES = 10


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and what the user knows about it."""

    base_url: str
    label: str = ""
    backend: Backend = "auto"
    model: str = ""
    api_key: str = field(default="", repr=False)
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server that answered. `facts` go into the report."""

    label: str
    backend: str
    client: Client
    http: httpx.AsyncClient
    facts: dict[str, Any]

    async def flush(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> bool:
        """Empty the server's cache. False: it has no such call. Raises BenchError if it stays busy."""
        for path in FLUSH_PATHS:
            for _ in range(FLUSH_TRIES):
                reply = await self.http.post(path)
                if reply.status_code != 400:
                    break
                await sleep(0.5)
            if reply.status_code == 200:
                return True
            if reply.status_code not in (404, 405):
                raise BenchError(f"{path} answered {reply.status_code}: {reply.text[:200]}")
        return False


def open_http(address: Address) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=30.0)
    return httpx.AsyncClient(base_url=address.base_url, headers=headers, limits=limits, timeout=timeout)


async def connect(address: Address, http: httpx.AsyncClient, clock: Clock) -> ServerTarget:
    """Ask the server what it is. Raises BenchError if it does not answer."""
    try:
        reply = await http.get("/v1/models")
        reply.raise_for_status()
        cards = {str(card["id"]): card for card in reply.json()["data"]}
        model, card = next(iter(cards.items()))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise BenchError(f"{address.base_url}/v1/models does not name a model: {error!r}") from error
    if address.model and address.model not in cards:
        raise BenchError(f"{address.base_url} serves no model {address.model!r}; it serves {', '.join(cards)}")
    model, card = (address.model, cards[address.model]) if address.model else (model, card)
    owner = str(card.get("owned_by", ""))
    api = choose_backend(address, owner, model)
    backend = owner if owner in (*RETURNS_IDS, "sglang") else "openai"
    facts = {"base_url": address.base_url, "model": model, "max_model_len": card.get("max_model_len")}
    if owner == "headstart":
        facts |= await _cluster_facts(http)
    client = Client(HttpTransport(http), api, clock)
    return ServerTarget(address.label or backend, backend, client, http, facts)


def choose_backend(address: Address, owner: str, model: str) -> ApiBackend:
    if address.backend == "sglang" or (address.backend == "auto" and owner == "sglang"):
        return SGLangGenerate(address.temperature)
    return OpenAICompletions(model, owner in RETURNS_IDS, address.temperature)


async def _cluster_facts(http: httpx.AsyncClient) -> dict[str, Any]:
    reply = await http.get("/cluster")
    if reply.status_code != 200:
        return {}
    workers = reply.json()["workers"]
    specs = [worker["kv"] for worker in workers]
    return {
        "num_prefill": sum(worker["role"] == "prefill" for worker in workers),
        "num_decode": sum(worker["role"] == "decode" for worker in workers),
        "dtype": specs[0]["kv_dtype"] if specs else None,
        "page_size": specs[0]["page_size"] if specs else None,
        "capacity_tokens": [worker["capacity_tokens"] for worker in workers],
    }
