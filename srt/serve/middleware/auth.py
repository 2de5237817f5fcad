"""Who may ask: keys, and where they come from."""

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from srt.errors import OptionError
from srt.serve.config import ServerConfig
from srt.serve.errors import ApiError
from srt.serve.middleware.refusals import refuse
from srt.serve.page_routes import page_paths

logger = logging.getLogger(__name__)

KEY_VARIABLE = "SRT_API_KEY"
# Larger than any list of keys; a device that never ends is no such file.
_MAX_KEY_FILE = 1 << 20
# What probes ask.
_OPEN_PATHS = frozenset({"/health", "/ready"})


def load_keys(config: ServerConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that clients may give; none where the server is open to all.

    Raises:
        OptionError: One cannot be a key, or the file cannot be read.
    """
    keys = list(config.api_key or ())
    for key in keys:
        _check_key("api_key", key)
    if KEY_VARIABLE in environment:
        # Empty it may be because a secret is missing, which must not open the server.
        _check_key(KEY_VARIABLE, environment[KEY_VARIABLE])
        keys.append(environment[KEY_VARIABLE])
    if config.api_key_file is not None:
        keys += _read_keys(Path(config.api_key_file))
    return tuple(keys)


def _check_key(where: str, key: str) -> None:
    if not key:
        raise OptionError(where, "a key that is not empty", key)
    if not all("!" <= character <= "~" for character in key):
        # The value is not shown: it is nearly a key.
        raise OptionError(where, "keys of visible ASCII characters without spaces", "others")


def _read_keys(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_KEY_FILE + 1)
        if len(content) > _MAX_KEY_FILE:
            raise OptionError("api_key_file", f"at most {_MAX_KEY_FILE} bytes", str(path))
        text = content.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError("api_key_file", f"a file that can be read ({reason})", str(path)) from (
            error
        )
    except UnicodeDecodeError as error:
        raise OptionError("api_key_file", "a text in UTF-8", str(path)) from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise OptionError("api_key_file", "a file with a key a line", f"{path}, which has none")
    for key in keys:
        _check_key("api_key_file", key)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning(
            "%s can be read by other users of the machine (mode %03o); chmod 600 keeps its keys",
            path,
            stat.S_IMODE(mode),
        )
    return keys


class Authentication:
    """Lets requests pass that give one of the keys: `Authorization: Bearer KEY`, or Anthropic's
    `x-api-key: KEY`. How long a comparison takes does not depend on how much of a key is right.

    Args:
        app: What they reach then.
        keys: The keys, at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        # The page's files are the same everywhere, and ask for a key themselves.
        self._open = _OPEN_PATHS | page_paths()
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        is_open = path in self._open
        if (is_open and scope["method"] in ("GET", "HEAD")) or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        given = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
        error = ApiError(
            401,
            "the API key is wrong"
            if given
            else "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refuse(scope, send, error)

    def _is_known(self, scope: Scope) -> bool:
        is_known = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name == b"x-api-key":
                key = value
            else:
                continue
            digest = _digest(key.strip())
            for known in self._digests:
                is_known |= hmac.compare_digest(digest, known)
        return is_known


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
