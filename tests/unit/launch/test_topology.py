"""Which workers start, and on which cards, for what is asked on which machine."""

from pathlib import Path

import pytest

from headstart.config.errors import ConfigError
from headstart.launch.topology import Machine, Topology, WantedWorkers, detect_machine, resolve_topology

ONE_CARD = Machine(("0",), torch_has_cuda=True)
FOUR_CARDS = Machine(("0", "1", "2", "3"), torch_has_cuda=True)


def test_a_cpu_machine_gets_one_worker_of_each_role() -> None:
    assert resolve_topology(WantedWorkers(), Machine()) == Topology("cpu", 1, 1)
    assert resolve_topology(WantedWorkers(prefill=0, decode=3), Machine()) == Topology("cpu", 0, 3)


def test_one_card_gets_one_worker_that_prefills_and_decodes() -> None:
    assert resolve_topology(WantedWorkers(), ONE_CARD) == Topology("cuda", 0, 1, ("0",))


def test_several_cards_get_one_prefill_worker_and_the_rest_decode() -> None:
    assert resolve_topology(WantedWorkers(), FOUR_CARDS) == Topology("cuda", 1, 3, ("0", "1", "2"), ("3",))
    assert resolve_topology(WantedWorkers(decode=4), FOUR_CARDS) == Topology("cuda", 0, 4, ("0", "1", "2", "3"))
    assert resolve_topology(WantedWorkers(prefill=3), FOUR_CARDS) == Topology("cuda", 3, 1, ("0",), ("1", "2", "3"))


def test_more_workers_than_cards_need_permission_and_then_take_turns() -> None:
    with pytest.raises(ConfigError, match=r"1 prefill and 1 decode workers on 1 GPU: .*--share-gpu"):
        resolve_topology(WantedWorkers(prefill=1, decode=1), ONE_CARD)
    shared = resolve_topology(WantedWorkers(prefill=1, decode=1, share_gpu=True), ONE_CARD)
    assert shared == Topology("cuda", 1, 1, ("0",), ("0",))
    assert shared.num_sharing("0") == 2


def test_workers_stay_on_the_cards_that_were_named() -> None:
    assert resolve_topology(WantedWorkers(gpus="3,1"), FOUR_CARDS) == Topology("cuda", 1, 1, ("3",), ("1",))
    with pytest.raises(ConfigError, match="no GPU 7 here"):
        resolve_topology(WantedWorkers(gpus="7"), FOUR_CARDS)
    with pytest.raises(ConfigError, match="twice"):
        resolve_topology(WantedWorkers(gpus="1,1"), FOUR_CARDS)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (WantedWorkers(prefill=-1), "--prefill must be auto or at least 0, got -1"),
        (WantedWorkers(decode=0), "--decode must be auto or at least 1, got 0"),
        (WantedWorkers(decode=-2), "--decode must be auto or at least 1, got -2"),
    ],
)
def test_a_count_out_of_range_names_its_own_flag(wanted: WantedWorkers, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_topology(wanted, Machine())


def test_asking_for_a_gpu_that_cannot_be_used_says_why() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        resolve_topology(WantedWorkers(device="cuda"), Machine(torch_has_cuda=True))
    with pytest.raises(ConfigError, match="CPU build"):
        resolve_topology(WantedWorkers(device="cuda"), Machine(("0",)))
    assert resolve_topology(WantedWorkers(), Machine(("0",))).device == "cpu"
    assert resolve_topology(WantedWorkers(device="cpu"), FOUR_CARDS) == Topology("cpu", 1, 1)


def test_visible_cards_are_those_that_cuda_would_show(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert detect_machine({}, tmp_path).gpus == ("0", "1")
    assert detect_machine({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path).gpus == ("1",)
    assert detect_machine({"CUDA_VISIBLE_DEVICES": "GPU-abc, 0,-1,1"}, tmp_path).gpus == ("GPU-abc", "0")
    assert detect_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
    assert detect_machine({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none").gpus == ()
