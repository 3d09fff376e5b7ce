"""python -m chaos: seeds of chaos over whole worlds in virtual time, and what they came to.

--seeds N --start K    seeds K, K + 1, ..., K + N - 1; ends at the first that fails, with its last events
--timeline SEED        everything that happens in one seed, request states included
--steps-in-flight N    every worker takes N steps ahead; otherwise some take 1 and some 2
--drafts N             at most N drafts in a decode row; otherwise 0 to 3, by seed
"""

import argparse
import sys
import time
from collections.abc import Iterable

from chaos.plan import DRAWN, Devices
from chaos.run import SeedFailed, Tally, run_seed


def run_seeds(seeds: Iterable[int], devices: Devices = DRAWN) -> Tally:
    """What all of them came to together. Raises SeedFailed at the first that fails."""
    total = Tally()
    for seed in seeds:
        total.add(run_seed(seed, devices)[0])
    return total


def summary(tally: Tally, cpu_s: float) -> str:
    rows = [
        ("seeds", f"{tally.seeds}"),
        ("requests", f"{tally.requests}"),
        *((f"  {end}", f"{count}") for end, count in tally.ends.most_common()),
        ("wrong outputs", f"{tally.wrong}"),
        ("tokens", f"{tally.tokens}"),
        ("pages quarantined", f"{tally.quarantined_pages}"),
        ("longest stall", f"{tally.longest_stall_s:.2f} s (virtual)"),
        *((name, f"{count}") for name, count in sorted(tally.counts.items())),
        ("CPU time", f"{cpu_s:.1f} s"),
    ]
    return "\n".join(f"{name:<28} {value}" for name, value in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="seeded chaos in virtual time")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--timeline", type=int, metavar="SEED", help="print everything that happens in this seed")
    parser.add_argument("--steps-in-flight", type=int, choices=(1, 2), help="of every worker")
    parser.add_argument("--drafts", type=int, choices=range(4), help="of a decode row, at most")
    options = parser.parse_args(argv)
    devices = Devices(options.steps_in_flight, options.drafts)
    began = time.process_time()
    try:
        if options.timeline is None:
            tally = run_seeds(range(options.start, options.start + options.seeds), devices)
        else:
            tally, timeline = run_seed(options.timeline, devices, with_states=True)
            print("\n".join(timeline.lines()))
    except SeedFailed as failure:
        print(failure)
        print(f"\nreplay it: python -m chaos --timeline {failure.seed}")
        return 1
    print(summary(tally, time.process_time() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
