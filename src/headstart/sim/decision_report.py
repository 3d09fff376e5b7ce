"""`headstart replay`: every decision log of a folder, and what its replay found in words."""

import sys
from collections.abc import Iterator
from pathlib import Path

from headstart.sim.replay import Verdict, replay
from headstart.worker.decision_log import SUFFIX, DecisionLogError, read_decision_log


def replay_folder(folder: Path) -> int:
    """Replay every log in it, a line each; 1 if any went another way or cannot be read."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        print(f"headstart replay: {folder} holds no *{SUFFIX} files", file=sys.stderr)
        return 1
    return max([_replay_file(path) for path in paths])


def _replay_file(path: Path) -> int:
    try:
        verdict = replay(*read_decision_log(path))
    except DecisionLogError as error:
        print(f"headstart replay: {error}", file=sys.stderr)
        return 1
    print(f"{path.stem}: " + "\n  ".join(report(verdict)))
    return 0 if verdict.difference is None else 1


def report(verdict: Verdict) -> Iterator[str]:
    counts = (
        f"{verdict.num_calls:,} calls, {verdict.num_readings:,} clock readings, {verdict.num_decisions:,} decisions"
    )
    difference = verdict.difference
    if difference is None:
        yield f"{counts}: identical"
        return
    yield f"{counts} identical, then call {difference.number} went another way"
    for call in difference.calls[:-1]:
        yield f"before:  {call}"
    yield f"call:    {difference.calls[-1]}"
    yield f"logged:  {difference.logged}"
    yield f"now:     {difference.done}"
