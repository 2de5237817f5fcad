"""A server on this machine in the place of the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants


def set_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has huggingface_hub ask `url`."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def local_hub(
    handler: type[BaseHTTPRequestHandler], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Serves inside the ``with`` block and yields the URL; huggingface_hub asks there and caches in
    `directory`, which is the current one.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    set_endpoint(url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(directory)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()
