"""Grouped against ungrouped decode attention on a CPU: one layer stack of the demo model's shape, no model around it.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_attention.py [--rows 8] [--prefix 8192] [--threads 1]

Both arms alternate in one process; with and without copies kept between steps. Times are the best of the repeats.
"""

import argparse
import os
import time
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from headstart.attention.row import AttentionRow
from headstart.attention.torch_cpu import CpuAttention
from headstart.core.arrays import int32_array

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 9, 3, 64, 16
PRIVATE = 64


def build_rows(num_rows: int, prefix: int) -> tuple[AttentionRow, ...]:
    common = list(range(prefix // PAGE_SIZE))
    own = PRIVATE // PAGE_SIZE + 1
    firsts = [len(common) + i * own for i in range(num_rows)]
    tokens = int32_array(range(prefix + PRIVATE))
    return tuple(
        AttentionRow(int32_array([*common, *range(first, first + own)]), prefix + PRIVATE, 1, tokens)
        for first in firsts
    )


def step(attention: CpuAttention, rows: tuple[AttentionRow, ...], inputs: list[torch.Tensor]) -> None:
    planned = attention.begin(rows)
    for layer in range(LAYERS):
        planned.attend(layer, *inputs, HEAD_DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = build_rows(args.rows, args.prefix)
    num_pages = int(max(row.pages.max() for row in rows)) + 1
    pool = torch.randn(num_pages, KV_HEADS, LAYERS, 2, PAGE_SIZE, HEAD_DIM)
    inputs = [torch.randn(args.rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    arms = {
        f"{'grouped' if grouped else 'ungrouped'}, {'copies kept' if copies else 'gathered each step'}": partial(
            step, CpuAttention(pool, grouped, copy_bytes=copies), rows, inputs
        )
        for copies in (0, 1 << 40)
        for grouped in (False, True)
    }
    best = dict.fromkeys(arms, float("inf"))
    with torch.inference_mode():
        for _ in range(args.repeats):
            for name, work in arms.items():
                began = time.perf_counter()
                work()
                best[name] = min(best[name], time.perf_counter() - began)
    print(
        f"{args.rows} rows on a shared prefix of {args.prefix} tokens, {args.threads} threads, load {os.getloadavg()[0]:.1f}"
    )
    for name, seconds in best.items():
        print(f"{name:32} {seconds * 1e3:9.1f} ms a step")
    slow, fast = (best[name] for name in list(arms)[:2])
    print(f"grouped is {slow / fast:.1f}x ungrouped; with copies {best[list(arms)[2]] / best[list(arms)[3]]:.1f}x")


if __name__ == "__main__":
    main()
