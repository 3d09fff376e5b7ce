"""How the prompts of a prefill worker share its steps: short ones pass long ones, and the oldest always gets on.

A quarter of a step is the oldest run's. The rest goes to the runs with least left first, and what they leave to the
oldest again. So the oldest prompt is never slower than at a quarter of the speed, and a short one behind it waits for
prompts of its own length only.

A waiting call is admitted when the next step has room for it: not counting runs with more than twice its length left,
which it passes, except for the oldest one's quarter. Since only clearly shorter prompts are let in beside a run, the pages
reserved beside the longest are few. Where pages are short, a bounded number of calls pass one that waits for them.
"""

from collections.abc import Iterable

from headstart.scheduler.prefill.states import Run


def kept_for_oldest(budget: int) -> int:
    return (budget + 3) // 4


def share_out(runs: Iterable[Run], budget: int) -> list[tuple[Run, int]]:
    """What each run computes in a step of `budget` tokens. `runs` are in order of admission."""
    open_runs = [run for run in runs if run.num_to_compute > 0]
    if not open_runs:
        return []
    oldest, *others = open_runs
    kept = min(oldest.num_to_compute, kept_for_oldest(budget))
    left = budget - kept
    parts: list[tuple[Run, int]] = []
    for run in sorted(others, key=lambda run: run.num_to_compute):
        num_new = min(run.num_to_compute, left)
        left -= num_new
        if num_new:
            parts.append((run, num_new))
    return [(oldest, min(oldest.num_to_compute, kept + left)), *parts]


def has_room(num_tokens: int, runs: Iterable[Run], budget: int) -> bool:
    """Whether a call that would compute `num_tokens` gets some of the next step. Not earlier: what runs before a prompt
    may yet be a hit for it."""
    num_before = 0
    is_oldest = True
    for run in runs:
        if run.num_to_compute == 0:
            continue
        if run.num_to_compute <= 2 * num_tokens:
            num_before += run.num_to_compute
        elif is_oldest:
            num_before += min(run.num_to_compute, kept_for_oldest(budget))
        is_oldest = False
    return num_before < budget
