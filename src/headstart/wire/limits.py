"""Bounds of a channel. Both ends should agree: a receiver refuses what a more generous sender may send."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Validated here; every field is a positive number."""

    max_message_bytes: int = 32 << 20
    """Bytes of one message. ZeroMQ drops the connection of a peer that sends more; the codec refuses before parsing."""

    max_array_len: int = 4 << 20
    """Elements of one token or page array."""

    queue_len: int = 10_000
    """Messages waiting to leave for one peer, and as many that arrived from it. Beyond it, sends report failure."""

    batch_len: int = 256
    """Most messages one drain takes, so that a flooding peer cannot starve the loop that drains."""

    heartbeat_s: float = 2.0
    """Seconds between ZeroMQ's own pings; a peer silent for three of them is disconnected and redialled."""

    linger_s: float = 0.5
    """Seconds that closing a socket may wait for its last messages to leave."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
