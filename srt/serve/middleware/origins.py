"""Which web pages may ask: a browser sends requests for pages of strangers, too.

A server without keys trusts whoever reaches it, and at a loopback address that is every program of
the machine, its browser included. So there a page of another site is told apart in two ways: by its
Origin, and, where a name of the attacker's was made to lead to this machine (DNS rebinding), by the
Host that the browser asks for.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from srt.serve.errors import ApiError
from srt.serve.middleware.refusals import refuse

ANY = "*"


def is_loopback(host: str) -> bool:
    """Whether a host, without a port, is this machine under a name that nobody can redirect."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OriginCheck:
    """Refuses what a browser sends for a page of another site.

    Args:
        app: What requests reach otherwise.
        hosts: The names that clients may use for the server; None for all.
        loopback: Whether those of this machine are among them.
        origins: The sites whose pages may ask; None where keys tell who may.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] | None,
        loopback: bool,
        origins: Collection[str] | None,
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._loopback = loopback
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(scope)
        if error is not None:
            await refuse(scope, send, error)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        hosts, origin, site = [], None, b""
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            return ApiError(400, f"expected one Host header, found {len(hosts)}")
        host = hosts[0].decode("latin-1") if hosts else ""
        if self._hosts is not None and ANY not in self._hosts and not self._knows(host):
            return ApiError(
                403,
                f"the server is not known as {host[:100]!r}; --allowed-host makes it so",
                code="host_not_allowed",
            )
        if origin is None or self._origins is None or ANY in self._origins:
            return None
        text = origin.decode("latin-1")
        if text in self._origins or site == b"same-origin":
            return None
        if host and text.partition("://")[2].lower() == host.lower():
            return None
        return ApiError(
            403,
            f"pages of {text[:100]!r} may not use the server; --allow-origin lets them",
            code="origin_not_allowed",
        )

    def _knows(self, host: str) -> bool:
        assert self._hosts is not None
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or (self._loopback and is_loopback(name))
