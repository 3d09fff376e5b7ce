"""Clients under fire: what each should hear is known from a quiet run, and compared token by token."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import ge
from random import Random
from typing import Any

from cluster import DEMO, Cluster, until

TIE = 1e-3
"""Natural-log difference below which the order of two tokens may depend on how rows were batched."""
NUM_NEW = 24
TURN_TOKENS = 20
RETRY_S = 0.05
"""A client that was refused waits so long."""


class Refused(Exception):
    """An error status, an error event in mid-stream, or a stream that ends without its last line; `status` is 200 then."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Heard:
    """One streamed completion."""

    choices: dict[int, Choice]
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


def listen(cluster: Cluster, body: dict[str, Any], on_event: Callable[[Heard], None] = lambda heard: None) -> Heard:
    """Stream a completion to its end. Raises Refused, and httpx's errors where the connection breaks."""
    heard = Heard({index: Choice() for index in range(body.get("n", 1))})
    heard_at = time.monotonic()
    asked = {"model": DEMO, **body, "stream": True, "return_token_ids": True}
    with cluster.http.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, response.read().decode())
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return heard
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Refused(200, line)
            for part in event.get("choices", []):
                choice = heard.choices[part["index"]]
                choice.text += part["text"]
                choice.token_ids += part.get("token_ids") or []
                choice.finish_reason = part["finish_reason"] or choice.finish_reason
            wait, heard_at = time.monotonic() - heard_at, time.monotonic()
            heard.first_wait_s = heard.first_wait_s or wait
            heard.longest_wait_s = max(heard.longest_wait_s, wait)
            on_event(heard)
    raise Refused(200, "the stream ended without [DONE]")


@dataclass(frozen=True)
class Ask:
    """A completion and what a quiet run answered."""

    body: dict[str, Any]
    quiet: dict[str, Any]

    @classmethod
    def quietly(cls, cluster: Cluster, body: dict[str, Any]) -> "Ask":
        return cls(body, cluster.complete(**body, logprobs=2))

    def is_answered_by(self, index: int, choice: Choice) -> bool:
        """The same tokens, text and end; of greedy ones the tokens up to the first place where the two best tie."""
        quiet = self.quiet["choices"][index]
        expected = (quiet["token_ids"], quiet["text"], quiet["finish_reason"])
        if (choice.token_ids, choice.text, choice.finish_reason) == expected:
            return True
        if self.body.get("temperature") != 0:
            return False
        return same_greedy({"choices": [{"token_ids": choice.token_ids}]}, {"choices": [quiet]})

    def difference(self, index: int, choice: Choice) -> str:
        """Where the answer leaves the quiet one, for a test's report."""
        quiet = self.quiet["choices"][index]
        pairs = enumerate(zip(choice.token_ids, quiet["token_ids"], strict=False))
        place = next((at for at, (one, other) in pairs if one != other), "the end")
        lengths = f"{len(choice.token_ids)} tokens, not {len(quiet['token_ids'])}"
        return f"choice {index} differs at {place}: {lengths}, {choice.finish_reason}, not {quiet['finish_reason']}"


def same_greedy(ours: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Equal tokens, up to the first place where the two best are closer than TIE."""
    mine, theirs = ours["choices"][0], reference["choices"][0]
    for index, (one, other) in enumerate(zip(mine["token_ids"], theirs["token_ids"], strict=False)):
        if one != other:
            best = sorted(theirs["logprobs"]["top_logprobs"][index].values(), reverse=True)
            return best[0] - best[1] < TIE
    return len(mine["token_ids"]) == len(theirs["token_ids"])


@dataclass
class Count:
    """What clients saw. Nothing is lost, doubled or wrong where each counts 0."""

    answers: int = 0
    lost: int = 0
    wrong: int = 0
    doubled: int = 0
    errors: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0

    @property
    def damage(self) -> tuple[int, int, int]:
        return self.lost, self.wrong, self.doubled


class Load:
    """Clients that go through their turns again and again until they are told to stop."""

    def __init__(self, cluster: Cluster, conversations: list[list[Ask]]) -> None:
        self.cluster = cluster
        self.count = Count()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._num_rounds = [0] * len(conversations)
        self._threads = [
            threading.Thread(target=self._talk, args=(index, turns)) for index, turns in enumerate(conversations)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def take_stall(self) -> float:
        """The longest wait for a token since this was last asked."""
        with self._lock:
            longest, self.count.longest_stall_s = self.count.longest_stall_s, 0.0
        return longest

    def take_errors(self) -> list[str]:
        with self._lock:
            errors, self.count.errors = self.count.errors, []
        return errors

    def wait_for_answers(self, num_more: int, timeout_s: float = 60.0) -> None:
        goal = self.count.answers + num_more
        until(lambda: self.count.answers >= goal, f"{num_more} more answers ({self.count})", timeout_s)

    def wait_for_rounds(self, timeout_s: float = 120.0) -> None:
        """Each conversation is gone through once from its beginning, with an answer to every turn."""
        goals = [num_rounds + 2 for num_rounds in self._num_rounds]  # the one under way began before
        until(lambda: all(map(ge, self._num_rounds, goals)), f"a round of each ({self.count})", timeout_s)

    def _talk(self, index: int, turns: list[Ask]) -> None:
        while not self._stop.is_set():
            answered = [not self._stop.is_set() and self._ask(turn) for turn in turns]
            self._num_rounds[index] += all(answered)

    def _ask(self, turn: Ask) -> bool:
        try:
            heard = listen(self.cluster, turn.body)
        except Exception as error:
            with self._lock:
                self.count.errors.append(repr(error))
            self._stop.wait(RETRY_S)
            return False
        with self._lock:
            self._judge(turn, heard)
        return True

    def _judge(self, turn: Ask, heard: Heard) -> None:
        count = self.count
        count.answers += 1
        count.longest_stall_s = max(count.longest_stall_s, heard.longest_wait_s)
        for index, choice in heard.choices.items():
            surplus = len(choice.token_ids) - len(turn.quiet["choices"][index]["token_ids"])
            count.lost += max(0, -surplus)
            count.doubled += max(0, surplus)
            count.wrong += surplus == 0 and not turn.is_answered_by(index, choice)


def some(rng: Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def greedy(prompt: list[int], max_tokens: int = NUM_NEW, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def conversations(cluster: Cluster, count: int, num_turns: int, seed: int = 80) -> list[list[Ask]]:
    """Conversations on a shared beginning, each turn going on from the answer before, asked one after the other."""
    rng = Random(seed)
    shared = some(rng, 100)
    talks = []
    for _ in range(count):
        prompt, turns = [*shared, *some(rng, TURN_TOKENS)], []
        for _ in range(num_turns):
            turn = Ask.quietly(cluster, greedy(prompt))
            turns.append(turn)
            prompt = [*prompt, *turn.quiet["choices"][0]["token_ids"], *some(rng, TURN_TOKENS)]
        talks.append(turns)
    return talks
