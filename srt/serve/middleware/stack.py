"""What stands between a connection and the application, in its order."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from srt.serve.config import ServerConfig
from srt.serve.metrics import ServerMetrics
from srt.serve.middleware.access import AccessLog
from srt.serve.middleware.auth import Authentication
from srt.serve.middleware.bodies import BodyCheck
from srt.serve.middleware.origins import OriginCheck, is_loopback

_EXPOSED = ("X-Request-Id", "Retry-After")


def protect(
    app: ASGIApp, config: ServerConfig, keys: Sequence[str], metrics: ServerMetrics, model: str
) -> ASGIApp:
    """The application behind all that requests pass before it.

    Args:
        app: The application.
        config: The server's options.
        keys: Those that clients may give; none lets everybody in.
        metrics: The server's.
        model: The model's name, for the log.
    """
    protected: ASGIApp = BodyCheck(app, config.max_body_bytes)
    if keys:
        protected = Authentication(protected, keys)
    if config.allow_origin:
        # Outside of the keys: a browser asks without one whether it may ask.
        protected = CORSMiddleware(
            protected,
            allow_origins=config.allow_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    # A page of a stranger has no key; without keys it is told by where it comes from.
    hosts = config.allowed_host
    is_local = is_loopback(config.host)
    if hosts is None and not keys and is_local:
        hosts = ()
    protected = OriginCheck(
        protected,
        hosts=hosts,
        loopback=is_local,
        origins=None if keys else config.allow_origin or (),
    )
    return AccessLog(protected, metrics, model, log_requests=config.log_requests)
