"""Memory of every process under mixed load for minutes: does anything grow?

    python benchmarks/soak.py [--seconds 600] [--clients 6] [--seed 1] [--out bench-out]

Starts gateway, prefill and decode worker over small random weights and a small pool, so that pages are evicted all the
time. Clients hold conversations of several turns; some leave in mid-stream, some set deadlines that pass, some ask for a
flush or send what is refused. Each second the resident memory of every process and the state of every page is noted.

Writes OUT/soak.{json,png,svg} and prints the slope of each process after the warm-up, the first third. A process is flat
where a straight line through its memory rises by less than three standard errors, or by less than 3 MB over the rest of
the run. Pools fill while they are first used, which takes a minute or so: a run that is no longer says that they grow.
Exits with 1 where a process grows, or where pages, requests or processes are left over at the end.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from deployment import Deployment, running

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FLAGS = ("--load-format", "dummy", "--json-model-override-args", json.dumps(TINY), "--max-total-tokens", "16384")
WARM_UP_SHARE = 1 / 3
NUM_BLOCKS = 10
MAX_ERRORS = 3.0
MAX_GROWTH_MB = 3.0
PAGE_STATES = ("inflight", "private", "pinned", "cached", "free")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLE_S = 15.0


# ---- load ------------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """One conversation after another, each request of a kind drawn at random."""

    http: httpx.AsyncClient
    rng: Random
    seen: Counter[str]
    shared: list[int]

    async def run(self, until: float) -> None:
        kinds = (*[self._turn] * 5, self._leave, self._leave, self._deadline, self._refused, self._flush)
        while time.monotonic() < until:
            prompt = [*self.shared, *self._some(40)]
            for _ in range(self.rng.randint(1, 6)):
                prompt = [*await self.rng.choice(kinds)(prompt), *self._some(30)]

    def _some(self, count: int) -> list[int]:
        return [self.rng.randrange(100, 40_000) for _ in range(count)]

    def _body(self, prompt: list[int], /, **fields: Any) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "seed": self.rng.randrange(1 << 30), "n": self.rng.randint(1, 2)}
        asked = {"prompt": prompt, "max_tokens": self.rng.randint(1, 60), "return_token_ids": True, "ignore_eos": True}
        return {**asked, **(sampled if self.rng.random() < 0.5 else {"temperature": 0}), **fields}

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json=body)
        self.seen[f"HTTP {response.status_code}"] += 1
        return dict(response.json())

    async def _turn(self, prompt: list[int]) -> list[int]:
        answer = await self._ask(self._body(prompt))
        return [*prompt, *answer["choices"][0]["token_ids"]] if "choices" in answer else prompt

    async def _leave(self, prompt: list[int]) -> list[int]:
        """Read a few events, or none, and hang up."""
        body = self._body(prompt, max_tokens=200, stream=True)
        num_lines = self.rng.randrange(20)
        with suppress(httpx.TransportError):
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    num_lines -= 1
                    if num_lines < 0:
                        break
        self.seen["left"] += 1
        return prompt

    async def _deadline(self, prompt: list[int]) -> list[int]:
        await self._ask(self._body(prompt, max_tokens=400, deadline_s=self.rng.choice((0.02, 0.1, 0.5))))
        return prompt

    async def _flush(self, prompt: list[int]) -> list[int]:
        """Mostly refused: others are at work."""
        self.seen[f"flush: HTTP {(await self.http.post('/flush_cache')).status_code}"] += 1
        return prompt

    async def _refused(self, prompt: list[int]) -> list[int]:
        wrong = ({"max_tokens": -1}, {"prompt": [10**9]}, {"prompt": prompt * 100}, {"model": "none"}, {"n": 0})
        await self._ask(self._body(prompt, **self.rng.choice(wrong)))
        return prompt


# ---- what is noted ---------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    at_s: list[float] = field(default_factory=list)
    rss_mb: dict[str, list[float]] = field(default_factory=dict)
    pages: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # worker -> state -> pages

    def take(self, at_s: float, pids: dict[str, int], workers: list[dict[str, Any]]) -> None:
        self.at_s.append(at_s)
        for name, pid in pids.items():
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.rss_mb.setdefault(name, []).append(resident * PAGE_BYTES / 1e6)
        for worker in workers:
            states = self.pages.setdefault(worker["name"], {state: [] for state in PAGE_STATES})
            for state in PAGE_STATES:
                states[state].append(worker["load"][f"{state}_pages"])


def descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def open_files(pid: int) -> Iterator[Path]:
    """A file may be closed while they are looked at."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield link.readlink()


def processes() -> dict[str, int]:
    """Our children by name: launcher, gateway, and workers by their name locks."""
    found = {}
    for pid in descendants(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        held = [path.stem for path in open_files(pid) if path.suffix == ".lock"]
        if held:
            found[held[0]] = pid
        elif "headstart.worker.gateway_process" in words:
            found["gateway"] = pid
        elif "headstart.cli" in words:
            found["launcher"] = pid
    return found


async def watch(url: str, pids: dict[str, int], until: float) -> Samples:
    samples, began = Samples(), time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while (now := time.monotonic()) < until:
            workers = (await http.get("/cluster")).json()["workers"]
            samples.take(now - began, pids, workers)
            await asyncio.sleep(max(0.0, now + 1.0 - time.monotonic()))
    return samples


# ---- verdict ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A straight line through the means of blocks, so that what one second owes to the last counts once."""

    mb_per_h: float
    error_mb_per_h: float
    growth_mb: float  # over the time looked at

    @property
    def is_flat(self) -> bool:
        return self.mb_per_h < MAX_ERRORS * self.error_mb_per_h or self.growth_mb < MAX_GROWTH_MB


def end_of_warm_up(at_s: list[float]) -> int:
    return next(index for index, at in enumerate(at_s) if at >= at_s[-1] * WARM_UP_SHARE)


def slope(at_s: list[float], mb: list[float]) -> Slope:
    start = end_of_warm_up(at_s)
    hours = [float(block.mean()) for block in np.array_split(np.array(at_s[start:]) / 3600, NUM_BLOCKS)]
    means = [float(block.mean()) for block in np.array_split(np.array(mb[start:]), NUM_BLOCKS)]
    (rise, _), covariance = np.polyfit(hours, means, 1, cov=True)
    return Slope(float(rise), float(covariance[0, 0] ** 0.5), float(rise) * (hours[-1] - hours[0]))


async def leftovers(url: str, pids: dict[str, int]) -> list[str]:
    """What is still held some seconds after the last client has gone."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        deadline = time.monotonic() + SETTLE_S
        while True:
            state = (await http.get("/cluster")).json()
            held = [f"{state['unfinished']} requests"] if state["unfinished"] else []
            for worker in state["workers"]:
                load = worker["load"]
                held += [
                    f"{worker['name']}: {load[f'{kind}_pages']} {kind} pages"
                    for kind in ("inflight", "private", "pinned")
                    if load[f"{kind}_pages"]
                ]
            if not held or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
    return held + [f"{name} has ended" for name, pid in processes().items() if pids.get(name) != pid]


def draw(samples: Samples, slopes: dict[str, Slope], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2 + len(samples.pages), 1, figsize=(9, 10), sharex=True, layout="constrained")
    start = end_of_warm_up(samples.at_s)
    minutes = [at / 60 for at in samples.at_s]
    for name, mb in samples.rss_mb.items():
        rows[0].plot(minutes, mb, label=name, linewidth=1.2)
        growth = [now - mb[start] for now in mb]
        rows[1].plot(minutes, growth, label=f"{name}: {slopes[name].mb_per_h:+.1f} MB/h", linewidth=1.2)
    for axes in rows[:2]:
        axes.axvspan(0, minutes[start], color="0.92", label="warm-up, not judged")
    rows[0].set_ylabel("resident memory (MB)")
    rows[0].set_ylim(bottom=0)
    rows[1].set_ylabel("change since the\nwarm-up (MB)")
    for axes, (name, states) in zip(rows[2:], samples.pages.items(), strict=True):
        axes.stackplot(
            minutes, *states.values(), labels=states, colors=pyplot.colormaps["cividis"](np.linspace(0, 1, 5))
        )
        axes.set_ylabel(f"{name}: pages")
    for axes in rows:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), reverse=axes not in rows[:2])
        axes.grid(alpha=0.3)
    rows[-1].set_xlabel("time (minutes)")
    for kind in ("png", "svg"):
        figure.savefig(out / f"soak.{kind}", dpi=150)


# ---- command ---------------------------------------------------------------------------------------------------------


async def soak(url: str, seconds: float, num_clients: int, seed: int) -> tuple[Samples, Counter[str], list[str]]:
    pids, seen = processes(), Counter[str]()
    until = time.monotonic() + seconds
    shared = [Random(seed).randrange(100, 40_000) for _ in range(150)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        clients = [Client(http, Random(seed * 1000 + number), seen, shared) for number in range(num_clients)]
        samples, *_ = await asyncio.gather(watch(url, pids, until), *(client.run(until) for client in clients))
    return samples, seen, await leftovers(url, pids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with running(Deployment("soak", 1, cache=True, flags=FLAGS)) as server:
        samples, seen, held = asyncio.run(soak(server.base_url, options.seconds, options.clients, options.seed))
    slopes = {name: slope(samples.at_s, mb) for name, mb in samples.rss_mb.items()}
    draw(samples, slopes, options.out)
    report = {"at_s": samples.at_s, "rss_mb": samples.rss_mb, "pages": samples.pages, "seen": seen, "left_over": held}
    (options.out / "soak.json").write_text(json.dumps(report))
    print(f"{options.seconds:g} s, {options.clients} clients, seed {options.seed}: {dict(sorted(seen.items()))}")
    for name, line in slopes.items():
        now, verdict = samples.rss_mb[name][-1], "flat" if line.is_flat else "GROWS"
        print(f"{name:12} {now:7.1f} MB  {line.mb_per_h:+8.1f} ± {line.error_mb_per_h:.1f} MB/h  {verdict}")
    print(f"left over at the end: {', '.join(held) or 'nothing'}")
    return int(bool(held) or not all(line.is_flat for line in slopes.values()))


if __name__ == "__main__":
    sys.exit(main())
