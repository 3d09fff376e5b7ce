"""Seeds of chaos logged: whatever befalls a cluster, its schedulers and its gateway decide the same again."""

from pathlib import Path

import pytest
from chaos.run import run_seed

from headstart.sim.replay import Verdict, replay
from headstart.worker.decision_log import Call, DecisionLog, Head, read_decision_log


def recorded(folder: Path, seed: int) -> list[Path]:
    """Run a seed; a log for each incarnation of each worker, and the gateway's."""
    logs = []

    def open_log(name: str, head: Head) -> DecisionLog:
        logs.append(DecisionLog.create(folder, name, head, max_bytes=1 << 30))
        return logs[-1]

    run_seed(seed, open_log=open_log)
    for log in logs:
        log.close()
    return sorted(folder.iterdir())


def verdict(path: Path) -> Verdict:
    return replay(*read_decision_log(path))


def has_raised(path: Path) -> bool:
    """The scheduler ended its process, as an exception does."""
    return any(call.failure is not None for call in read_decision_log(path)[1])


def assert_all_is_decided_again(paths: list[Path]) -> int:
    verdicts = {path.stem: verdict(path) for path in paths}
    for name, found in verdicts.items():
        assert found.difference is None, f"{name}: {found}"
    assert not any(map(has_raised, paths))
    return sum(found.num_decisions for found in verdicts.values())


@pytest.mark.parametrize("seed", range(5))
def test_what_chaos_does_to_a_cluster_is_decided_again(tmp_path: Path, seed: int) -> None:
    paths = recorded(tmp_path, seed)
    assert {path.name.split("-")[0].split(".")[0] for path in paths} == {"gateway", "prefill", "decode"}
    assert assert_all_is_decided_again(paths) > 300


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5, 65))
def test_what_more_chaos_does_to_a_cluster_is_decided_again(tmp_path: Path, seed: int) -> None:
    assert_all_is_decided_again(recorded(tmp_path, seed))


def test_the_next_turn_of_a_log_is_no_accident(tmp_path: Path) -> None:
    """Calls in another order are found: the comparison is not blind to what it is there for."""
    path = next(path for path in recorded(tmp_path, 1) if path.stem.startswith("decode"))
    head, calls = read_decision_log(path)
    order: list[Call] = list(calls)
    middle = len(order) // 2
    swapped = [*order[:middle], *order[middle + 40 :], *order[middle : middle + 40]]
    assert replay(head, swapped).difference is not None
