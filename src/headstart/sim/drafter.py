"""Guesses of the next tokens, some right and some wrong, as a seed has it.

A right guess is what the simulated model will draw: the drafter computes it in the same way. So every share of accepted
drafts comes up, and a row that accepts none, some and all of them.
"""

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.batch import SampleSpec
from headstart.core.request import Request
from headstart.sim.kv_fingerprints import ContextBook, chain, next_token


class SimDrafter:
    """Satisfies `scheduler.protocol.Drafter`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._book = ContextBook()

    def propose(self, request: Request, tokens: Int32Array, max_tokens: int) -> Int32Array:
        """At most `max_tokens` guesses of what follows `tokens`, the prompt and the outputs so far."""
        fingerprint = self._book.root(request.namespace)
        for token in tokens.tolist():
            fingerprint = chain(fingerprint, token)
        lot = chain(fingerprint, self._seed)
        num_drafts, num_right = lot % (max_tokens + 1), (lot >> 8) % (max_tokens + 2)
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            token = self._next(request, [*tokens.tolist(), *drafts], fingerprint)
            if len(drafts) >= num_right:
                token = (token + 1) % self._vocab_size
            drafts.append(token)
            fingerprint = chain(fingerprint, token)
        return int32_array(drafts)

    def _next(self, request: Request, tokens: list[int], fingerprint: int) -> int:
        num_outputs = len(tokens) - len(request.prompt)
        banned = request.stop.stop_token_ids if num_outputs < request.stop.min_new_tokens else ()
        context = int32_array(tokens)
        spec = SampleSpec(request.sampling, request.ref.choice, num_outputs, context, len(request.prompt), banned)
        return next_token(fingerprint, spec, self._vocab_size)
