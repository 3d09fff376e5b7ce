"""Draws a step's tokens: most of them all at once, those with further parameters in a second pass over their rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.executor.cuda.adjust import Edits, Penalties, Truncation, logprobs_of
from headstart.executor.cuda.columns import ALL_BANNED, BLOCK_WIDTH, MODE, NOT_FINITE
from headstart.executor.cuda.draw import Winners, draw
from headstart.executor.cuda.history import TokenHistory
from headstart.executor.cuda.positions import Kinds, Position, banned_ids, columns_of, is_greedy
from headstart.executor.cuda.upload import to_device, to_host

MAX_HISTORIES = 1024


@dataclass(frozen=True, slots=True)
class FetchedLogprobs:
    """Log-probabilities on their way to the host, row i of which belongs to place `places[i]`."""

    places: list[int]
    num_top: list[int]
    parts: tuple[torch.Tensor, ...]  # chosen [n]; values and ids of the best [n, most]


class BatchSampler:
    """Owns the tokens of the last step, which are the inputs of the next: int64 `drawn` [2, places], ids and flags."""

    def __init__(self, vocab_size: int, max_places: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.kinds = Kinds()
        self.drawn = torch.zeros(2, max_places, dtype=torch.int64, device=device)
        self._winners = Winners.empty(max_places, vocab_size, device)
        self._history = TokenHistory(vocab_size, MAX_HISTORIES, device)

    def draw_plain(self, logits: torch.Tensor, block: torch.Tensor) -> None:
        """Draw for every place whose MODE asks for it. May be captured."""
        draw(logits, block, self._winners, self.drawn[0], self.drawn[1])

    def draw_apart(
        self, logits: torch.Tensor, inputs: torch.Tensor, positions: Sequence[Position]
    ) -> FetchedLogprobs | None:
        """Draw for `positions`, with everything that their parameters ask for. `inputs`: the step's tokens, by place."""
        places = to_device(np.array([position.place for position in positions], np.int64), self._device)
        raw = logits.index_select(0, places).float()
        adjusted = self._adjusted(raw, inputs, positions)
        block = np.zeros((len(positions), BLOCK_WIDTH), np.int64)
        block[:, MODE:] = [columns_of(position, self.kinds.of(position.spec.params)) for position in positions]
        out = torch.zeros(2, len(positions), dtype=torch.int64, device=self._device)
        winners = Winners.empty(len(positions), self.vocab_size, self._device)
        floors = self._floors(adjusted, positions)
        draw(adjusted, to_device(block, self._device), winners, out[0], out[1], floors)
        broken = ~torch.isfinite(raw.max(dim=-1).values)
        out[1] = torch.where(broken, NOT_FINITE, out[1] * ALL_BANNED)
        self.drawn.index_copy_(1, places, out)
        return self._logprobs(raw, out[0], positions)

    def _adjusted(self, raw: torch.Tensor, inputs: torch.Tensor, positions: Sequence[Position]) -> torch.Tensor:
        params = [position.spec.params for position in positions]
        logits = raw.clone()
        self._edit(logits, [list(one.logit_bias.items()) for one in params])
        penalised = [
            i for i, one in enumerate(params)
            if one.repetition_penalty != 1.0 or one.frequency_penalty or one.presence_penalty
        ]  # fmt: skip
        if penalised:
            rows = to_device(np.array(penalised, np.int64), self._device)
            seen, counts = self._history.advance([positions[i] for i in penalised], inputs)
            numbers = [
                (params[i].repetition_penalty, params[i].frequency_penalty, params[i].presence_penalty)
                for i in penalised
            ]
            columns = to_device(np.array(numbers, np.float64).T[..., None], self._device)
            logits.index_copy_(0, rows, Penalties(*columns).apply(logits.index_select(0, rows), seen, counts))
        self._allow(logits, [one.allowed_token_ids for one in params])
        self._edit(logits, [[(token, -np.inf) for token in banned_ids(position.spec)] for position in positions])
        return logits

    def _allow(self, logits: torch.Tensor, allowed: list[tuple[int, ...]]) -> None:
        """Ban all other tokens where some are named."""
        flat = [(row, token) for row, tokens in enumerate(allowed) for token in tokens]
        if flat:
            rows, tokens = to_device(np.array(flat, np.int64).T.copy(), self._device)
            is_other = torch.zeros(logits.shape, dtype=torch.bool, device=self._device)
            is_other[rows] = True
            is_other[rows, tokens] = False
            logits.masked_fill_(is_other, -torch.inf)

    def _edit(self, logits: torch.Tensor, edits: list[list[tuple[int, float]]]) -> None:
        """Add values to single logits: `edits` lists (token, value) of each row."""
        flat = [(row, token, value) for row, ones in enumerate(edits) for token, value in ones]
        if flat:
            rows, tokens, values = zip(*flat, strict=True)
            at = to_device(np.array([rows, tokens], np.int64), self._device)
            Edits(at[0], at[1], to_device(np.array(values, np.float32), self._device)).apply(logits)

    def _floors(self, adjusted: torch.Tensor, positions: Sequence[Position]) -> torch.Tensor | None:
        params = [position.spec.params for position in positions]
        cut = [
            i for i, one in enumerate(params)
            if not is_greedy(one) and (one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0)
        ]  # fmt: skip
        if not cut:
            return None
        rows = to_device(np.array(cut, np.int64), self._device)
        numbers = np.array([(params[i].temperature, params[i].top_p, params[i].min_p) for i in cut], np.float64)
        temperature, top_p, min_p = to_device(numbers.T[..., None], self._device)
        top_k = to_device(np.array([[params[i].top_k] for i in cut], np.int64), self._device)
        floors = torch.full((len(positions),), -torch.inf, device=self._device)
        most = max(params[i].top_k for i in cut) if all(params[i].top_k for i in cut) else None
        found = Truncation(temperature, top_k, top_p, min_p).floors(adjusted.index_select(0, rows), most)
        return floors.index_copy_(0, rows, found)

    def _logprobs(
        self, raw: torch.Tensor, tokens: torch.Tensor, positions: Sequence[Position]
    ) -> FetchedLogprobs | None:
        asked = [(i, position) for i, position in enumerate(positions) if position.spec.num_top_logprobs is not None]
        if not asked:
            return None
        rows = to_device(np.array([i for i, _ in asked], np.int64), self._device)
        num_top = [position.spec.num_top_logprobs or 0 for _, position in asked]
        found = logprobs_of(raw.index_select(0, rows), tokens.index_select(0, rows), max(num_top))
        return FetchedLogprobs(
            [position.place for _, position in asked], num_top, tuple(to_host(part) for part in found)
        )
