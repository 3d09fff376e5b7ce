"""How near to the weights' bandwidth are a decoder's products of few rows, the head's among them?

Every shape of Qwen3-1.7B and 8B, by the library's GEMM. Weights take turns, so that none is found in the cache.
"""

from collections.abc import Callable

import torch
from common import Card, Spread, arguments, in_graph, print_table, query_dtype, save, time_calls

SHAPES = {
    "1.7B qkv": (4096, 2048), "1.7B o": (2048, 2048), "1.7B gate_up": (12288, 2048), "1.7B down": (2048, 6144),
    "1.7B head": (151_936, 2048), "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288), "8B head": (151_936, 4096),
}  # fmt: skip
ROWS = (1, 16, 128)


def products(shape: tuple[int, int], rows: int, copies: int, device: str) -> Callable[[], object]:
    dtype = query_dtype(device)
    weights = [torch.randn(shape, device=device).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, shape[1], device=device).to(dtype)
    return in_graph(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    results = []
    for name, shape in {"small": (96, 64)}.items() if args.smoke else SHAPES.items():
        num_bytes = 2 * shape[0] * shape[1]
        copies = 2 if args.smoke else max(2, int(3e8 / num_bytes) + 1)
        row: dict[str, object] = {"product": name, "MB": num_bytes / 1e6}
        for rows in ROWS:
            spread = Spread.of(time_calls([products(shape, rows, copies, card.device)], repeats=10, warmups=2)[0])
            seconds = spread.median_s / copies
            row |= {f"us at {rows}": seconds * 1e6, f"of copy at {rows}": num_bytes / seconds / card.copy_bytes_per_s}
        results.append(row)
    print_table(results)
    save(args, "gemm", card, results)


if __name__ == "__main__":
    main()
