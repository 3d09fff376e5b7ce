"""An exclusive lock file per worker name, held for life.

Whoever holds it is the only process of that name: getting it proves that the former incarnation has ended, and that
nothing it posted can land any more. The kernel drops the lock when the process ends, however it ends.
"""

import fcntl
import hashlib
import os
from pathlib import Path

from headstart.config.errors import ConfigError
from headstart.core.errors import HeadstartError


class NameTaken(HeadstartError):
    """Another living process holds the name."""


def runtime_dir(join_address: str) -> Path:
    """Where lock files of the clusters at this control port (of HOST:PORT) lie on this machine.

    Two workers of one cluster must meet here whatever they call its gateway, so the host is left out, and so is
    everything that depends on how a process was started. HEADSTART_RUNTIME names another place, for all of them.
    """
    base = os.environ.get("HEADSTART_RUNTIME") or f"/tmp/headstart-{os.getuid()}"
    return Path(base) / join_address.rpartition(":")[2]


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NameLock:
    """Holds `directory/name.lock`: the holder's process id and incarnation, kept for the next holder."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self.path = path

    @property
    def domain(self) -> str:
        """Equal for two holders only if they held the same file under the same kernel, hence one after the other.

        Paths and host names do not tell: containers of one host may each have this path, and hosts may share a name.
        """
        stat = os.fstat(self._descriptor)
        place = f"{BOOT_ID.read_text().strip()} {stat.st_dev} {stat.st_ino}"
        return hashlib.sha256(place.encode()).hexdigest()[:32]

    @classmethod
    def acquire(cls, directory: Path, name: str) -> "NameLock":
        """Take the lock and write our process id into it. Raises NameTaken without waiting, and ConfigError for a
        directory that cannot be written or that another user could have prepared."""
        path = directory / f"{name}.lock"
        try:
            for folder in (directory.parent, directory):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if folder.stat().st_uid not in (0, os.getuid()):
                    raise ConfigError(f"{folder} belongs to another user; name another place with HEADSTART_RUNTIME")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"cannot keep a lock in {directory}: {reason}; name another place with HEADSTART_RUNTIME"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (_words(descriptor) or ["unknown"])[0]
            os.close(descriptor)
            raise NameTaken(f"{name} already runs (process {holder} holds {path})") from error
        lock = cls(descriptor, path)
        lock.note_incarnation(lock.last_incarnation)
        return lock

    @property
    def last_incarnation(self) -> int:
        """The latest that a holder noted; 0: none. A clock that was set back must not number a worker below its former,
        which the rest of the cluster would take for the later one."""
        words = _words(self._descriptor)
        return int(words[1]) if len(words) == 2 and words[1].isdecimal() else 0

    def note_incarnation(self, incarnation: int) -> None:
        content = f"{os.getpid()} {max(incarnation, self.last_incarnation)}\n".encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def release(self) -> None:
        """Give the name up. A process that ends without it gives it up too. The file stays: removing it would let two
        processes hold locks on two files of one name."""
        os.close(self._descriptor)


def _words(descriptor: int) -> list[str]:
    return os.pread(descriptor, 64, 0).decode(errors="replace").split()
