"""A small scheduler around a real executor, and the model library itself as the reference."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Row, Sampled, SampleSpec
from headstart.core.layout import pages_for
from headstart.core.request import SamplingParams
from headstart.executor.build import ExecutorConfig, make_executor
from headstart.model.load import load_model
from headstart.model.source import WeightSource

GREEDY = SamplingParams(temperature=0.0)
NOISE = 2e-3
"""Logit differences below this are fp32 noise of another order of summation; a margin below it may flip the argmax."""

SMALL_MODELS: dict[str, dict[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def write_small_model(folder: Path, kind: str, **changes: object) -> Path:
    """A configuration of 4 layers with grouped-query attention; weights are random."""
    config: dict[str, object] = SMALL_MODELS[kind] | {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 311,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "eos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def reference_model(source: WeightSource) -> PreTrainedModel:
    """The library's own model and attention with the same weights, in fp32."""
    model = load_model(source, torch.float32)
    model.set_attn_implementation("sdpa")
    return model


@dataclass
class Sequence_:
    """One greedy request: its prompt, what was generated, and its pages."""

    tokens: list[int]
    prompt_len: int
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class World:
    """Drives an executor with batches built by hand."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.executor = make_executor(config)
        self.page_size = config.page_size
        self._pages = list(np.random.default_rng(7).permutation(self.executor.pool.num_pages))
        self._step_id = 0

    def run(self, rows: Sequence[Row]) -> BatchOutput:
        self._step_id += 1
        self.executor.launch(Batch(self._step_id, tuple(rows)))
        while (output := self.executor.poll()) is None:
            time.sleep(0.0005)
        assert output.step_id == self._step_id
        return output

    def admit(self, prompt: Sequence[int], like: Sequence_ | None = None) -> Sequence_:
        """A new request; it starts with the whole pages of `like` that hold the same tokens."""
        sequence = Sequence_(list(prompt), len(prompt))
        if like is not None:
            known = min(like.num_computed, len(prompt) - 1)
            same = next((i for i in range(known) if prompt[i] != like.tokens[i]), known)
            shared = same // self.page_size
            sequence.pages = like.pages[:shared]
            sequence.num_computed = shared * self.page_size
        return sequence

    def row(self, sequence: Sequence_, row_id: int, chunk: int, num_top: int | None) -> Row:
        """The next row: a chunk of the prompt without its last token, or a token that is sampled from."""
        start = sequence.num_computed
        left = sequence.prompt_len - 1 - start
        num_new = min(left, chunk) if left > 0 else 1
        while len(sequence.pages) < pages_for(start + num_new, self.page_size):
            sequence.pages.append(self._pages.pop())
        tokens = int32_array(sequence.tokens[start : start + num_new])
        spec = None
        if left <= 0:
            context = int32_array(sequence.tokens)
            index = len(sequence.outputs)
            spec = SampleSpec(GREEDY, 0, index, context, sequence.prompt_len, num_top_logprobs=num_top)
        return Row(row_id, tokens, start, int32_array(sequence.pages), spec)

    def apply(self, sequence: Sequence_, row: Row, sampled: Sampled | None) -> None:
        sequence.num_computed += len(row.tokens)
        if sampled is not None:
            assert sampled.error is None
            sequence.tokens.append(sampled.token_ids[0])
            if sampled.top_logprobs:
                dense = np.empty(len(sampled.top_logprobs[0]))
                for token, logprob in sampled.top_logprobs[0]:
                    dense[token] = logprob
                sequence.logprobs.append(dense)

    def generate(
        self, sequences: Sequence[Sequence_], num_tokens: int, chunk: int, stagger: int = 0, num_top: int | None = None
    ) -> None:
        """Greedy tokens for all, batched; sequence i joins at step i * stagger, so prompts meet decoding rows."""
        step = 0
        while any(len(sequence.outputs) < num_tokens for sequence in sequences):
            active = [
                (i, sequence)
                for i, sequence in enumerate(sequences)
                if i * stagger <= step and len(sequence.outputs) < num_tokens
            ]
            rows = [self.row(sequence, i, chunk, num_top) for i, sequence in active]
            sampled = {one.row_id: one for one in self.run(rows).sampled}
            for (i, sequence), row in zip(active, rows, strict=True):
                self.apply(sequence, row, sampled.get(i))
            step += 1

    def kv_of(self, sequence: Sequence_) -> torch.Tensor:
        """[layers, 2, kv_heads, num_computed, head_dim] as the pool holds it."""
        return read_kv(self.executor.pool.data, sequence.pages, sequence.num_computed)


def read_kv(pool: torch.Tensor, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """[layers, 2, kv_heads, num_tokens, head_dim] of the sequence whose page table is `pages`."""
    table = pool[torch.tensor(pages)]
    return table.permute(2, 3, 1, 0, 4, 5).flatten(3, 4)[:, :, :, :num_tokens]


class HoldsKV(Protocol):
    def kv_of(self, sequence: Sequence_) -> torch.Tensor: ...


def assert_greedy(sequence: Sequence_, reference: PreTrainedModel) -> None:
    """Every output is the reference's argmax after the same tokens, unless its margin is below the noise.

    By induction that is the library's greedy generation, and it goes on checking after a permitted flip. Where full
    log-probabilities were collected they are compared too.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([sequence.tokens]), use_cache=False).logits[0, sequence.prompt_len - 1 : -1]
    for i, token in enumerate(sequence.outputs):
        margin = float(logits[i].max() - logits[i, token])
        assert margin < NOISE, f"output {i} is {token}, {margin} below {int(logits[i].argmax())}"
    if sequence.logprobs:
        expected = torch.log_softmax(logits, -1).numpy()[-len(sequence.logprobs) :]
        np.testing.assert_allclose(np.stack(sequence.logprobs), expected, atol=NOISE / 2)


def assert_same_kv(world: HoldsKV, sequence: Sequence_, reference: PreTrainedModel) -> None:
    """The pool holds the library's own keys and values."""
    with torch.inference_mode():
        cache = reference(torch.tensor([sequence.tokens[: sequence.num_computed]]), use_cache=True).past_key_values
    expected = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    torch.testing.assert_close(world.kv_of(sequence), expected, atol=1e-3, rtol=1e-3)
