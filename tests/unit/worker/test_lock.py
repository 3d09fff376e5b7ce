"""A name belongs to one living process, and a lock that was obtained proves that its former holder has ended."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_clusters_on_one_machine_do_not_share_names() -> None:
    assert runtime_dir("127.0.0.1:8001") != runtime_dir("127.0.0.1:9001")
    assert runtime_dir("localhost:8001") == runtime_dir("127.0.0.1:8001")
