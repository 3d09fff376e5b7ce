"""Triton kernels that draw the tokens of a whole batch from its logits.

The arithmetic is the CPU sampler's (`executor.sampler`): numbers in [0, 1) of Philox 4x64-10 (Salmon et al. 2011), keyed
by the seed and counted by (token, output index, choice), and an exponential race in float64. It runs in logarithms: the
token with the largest `logit / temperature - log(-log(number))` arrives first. Among equals the lowest token id wins.

Stage 1 takes a block of a row's vocabulary, stage 2 the blocks of a row. Both read all parameters from device memory, so
they can sit in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headstart.executor.cuda.columns import BLOCK_WIDTH, CHOICE, INDEX, MODE, SEED, TEMPERATURE

VOCAB_BLOCK = 4096

_WIDTH: tl.constexpr = tl.constexpr(BLOCK_WIDTH)
_MODE: tl.constexpr = tl.constexpr(MODE)
_SEED: tl.constexpr = tl.constexpr(SEED)
_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_INDEX: tl.constexpr = tl.constexpr(INDEX)
_CHOICE: tl.constexpr = tl.constexpr(CHOICE)
_STREAM: tl.constexpr = tl.constexpr(0x68656164_73746172)


@triton.jit
def philox(counter, index, choice, seed):
    """Four uint64 for each `counter`: the words of Philox 4x64-10 at (counter, index, choice, 0)."""
    c0 = counter.to(tl.uint64)
    zero = c0 * 0
    c1 = zero + index.to(tl.uint64)
    c2 = zero + choice.to(tl.uint64)
    c3 = zero
    k0 = zero + seed.to(tl.uint64, bitcast=True)
    k1 = zero + _STREAM
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def unit(word):
    """The top 53 bits as a number in [0, 1)."""
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def uniforms(first, index, choice, seed, SIZE: tl.constexpr):
    """Numbers of tokens [first, first + SIZE), float64. The generator counts up before it draws."""
    n = (first // 4 + 1 + tl.arange(0, SIZE // 4)).to(tl.int64)
    a, b, c, d = philox(n, index, choice, seed)
    return tl.reshape(tl.join(tl.join(unit(a), unit(c)), tl.join(unit(b), unit(d))), (SIZE,))


@triton.jit
def race_kernel(
    logits_ptr, stride_logits, block_ptr, floor_ptr, score_ptr, token_ptr, flag_ptr, vocab,
    HAS_FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (vocabulary block, row): the block's winner and its score."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    spec = block_ptr + row * _WIDTH
    mode = tl.load(spec + _MODE)
    at = row * tl.num_programs(0) + part
    if mode == 0:
        return
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + tokens, mask=inside, other=-float("inf"))
    logits = logits.to(tl.float32)
    broken = (logits != logits) | (logits == float("inf"))
    score = logits.to(tl.float64)
    if mode == 2:
        temperature = tl.load(spec + _TEMPERATURE).to(tl.float64, bitcast=True)
        numbers = uniforms(part * BLOCK, tl.load(spec + _INDEX), tl.load(spec + _CHOICE), tl.load(spec + _SEED), BLOCK)
        score = score / temperature - tl.log(-tl.log(numbers))
        if HAS_FLOOR:
            score = tl.where(logits < tl.load(floor_ptr + row), -float("inf"), score)
    score = tl.where(inside, score, -float("inf"))
    best = tl.max(score, 0)
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, tl.min(tl.where(score == best, tokens, 0x7FFFFFFF), 0))
    tl.store(flag_ptr + at, tl.max(broken.to(tl.int32), 0))


@triton.jit
def finish_kernel(block_ptr, score_ptr, token_ptr, flag_ptr, out_ptr, out_flag_ptr, num_parts, PARTS: tl.constexpr):
    """Program (row): the winner among the blocks' winners."""
    row = tl.program_id(0)
    if tl.load(block_ptr + row * _WIDTH + _MODE) == 0:
        return
    parts = tl.arange(0, PARTS)
    there = parts < num_parts
    at = row * num_parts + parts
    score = tl.load(score_ptr + at, mask=there, other=-float("inf"))
    token = tl.load(token_ptr + at, mask=there, other=0x7FFFFFFF)
    broken = tl.max(tl.load(flag_ptr + at, mask=there, other=0), 0)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(there & (score == best), token, 0x7FFFFFFF), 0)
    failed = (broken != 0) | (best == -float("inf"))
    tl.store(out_ptr + row, tl.where(failed, 0, winner).to(tl.int64))
    tl.store(out_flag_ptr + row, failed.to(tl.int64))


@triton.jit
def uniforms_kernel(out_ptr, counter_ptr, SIZE: tl.constexpr):
    first = tl.program_id(0) * SIZE
    index, choice, seed = tl.load(counter_ptr), tl.load(counter_ptr + 1), tl.load(counter_ptr + 2)
    tl.store(out_ptr + first + tl.arange(0, SIZE), uniforms(first, index, choice, seed, SIZE))


def uniforms_of(seed: int, choice: int, output_index: int, count: int, device: torch.device) -> torch.Tensor:
    """float64 [count], `count` a multiple of 1,024: see `executor.sampler.uniforms`."""
    out = torch.empty(count, dtype=torch.float64, device=device)
    counter = torch.tensor([output_index, choice, seed - (seed >> 63 << 64)], dtype=torch.int64, device=device)
    uniforms_kernel[(count // 1024,)](out, counter, SIZE=1024)
    return out


@dataclass(frozen=True, slots=True)
class Winners:
    """Room for the blocks' winners of up to `max_rows` rows."""

    scores: torch.Tensor
    tokens: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, vocab_size: int, device: torch.device | str) -> "Winners":
        shape = (max_rows, num_parts(vocab_size))
        return cls(
            torch.empty(shape, dtype=torch.float64, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )


def num_parts(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, VOCAB_BLOCK)


def draw(
    logits: torch.Tensor,
    block: torch.Tensor,
    winners: Winners,
    out: torch.Tensor,
    flags: torch.Tensor,
    floors: torch.Tensor | None = None,
) -> None:
    """Draw a token for each row of `logits` [rows, vocabulary] whose MODE in `block` [>= rows, BLOCK_WIDTH] is not SKIP.

    `out` and `flags`, int64 [>= rows], take token ids and IS_FINE or NOT_FINITE. `floors`, float32 [rows]: logits below
    are not drawn; greedy rows ignore them.
    """
    rows, vocab_size = logits.shape
    parts = num_parts(vocab_size)
    race_kernel[(parts, rows)](
        logits, logits.stride(0), block, block if floors is None else floors, winners.scores, winners.tokens,
        winners.flags, vocab_size, HAS_FLOOR=floors is not None, BLOCK=VOCAB_BLOCK, num_warps=4,
    )  # fmt: skip
    finish_kernel[(rows,)](
        block, winners.scores, winners.tokens, winners.flags, out, flags, parts,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
