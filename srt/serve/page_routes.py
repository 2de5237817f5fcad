"""The chat page: static files of the package, and what a browser may do with them."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing is loaded from elsewhere and no text becomes a program, whatever a model writes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time whether a file has changed.
    "Cache-Control": "no-cache",
}


def page_paths() -> frozenset[str]:
    """Paths of the page's files."""
    return frozenset({"/"} | {f"/{file.name}" for file in _files()})


def make_router() -> APIRouter:
    """The routes of the page's files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for file in _files():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        _add(router, path, file.read_bytes(), _TYPES[file.suffix])
    return router


def _files() -> list[Path]:
    return sorted(file for file in _FOLDER.iterdir() if file.suffix in _TYPES)


def _add(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"ETag": tag}

    @router.get(path)
    @router.head(path)
    async def send(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in {one.strip().removeprefix("W/") for one in known.split(",")}:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)
