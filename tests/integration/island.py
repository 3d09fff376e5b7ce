"""A network namespace whose one cable can be taken out: a host of its own for the workers that are started in it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class NotPermitted(Exception):
    """This machine lets us make no namespace; says why."""


class Island:
    """gateway's host: bridge (HOST.1) ── cable ──┤ namespace ├── device (HOST.2)

    Taking the cable out of the bridge drops what is under way without a word to either end; addresses stay."""

    def __init__(self, tag: str) -> None:
        self.namespace = f"hs{tag}"
        self.bridge = f"hs{tag}b"
        self.device = f"hs{tag}d"
        self._cable = f"hs{tag}c"
        network = f"10.{200 + int(tag) % 50}.{int(tag) // 50 % 250}"
        self.host, self.address = f"{network}.1", f"{network}.2"

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command is preceded by to run on the island."""
        return ("ip", "netns", "exec", self.namespace)

    def build(self) -> None:
        _ip(f"netns add {self.namespace}")
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"addr add {self.host}/24 dev {self.bridge}")
        _ip(f"link add {self._cable} type veth peer name {self.device} netns {self.namespace}")
        _ip(f"link set {self._cable} master {self.bridge}")
        _ip(f"link set {self.bridge} up")
        _ip(f"-n {self.namespace} addr add {self.address}/24 dev {self.device}")
        for device in ("lo", self.device):
            _ip(f"-n {self.namespace} link set {device} up")
        self.heal()

    def cut(self) -> None:
        _ip(f"link set {self._cable} down")

    def heal(self) -> None:
        _ip(f"link set {self._cable} up")

    def remove(self) -> None:
        for command in (f"link del {self._cable}", f"link del {self.bridge}", f"netns del {self.namespace}"):
            subprocess.run(["ip", *command.split()], capture_output=True)


@contextmanager
def island() -> Iterator[Island]:
    """Raises NotPermitted."""
    if shutil.which("ip") is None:
        raise NotPermitted("there is no `ip` command")
    built = Island(str(os.getpid() % 100_000))
    try:
        try:
            built.build()
        except subprocess.CalledProcessError as error:
            raise NotPermitted(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from error
        yield built
    finally:
        built.remove()


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)
