"""Which addresses a process and its children take bytes at, as the kernel tells."""

import os
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

TABLES = ("tcp", "tcp6", "udp", "udp6")
TCP_LISTEN = "0A"
UDP_UNCONNECTED = "07"


class Listener(NamedTuple):
    pid: int
    protocol: str
    address: IPv4Address | IPv6Address
    port: int

    @property
    def is_loopback(self) -> bool:
        mapped = self.address.ipv4_mapped if isinstance(self.address, IPv6Address) else None
        return (mapped or self.address).is_loopback


def listeners_of(pid: int) -> list[Listener]:
    """Every TCP socket that listens and every UDP socket that takes datagrams from anybody."""
    return [listener for each in (pid, *_descendants(pid)) for listener in _of_one(each)]


def _of_one(pid: int) -> Iterator[Listener]:
    inodes = _socket_inodes(pid)
    for table in TABLES:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            wanted = TCP_LISTEN if table.startswith("tcp") else UDP_UNCONNECTED
            if fields[3] == wanted and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                yield Listener(pid, table, _address(address), int(port, 16))


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel prints words of 32 bits in the machine's order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found
