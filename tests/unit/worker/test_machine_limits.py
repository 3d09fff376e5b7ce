"""What control groups of both versions, the machine and the affinity mask leave, read from made-up trees."""

from pathlib import Path

import pytest

from headstart.config.errors import ConfigError
from headstart.worker.machine_limits import (
    LEAST_DESCRIPTORS,
    MemoryRoom,
    check_open_files,
    memory_kills,
    memory_room,
    usable_cores,
)

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, free_mib: int = 8192) -> Path:
    return tree(root, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {free_mib * 1024} kB\n"})


def version_2(root: Path, group: str, **files: str) -> Path:
    tree(root, {"proc/self/cgroup": f"0::{group}\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n"})
    return tree(root, {f"sys/fs/cgroup{group}/{name.replace('__', '.')}": text for name, text in files.items()})


def version_1(root: Path, group: str, **files: str) -> Path:
    tree(root, {"proc/self/cgroup": f"5:cpu,cpuacct:{group}\n4:memory:{group}\n0::/\n"})
    for name, text in files.items():
        controller = "memory" if name.startswith("memory") else "cpu"
        tree(root, {f"sys/fs/cgroup/{controller}{group}/{name.replace('__', '.')}": text})
    return root


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert memory_room(machine(tmp_path, 100)) == MemoryRoom(100 * MIB)


def test_what_tells_nothing_is_none(tmp_path: Path) -> None:
    assert memory_room(tmp_path) is None


def test_version_2_leaves_the_limit_less_what_is_used_and_cannot_be_dropped(tmp_path: Path) -> None:
    root = version_2(
        machine(tmp_path),
        "/pod/box",
        memory__max=f"{1536 * MIB}\n",
        memory__current=f"{600 * MIB}\n",
        memory__stat=f"anon {100 * MIB}\ninactive_file {300 * MIB}\nactive_file {200 * MIB}\n",
    )
    assert memory_room(root) == MemoryRoom(1436 * MIB, 1536 * MIB)


def test_version_1_does_too(tmp_path: Path) -> None:
    root = version_1(
        machine(tmp_path),
        "/docker/abc",
        memory__limit_in_bytes=f"{1000 * MIB}\n",
        memory__usage_in_bytes=f"{700 * MIB}\n",
        memory__stat=f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}\n",
    )
    assert memory_room(root) == MemoryRoom(450 * MIB, 1000 * MIB)


def test_the_group_above_with_less_room_decides(tmp_path: Path) -> None:
    root = version_2(machine(tmp_path), "/pod/box", memory__max="max\n", memory__current="5\n")
    tree(root, {"sys/fs/cgroup/pod/memory.max": f"{64 * MIB}\n", "sys/fs/cgroup/pod/memory.current": f"{24 * MIB}\n"})
    assert memory_room(root) == MemoryRoom(40 * MIB, 64 * MIB)


def test_the_machine_decides_if_it_has_less_than_the_limit(tmp_path: Path) -> None:
    root = version_2(machine(tmp_path, 10), "/box", memory__max=f"{64 * MIB}\n", memory__current="0\n")
    assert memory_room(root) == MemoryRoom(10 * MIB)


def test_a_limit_that_is_passed_leaves_nothing(tmp_path: Path) -> None:
    root = version_2(machine(tmp_path), "/box", memory__max="100\n", memory__current="200\n")
    assert memory_room(root) == MemoryRoom(0, 100)


@pytest.mark.parametrize("group", ["/", "/docker/not-mounted-here", "/../elsewhere"])
def test_a_container_that_sees_its_group_as_the_root_finds_it(tmp_path: Path, group: str) -> None:
    root = version_1(machine(tmp_path), "/", memory__limit_in_bytes="5000\n", memory__usage_in_bytes="1000\n")
    tree(root, {"proc/self/cgroup": f"4:memory:{group}\n"})
    assert memory_room(root) == MemoryRoom(4000, 5000)


def test_version_1_writes_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    root = version_1(machine(tmp_path, 7), "/", memory__limit_in_bytes="9223372036854771712\n")
    assert memory_room(root) == MemoryRoom(7 * MIB)


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"),
    [
        ("max 100000", 8, 8),
        ("400000 100000", 8, 4),
        ("150000 100000", 8, 1),
        ("50000 100000", 8, 1),
        ("800000 100000", 1, 1),
    ],
)
def test_cores_are_the_least_of_quota_and_affinity(tmp_path: Path, quota: str, affinity: int, cores: int) -> None:
    assert usable_cores(version_2(tmp_path, "/box", cpu__max=quota + "\n"), affinity) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_version_1_has_quotas_too(tmp_path: Path, quota: str, cores: int) -> None:
    root = version_1(tmp_path, "/box", cpu__cfs_quota_us=quota + "\n", cpu__cfs_period_us="100000\n")
    assert usable_cores(root, 8) == cores


def test_kills_for_want_of_memory_are_counted_wherever_the_kernel_tells(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) == 0
    assert memory_kills(version_2(tmp_path / "2", "/box", memory__events="oom 5\noom_kill 2\n")) == 2
    assert memory_kills(version_1(tmp_path / "1", "/box", memory__oom_control="under_oom 0\noom_kill 3\n")) == 3
    assert memory_kills(tree(tmp_path / "0", {"proc/vmstat": "pgfault 9\noom_kill 4\n"})) == 4


@pytest.mark.parametrize("text", ["", "x", "max max max", "\0", "-5 0", "1e9"])
def test_files_of_any_content_are_read(tmp_path: Path, text: str) -> None:
    root = version_2(machine(tmp_path, 3), "/box", memory__max=text, cpu__max=text, memory__events=text)
    assert memory_room(root) == MemoryRoom(3 * MIB)
    assert usable_cores(root, 2) == 2
    assert memory_kills(root) == 0


def test_too_few_open_files_are_refused_by_number() -> None:
    check_open_files(LEAST_DESCRIPTORS)
    with pytest.raises(ConfigError, match=rf"limit of 128 open files .* {LEAST_DESCRIPTORS}"):
        check_open_files(128)
