"""The one error of the wire."""

from headstart.core.errors import HeadstartError


class WireError(HeadstartError, ValueError):
    """A frame, an address or a key that is refused. The connection and both processes live on."""
