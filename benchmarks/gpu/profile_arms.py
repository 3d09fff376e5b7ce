"""Why is an arm as fast as it is? Launches each once, for Nsight Compute to read the counters of its attention kernel.

    ncu --clock-control none --profile-from-start off -k regex:grouped_kernel --page raw --csv \\
        --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis \\
        --section MemoryWorkloadAnalysis_Tables --section SchedulerStats --section WarpStateStats --section LaunchStats \\
        --section Occupancy --section InstructionStats --log-file OUT/profile.csv \\
        python benchmarks/gpu/profile_arms.py > OUT/profile.arms
    python benchmarks/gpu/profile_arms.py --table OUT/profile.csv    # also writes profile.json
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from common import Card, Scene, Workload, print_table, tiling_for

from headstart.attention.triton_attention import decode_tile

CARD = Card("", "cuda", 132, 1.0, 1.0)
SHARED = Workload(128, 20, 50_000, 4_675, layers=1)
COLUMNS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "dram GB": ("dram__bytes_read.sum", 1e-9),
    "dram %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 hit %": ("lts__t_sector_hit_rate.pct", 1),
    "shared memory %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed", 1),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "regs": ("launch__registers_per_thread", 1),
    "warps/SM": ("sm__warps_active.avg.per_cycle_active", 1),
}


def arms() -> Iterator[tuple[str, Scene, Callable[[Scene], Callable[[], object]]]]:
    def grouped(rows: int, **changes: int) -> Callable[[Scene], Callable[[], object]]:
        def make(scene: Scene) -> Callable[[], object]:
            tile = decode_tile(scene.work.heads, scene.work.fp8, rows)
            return scene.decode(CARD, tile, tiling_for(CARD, scene.work, tile, **changes))

        return make

    def plain(scene: Scene) -> Callable[[], object]:
        return scene.ungrouped(decode_tile(scene.work.heads, scene.work.fp8), 2048)

    for fp8, tiles in ((False, {2: (16, 64), 4: (64,), 8: (64,)}), (True, {2: (16, 32), 4: (32, 64), 8: (32, 64)})):
        for group, rows_of_tile in tiles.items():
            work = replace(SHARED, group=group, fp8=fp8)
            scene = Scene.lay_out(work, "cuda")
            kind = f"{'fp8' if fp8 else 'bf16'} g={group}"
            if group == 2:
                yield f"{kind} siblings side by side", scene, grouped(16, q_tile=1)
            for rows in rows_of_tile:
                yield f"{kind} grouped, {rows} rows", scene, grouped(rows)
            del scene
    scene = Scene.lay_out(Workload(128, 128, 0, 1_024, layers=1), "cuda")
    yield "bf16 128 x 1,024 planned", scene, grouped(16)
    yield "bf16 128 x 1,024 plain", scene, plain


def launch() -> None:
    for name, scene, make in arms():
        print(name, flush=True)
        call = make(scene)
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def table(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    kernels = [row for row in csv.DictReader(lines) if row["ID"]]
    names = path.with_suffix(".arms").read_text().splitlines()
    rows = []
    for name, kernel in zip(names, kernels, strict=True):
        row: dict[str, object] = {"arm": name}
        for column, (metric, factor) in COLUMNS.items():
            value = kernel.get(metric, "")
            row[column] = float(value.replace(",", "")) * factor if value else "-"
        stalls = {
            key: float(value)
            for key, value in kernel.items()
            if "issue_stalled" in key and value and "selected" not in key
        }
        row["waits most for"] = ", ".join(
            key.split("issue_stalled_")[1].split("_per")[0].split(".")[0]
            for key in sorted(stalls, key=lambda key: -stalls[key])[:3]
        )
        rows.append(row)
    print_table(rows)
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    table(args.table) if args.table else launch()


if __name__ == "__main__":
    main()
