"""Which web pages may use the server: a page of another site sends what its visitor never asked for.

A browser names the page's site in `Origin` (always with a POST to another site) and in `Sec-Fetch-Site`. Other clients
send neither, and are not meant here. A site whose name leads to this machine (DNS rebinding) is the same site to a
browser: without an admin key only the Host header tells, which has to name a loopback address.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from headstart.gateway.api.errors import ApiError
from headstart.wire.security import is_loopback

ANY = "*"
OWN_SITE = ("none", "same-origin")


@dataclass(frozen=True, slots=True)
class Origins:
    """`allowed` are origins such as https://example.org, or `*` for all."""

    allowed: tuple[str, ...] = ()

    def check_sender(self, request: Request) -> None:
        """Refuse a request that makes the server work for a page of a site that is not allowed. Raises ApiError 403."""
        if ANY not in self.allowed and self._is_foreign(request):
            raise ApiError(403, "pages of other sites may not use this server (--cors-origins)", code="cross_site")

    def check_operator(self, request: Request, *, is_guarded: bool) -> None:
        """The same for what operates the server. `*` lets pages in only if a key guards it (`is_guarded`)."""
        if not (is_guarded and ANY in self.allowed) and self._is_foreign(request):
            raise ApiError(403, "pages of other sites may not operate the server", code="cross_site")
        if not is_guarded and not _is_loopback(request.headers.get("host", "localhost")):
            message = "ask under a loopback address, or set an admin key (--admin-key-file)"
            raise ApiError(403, message, code="cross_site")

    def _is_foreign(self, request: Request) -> bool:
        origin = request.headers.get("origin")
        if origin is not None and origin in self.allowed:
            return False
        if request.headers.get("sec-fetch-site", "none") not in OWN_SITE:
            return True
        return origin is not None and _host_of(origin) != request.headers.get("host", "").lower()


def _host_of(origin: str) -> str:
    """Host and port of an origin; empty for `null` and for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine, whoever resolves it."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
