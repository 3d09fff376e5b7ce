"""Seeds of chaos over whole worlds: every end, every output and every page is judged in each of them."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.__main__ import main, run_seeds, summary
from chaos.plan import Devices, draw_plan
from chaos.run import SeedFailed, run_seed
from chaos.test_fence import Unfenced

BATCH = 25
HAPPENINGS = (
    *("kills of decode workers", "kills of prefill workers", "stalls", "messages harmed", "digest_mismatches"),
    *("ended by stop strings", "with penalties", "accepted_draft_tokens", "dropped_rows"),
)


def assert_something_was_tried(seeds: range) -> None:
    tally = run_seeds(seeds)
    print(summary(tally, 0.0))
    assert tally.seeds == len(seeds)
    assert tally.requests == tally.ends.total()
    assert tally.wrong == 0
    assert tally.ends["finished"] > tally.requests / 2
    for happened in HAPPENINGS:
        assert tally.counts[happened] > 0, happened
    assert tally.quarantined_pages > 0


@pytest.mark.parametrize("first", range(0, 100, BATCH))
def test_100_seeds(first: int) -> None:
    assert_something_was_tried(range(first, first + BATCH))


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_1000_seeds(first: int) -> None:
    assert_something_was_tried(range(first, first + 100))


@pytest.mark.soak
def test_many_seeds() -> None:
    first = int(os.environ.get("HEADSTART_CHAOS_START", "2000"))
    assert_something_was_tried(range(first, first + int(os.environ.get("HEADSTART_CHAOS_SEEDS", "10000"))))


def history(seed: int, hash_seed: str) -> str:
    """Digest of all that happens in a seed, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "chaos", "--timeline", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    told = run.stdout[: run.stdout.index("CPU time")]
    assert len(told.splitlines()) > 100
    return hashlib.sha256(told.encode()).hexdigest()


def test_a_seed_has_one_history_in_every_process() -> None:
    assert history(3, "1") == history(3, "2")
    assert history(3, "1") != history(4, "1")


def test_every_seed_has_workers_with_one_and_with_two_steps_in_flight_unless_told_otherwise() -> None:
    for seed in range(20):
        modelling = draw_plan(seed).spec.modelling
        used = {modelling.prefill_steps_in_flight[0], modelling.decode_steps_in_flight[0]}
        assert used == {1, 2}, "also in a cluster of two workers"
        forced = draw_plan(seed, Devices(2, 0)).spec
        assert forced.modelling.prefill_steps_in_flight == forced.modelling.decode_steps_in_flight == (2,)
        assert forced.decode.num_draft_tokens == 0
    assert {draw_plan(seed).spec.decode.num_draft_tokens for seed in range(20)} == {0, 1, 2, 3}


def first_failure(seeds: range) -> SeedFailed:
    for seed in seeds:
        try:
            run_seed(seed, make_cache=Unfenced)
        except SeedFailed as failure:
            return failure
    raise AssertionError("nothing failed")


def test_a_failing_seed_says_what_happened_and_fails_again_in_the_same_way() -> None:
    failure = first_failure(range(10))
    with pytest.raises(SeedFailed) as again:
        run_seed(failure.seed, make_cache=Unfenced)
    assert str(again.value) == str(failure)
    assert re.match(rf"seed {failure.seed}: InvariantError: 0 pages inflight; \d+ under tickets", str(failure))
    assert "Prefill ticket" in str(failure)


def test_the_command_sums_up_what_the_seeds_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--start", "7"]) == 0
    out = capsys.readouterr().out
    assert "wrong outputs                0" in out
    assert "longest stall" in out
