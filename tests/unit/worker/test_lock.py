"""A name belongs to one living process, and a lock that was obtained proves that its former holder has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.config.errors import ConfigError
from headstart.worker.lock import NameLock, NameTaken, runtime_dir

HOLDER = """
import sys, time
from pathlib import Path
from headstart.worker.lock import NameLock
lock = NameLock.acquire(Path(sys.argv[1]), "decode-0")
print("held", flush=True)
time.sleep(60)
"""


def test_a_name_is_refused_while_another_process_holds_it_and_granted_once_that_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(NameTaken, match=f"process {holder.pid}"):
        NameLock.acquire(tmp_path, "decode-0")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    NameLock.acquire(tmp_path, "decode-0").release()


def test_other_names_are_free(tmp_path: Path) -> None:
    first = NameLock.acquire(tmp_path, "decode-0")
    NameLock.acquire(tmp_path, "decode-1").release()
    first.release()


def test_a_released_name_can_be_taken_again(tmp_path: Path) -> None:
    NameLock.acquire(tmp_path, "decode-0").release()
    NameLock.acquire(tmp_path, "decode-0").release()


def test_a_lock_remembers_the_latest_incarnation_for_later_holders(tmp_path: Path) -> None:
    first = NameLock.acquire(tmp_path, "decode-0")
    assert first.last_incarnation == 0
    first.note_incarnation(1_764_306_000_000_000_000)
    first.release()
    NameLock.acquire(tmp_path, "decode-0").release()  # ended before it had a number
    again = NameLock.acquire(tmp_path, "decode-0")
    assert again.last_incarnation == 1_764_306_000_000_000_000
    again.release()


@pytest.mark.parametrize("content", ["", "4711", "4711 x", "\0\0", "1 2 3 4"])
def test_a_lock_file_of_any_content_can_be_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / "decode-0.lock").write_text(content)
    lock = NameLock.acquire(tmp_path, "decode-0")
    assert lock.last_incarnation == 0
    lock.note_incarnation(5)
    assert lock.path.read_text() == f"{os.getpid()} 5\n"
    lock.release()


def test_holders_of_one_lock_one_after_the_other_share_its_domain_and_no_others_do(tmp_path: Path) -> None:
    first, other_name = NameLock.acquire(tmp_path / "a", "p"), NameLock.acquire(tmp_path / "a", "q")
    other_place = NameLock.acquire(tmp_path / "b", "p")
    domain = first.domain
    assert len({domain, other_name.domain, other_place.domain}) == 3
    first.release()
    again = NameLock.acquire(tmp_path / "a", "p")
    assert again.domain == domain
    again.path.unlink()
    beside = NameLock.acquire(tmp_path / "a", "p")
    assert beside.domain != domain, "both are held: the file was removed under its holder"
    for lock in (again, beside, other_name, other_place):
        lock.release()


def test_clusters_on_one_machine_do_not_share_names() -> None:
    assert runtime_dir("127.0.0.1:8001") != runtime_dir("127.0.0.1:9001")


def test_workers_of_one_cluster_meet_whatever_they_call_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both would hold one name, and the later one would prove the end of the other while that still writes."""
    place = runtime_dir("127.0.0.1:8001")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert {runtime_dir(f"{host}:8001") for host in ("127.0.0.1", "localhost", "10.0.0.1")} == {place}


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "decode-0.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="symbolic links"):
        NameLock.acquire(tmp_path / "locks", "decode-0")
    assert precious.read_text() == "content"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can prepare a directory in another user's name")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    os.chown(tmp_path / "locks", 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        NameLock.acquire(tmp_path / "locks", "decode-0")


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot keep a lock in .*/file/8001: .*;.* HEADSTART_RUNTIME"):
        NameLock.acquire(tmp_path / "file" / "8001", "decode-0")
