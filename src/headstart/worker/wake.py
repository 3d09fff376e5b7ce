"""A descriptor that another thread or a signal handler can make readable, so that a sleeping loop wakes at once."""

import contextlib
import os


class Waker:
    """`wake` from any thread; the loop polls `fd` and calls `clear`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def open(cls) -> "Waker":
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # already readable, or closed at the end of the process
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
