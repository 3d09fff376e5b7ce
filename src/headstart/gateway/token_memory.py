"""Remembers which ids stand for the text of earlier answers, so that the next turn reuses them instead of guessing.

Encoding a conversation's text again gives other ids wherever the model did not choose the tokenizer's own split, and
with other ids the KV of the whole answer is lost. What is remembered: after which text (up to the last special token
before the answer) which text was sent, and the exact ids of the conversation up to there. A later render that goes on
from that text with exactly that answer, followed by a special token, uses the ids; the rest is encoded from that
special token on, where a tokenizer always splits. Anything else is encoded as usual.

Texts are found by hash at special-token boundaries only, so a lookup costs one pass over the render.
"""

import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from headstart.core.arrays import Int32Array, int32_array
from headstart.text.tokenizer import TextTokenizer

MAX_BOUNDARIES = 1 << 14
"""Special tokens of a render that are looked at. A client may send a million of them, and the event loop waits."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """Ids of the first `num_chars` characters of a render; the rest is to be encoded by itself."""

    ids: list[int]
    num_chars: int = 0
    divergence: int | None = None  # character of the render where it leaves an answer that we remember


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str  # from the boundary on: what the template put before the answer, and the answer
    ids: Int32Array  # of the whole conversation up to the end of `text`


@dataclass(slots=True)
class _Answers:
    """Answers given after one text, latest last."""

    answers: list[_Answer] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)


class TokenMemory:
    """Bounded LRU: at most `max_tokens` ids over all conversations, `answers_each` answers after any one text."""

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int = 4_000_000, answers_each: int = 8) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._answers_each = answers_each
        self._num_tokens = 0
        self._entries: OrderedDict[bytes, _Answers] = OrderedDict()
        self._special = re.compile("|".join(map(re.escape, tokenizer.special_texts)) or r"(?!)")

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def remember(
        self, namespace: bytes, prompt: str, prompt_ids: list[int], answer: str, answer_ids: list[int]
    ) -> bool:
        """Keep an answer's ids if they decode to exactly `answer`, a final special token apart. False if not kept."""
        if answer_ids and answer_ids[-1] in self._tokenizer.special_ids:
            answer_ids = answer_ids[:-1]
        last = deque(self._special.finditer(prompt), maxlen=1)
        if not last or not answer_ids or self._special.search(answer):
            return False
        if self._tokenizer.decode_after(prompt_ids, answer_ids, skip_special_tokens=False) != answer:
            return False
        end = last[0].end()
        key = _digest(namespace, prompt[:end])
        self._store(key, _Answer(prompt[end:] + answer, int32_array(prompt_ids + answer_ids)))
        return True

    def recall(self, namespace: bytes, render: str) -> Recalled:
        """As much as possible of a rendered conversation."""
        divergence = None
        for end, key in reversed(list(self._boundaries(namespace, render))):
            entry = self._entries.get(key)
            if entry is None:
                continue
            self._entries.move_to_end(key)
            for answer in reversed(entry.answers):
                cut = end + len(answer.text)
                if render.startswith(answer.text, end) and self._splits_at(render, cut):
                    return Recalled(answer.ids.tolist(), cut, divergence)
            if divergence is None:
                divergence = self._leaves_at(entry, render, end)
        return Recalled([], 0, divergence)

    def _splits_at(self, render: str, cut: int) -> bool:
        return cut == len(render) or self._special.match(render, cut) is not None

    def _leaves_at(self, entry: _Answers, render: str, end: int) -> int | None:
        """Where the render leaves the closest remembered answer; None where it ends before any answer begins."""
        rest = render[end : end + max(len(answer.text) for answer in entry.answers) + 1]
        if all(answer.text.startswith(rest) for answer in entry.answers):
            return None  # the same question again, not an answer that came back
        return end + max(_common_len(answer.text, rest) for answer in entry.answers)

    def _boundaries(self, namespace: bytes, render: str) -> Iterator[tuple[int, bytes]]:
        """(end of a special token, hash of the render up to there), in order; of the first MAX_BOUNDARIES."""
        digest, done = _start(namespace), 0
        for match in islice(self._special.finditer(render), MAX_BOUNDARIES):
            digest.update(render[done : match.end()].encode("utf-8", "surrogatepass"))
            done = match.end()
            yield done, digest.copy().digest()

    def _store(self, key: bytes, answer: _Answer) -> None:
        entry = self._entries.setdefault(key, _Answers())
        self._entries.move_to_end(key)
        self._num_tokens -= entry.num_tokens
        entry.answers = [known for known in entry.answers if known.text != answer.text]
        entry.answers = [*entry.answers, answer][-self._answers_each :]
        self._num_tokens += entry.num_tokens
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= self._entries.popitem(last=False)[1].num_tokens


def _start(namespace: bytes) -> "hashlib._Hash":
    return hashlib.sha256(b"headstart/token-memory/1" + len(namespace).to_bytes(8, "little") + namespace)


def _digest(namespace: bytes, text: str) -> bytes:
    digest = _start(namespace)
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _common_len(one: str, other: str) -> int:
    bound = min(len(one), len(other))
    return next((i for i in range(bound) if one[i] != other[i]), bound)
