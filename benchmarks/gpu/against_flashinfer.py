"""How do FlashInfer's paged kernels (FA2) do on the same pool? Its per-row decode, and its two-level cascade.

Every arm runs as a graph replay over the same strided views. The cascade is two of its prefill wrappers and its merge,
which is what its cascade wrapper holds; made by hand, since that wrapper has no choice of backend and no scales.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import Card, Scene, Workload, arguments, compare, in_graph, print_table, save, tiling_for, warm_arms

from headstart.attention.triton_attention import decode_tile, fitting_rows

SCRATCH_BYTES = 1 << 30


@dataclass(frozen=True)
class Ragged:
    """Lists of pages as FlashInfer takes them: rows `indptr[i] : indptr[i + 1]` of `pages`."""

    indptr: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, tables: list[np.ndarray], lengths: list[int], page: int) -> "Ragged":
        used = [table[: -(-length // page)] for table, length in zip(tables, lengths, strict=True)]
        ends = np.cumsum([0] + [len(table) for table in used])
        last = [(length - 1) % page + 1 for length in lengths]
        parts = (ends, np.concatenate(used), last)
        return cls(*(torch.from_numpy(np.asarray(part, dtype=np.int32)).cuda() for part in parts))


@dataclass(frozen=True)
class Sorted:
    """The scene's rows with those of a group side by side, as a cascade needs them."""

    scene: Scene
    order: list[int]
    q: torch.Tensor

    @classmethod
    def of(cls, scene: Scene) -> "Sorted":
        order = sorted(range(scene.work.rows), key=lambda row: row % scene.work.groups)
        return cls(scene, order, scene.q[torch.tensor(order, device="cuda")].contiguous())

    @property
    def shape(self) -> dict[str, Any]:
        work = self.scene.work
        return {"q_data_type": torch.bfloat16, "kv_data_type": self.scene.pool.dtype, "sm_scale": work.heads.sm_scale}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads = self.scene.work.heads
        return heads.num_q_heads, heads.num_kv_heads, heads.head_dim, self.scene.work.page

    @property
    def k_scale(self) -> float:
        return float(self.scene.scales[0][0]) if self.scene.work.fp8 else 1.0

    @property
    def v_scale(self) -> float | None:
        return float(self.scene.scales[1][0]) if self.scene.work.fp8 else None

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in range(self.scene.work.layers):
            kv = self.scene.kv(layer)
            yield kv.k, kv.v

    def rows(self, first_page: int = 0) -> Ragged:
        """Every row's pages from `first_page` on."""
        page = self.scene.work.page
        tables = [self.scene.tables[row][first_page:] for row in self.order]
        return Ragged.of(tables, [int(self.scene.kv_lens[row]) - first_page * page for row in self.order], page)

    def decode(self, tensor_cores: bool) -> Callable[[], torch.Tensor]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=tensor_cores, backend="fa2")
        rows = self.rows()
        wrapper.plan(rows.indptr, rows.pages, rows.last_page_len, *self.sizes, **self.shape)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}  # read here: a capture may not
        return lambda: [wrapper.run(self.q, kv, **scales) for kv in self.layers()][-1]

    def cascade(self, fixed_buffers: bool) -> Callable[[], torch.Tensor]:
        """`fixed_buffers`: planned as it must be where a captured graph outlives the plan."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, merge_state_in_place

        work = self.scene.work
        prefix_pages = work.prefix // work.page
        firsts = [next(row for row in self.order if row % work.groups == group) for group in range(work.groups)]
        shared = Ragged.of(
            [self.scene.tables[row][:prefix_pages] for row in firsts],
            [prefix_pages * work.page] * work.groups,
            work.page,
        )
        members = np.bincount([row % work.groups for row in self.order], minlength=work.groups)
        levels = []
        for queries, pages in ((members, shared), (np.ones(work.rows, np.int64), self.rows(prefix_pages))):
            ends = torch.from_numpy(np.concatenate(([0], np.cumsum(queries))).astype(np.int32)).cuda()
            scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
            buffers = {
                "use_cuda_graph": True, "qo_indptr_buf": ends.clone(), "paged_kv_indptr_buf": pages.indptr.clone(),
                "paged_kv_indices_buf": pages.pages.clone(), "paged_kv_last_page_len_buf": pages.last_page_len.clone(),
            } if fixed_buffers else {}  # fmt: skip
            wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend="fa2", **buffers)
            shape = self.shape | {"sm_scale": work.heads.sm_scale * self.k_scale}
            wrapper.plan(ends, pages.indptr, pages.pages, pages.last_page_len, *self.sizes, causal=False, **shape)
            levels.append(wrapper)

        v_scale = self.v_scale

        def run() -> torch.Tensor:
            for kv in self.layers():
                out, lse = levels[1].run(self.q, kv, return_lse=True)
                merge_state_in_place(out, lse, *levels[0].run(self.q, kv, return_lse=True))
            return out if v_scale is None else out * v_scale

        return run


def ours(scene: Scene, card: Card) -> dict[str, Callable[[], object]]:
    work = scene.work
    plain = decode_tile(work.heads, work.fp8)
    arms = {"plain": scene.ungrouped(plain, 2048)}
    if work.groups < work.rows:
        tile = decode_tile(work.heads, work.fp8, fitting_rows(work.heads, work.fp8, work.rows / work.groups))
        arms["siblings side by side"] = scene.decode(card, plain, tiling_for(card, work, plain, q_tile=1))
        arms["grouped"] = scene.decode(card, tile, tiling_for(card, work, tile))
    return arms


def theirs(scene: Scene) -> dict[str, Callable[[], torch.Tensor]]:
    rows = Sorted.of(scene)
    arms = {"FI decode": rows.decode(False), "FI decode, tensor cores": rows.decode(True)}
    if scene.work.groups < scene.work.rows:
        arms |= {"FI cascade": rows.cascade(False), "FI cascade, fixed buffers": rows.cascade(True)}
    return arms


def difference(scene: Scene, arms: dict[str, Callable[[], torch.Tensor]]) -> float:
    """The largest relative difference of an arm's last layer from our plain kernel's."""
    heads, work = scene.work.heads, scene.work
    from headstart.attention.triton_attention import Partials, UngroupedDecode

    splits = -(-int(scene.kv_lens.max()) // 2048)
    partials = Partials.empty(heads, splits * work.rows, scene.device)
    plain = UngroupedDecode(heads, decode_tile(heads, work.fp8), partials, splits, 2048)
    expected = plain(scene.q, scene.kv(work.layers - 1), scene.rows, torch.empty_like(scene.q)).float()
    expected = expected[torch.tensor(Sorted.of(scene).order, device="cuda")]
    return max(float((run().float() - expected).norm() / expected.norm()) for run in arms.values())


def main() -> None:
    args = arguments(__doc__)
    if args.smoke:
        raise SystemExit("FlashInfer needs a GPU")
    card = Card.measure(args.smoke)
    works = [
        Workload(rows, groups, prefix, private, group=group, fp8=fp8)
        for fp8 in (False, True)
        for rows, groups, prefix, private, group in (
            (128, 20, 50_000, 4_675, 2), (128, 20, 50_000, 4_675, 4), (128, 20, 50_000, 4_675, 8), (37, 37, 0, 54_675, 2),
            (128, 128, 0, 1_024, 2), (128, 20, 2_048, 1_024, 2),
        )
    ]  # fmt: skip
    warm_arms(ours, works, args.smoke)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        flashinfer = theirs(scene)
        error = difference(scene, flashinfer)
        spreads = compare(ours(scene, card) | {name: in_graph(run) for name, run in flashinfer.items()}, repeats=20)
        results.append({
            "rows": work.rows, "groups": work.groups, "prefix": work.prefix, "private": work.private, "g": work.group,
            "kv": "fp8" if work.fp8 else "bf16",
            **{name: spread.median_s / work.layers * 1e3 for name, spread in spreads.items()}, "difference": error,
        })  # fmt: skip
    print_table(results)
    save(args, "flashinfer", card, results)


if __name__ == "__main__":
    main()
