"""Which tokens a sequence has had, counted on the device: for penalties.

A row's input may be a token that the host does not know yet, so counts are kept on the device and the input is added
there. They are built anew where a row is not the continuation of what its slot has counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.core.arrays import Int32Array
from headstart.core.request import SamplingParams
from headstart.executor.cuda.positions import Position
from headstart.executor.cuda.upload import to_device

_Key = tuple[int, int, int]


@dataclass(slots=True)
class _Counted:
    slot: int
    params: SamplingParams  # holding it keeps its id its own
    known: Int32Array  # the tokens counted, but for one that was pending
    num_tokens: int


class TokenHistory:
    """Slots of counts for the rows that are penalised, least recently used first."""

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_slots = max_slots
        self._device = device
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._entries: dict[_Key, _Counted] = {}

    def advance(self, positions: Sequence[Position], inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count what each position has before it; `inputs` int64 holds, by place, the tokens that rows were given.

        -> `seen` bool and `counts` int32, [positions, vocabulary]: of prompt and outputs, and of outputs.
        """
        entries = [self._entry(position) for position in positions]
        added = []
        for position, entry in zip(positions, entries, strict=True):
            context = position.context
            num_tokens = len(context) + position.is_pending
            if not _continues(entry, context, num_tokens):
                self._count(entry.slot, context, position.spec.prompt_len)
                if position.is_pending:
                    added.append((entry.slot, position.place))
            else:
                added.append((entry.slot, position.place))
            entry.known, entry.num_tokens = context, num_tokens
        if added:
            slots, places = to_device(np.array(added, np.int64).T.copy(), self._device)
            tokens = inputs[places]
            self._seen[slots, tokens] = True
            self._counts[slots, tokens] += 1
        chosen = to_device(np.array([entry.slot for entry in entries], np.int64), self._device)
        return self._seen[chosen], self._counts[chosen]

    def _entry(self, position: Position) -> _Counted:
        params = position.spec.params
        key = (id(params), position.spec.choice, position.offset)
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = _Counted(self._free_slot(), params, np.empty(0, np.int32), -1)
        self._entries[key] = entry
        return entry

    def _free_slot(self) -> int:
        num_slots = len(self._entries)
        if num_slots >= self._max_slots:
            return self._entries.pop(next(iter(self._entries))).slot
        if num_slots == len(self._seen):
            room = max(8, 2 * num_slots)
            self._seen = _grown(self._seen, room)
            self._counts = _grown(self._counts, room)
        return num_slots

    def _count(self, slot: int, context: Int32Array, prompt_len: int) -> None:
        tokens = to_device(context.astype(np.int64), self._device)
        self._seen[slot].zero_()[tokens] = True
        outputs = tokens[prompt_len:]
        self._counts[slot].zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))


def _continues(entry: _Counted, context: Int32Array, num_tokens: int) -> bool:
    """The context is what was counted and one token more, which the row was given."""
    known = entry.known
    return entry.num_tokens == num_tokens - 1 and np.array_equal(context[: len(known)], known[: len(context)])


def _grown(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    grown = torch.zeros(num_rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[: len(tensor)] = tensor
    return grown
