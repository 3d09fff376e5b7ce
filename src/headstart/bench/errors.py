"""What ends a measurement with a message for its user."""


class BenchError(Exception):
    """The measurement cannot be made, or what came out of it cannot be true."""
