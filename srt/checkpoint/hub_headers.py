"""The headers of a model's weights on the Hub, read by range requests, without the weights.

They go into files of the weights' size that hold nothing else (sparse files, which take no space),
in a directory beside links to configuration and tokenizer. What works on a checkpoint's headers
therefore works there as it does after a download, with the same checks. Files that the cache has
are taken from it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE, MISTRAL_FILE
from srt.checkpoint.files import lies_there
from srt.checkpoint.headers import MAX_HEADER_BYTES
from srt.checkpoint.hub import SMALL_FILES, HubSnapshot, find_model, list_weights
from srt.errors import HubError
from srt.utils.files import os_errors_explained

# Most headers are shorter: one request a file.
_FIRST_BYTES = 128 << 10
# Requests at once, and how often one is made again.
_WORKERS = 8
_RETRIES = 2
# Mistral's own form, but for the weights.
_MISTRAL_SMALL_FILES = (
    MISTRAL_FILE,
    "tekken.json",
    "tokenizer.model*",
    "consolidated.safetensors.index.json",
)


@contextmanager
def open_headers(model: str | Path, revision: str | None = None) -> Iterator[Path]:
    """A directory with the model's configuration, tokenizer and the headers of its weights: the
    model's own if it is local, else a temporary one.

    Args:
        model: A directory, or `org/name[@revision]` on the Hub.
        revision: Branch, tag or commit on the Hub; None for `main`.

    Raises:
        CheckpointError, HubError: As of `resolve_model`, but for a model without weights.
    """
    found = find_model(model, revision, progress=False)
    if isinstance(found, Path):
        yield found
        return
    directory, weights = _fetch_small_files(found)
    with os_errors_explained("cannot use the directory for temporary files"):
        holder = tempfile.TemporaryDirectory(prefix="srt-headers-")
    with holder as name:
        staged = Path(name)
        for file in directory.iterdir():
            if file.suffix != ".safetensors":
                (staged / file.name).symlink_to(file)
        with ThreadPoolExecutor(_WORKERS) as pool:
            there = list(pool.map(lambda weight: _stage(found, weight, staged), weights))
        missing = [weight for weight, is_there in zip(weights, there, strict=True) if not is_there]
        if missing and len(weights) > 1:
            raise found.lacks(missing[0])
        yield staged


def _fetch_small_files(snapshot: HubSnapshot) -> tuple[Path, list[str]]:
    """(directory that has them, names of the weight files)."""
    directory = snapshot.fetch(SMALL_FILES)
    if lies_there(directory / CONFIG_FILE):
        return directory, list_weights(directory)
    snapshot.fetch(_MISTRAL_SMALL_FILES)
    if not lies_there(directory / MISTRAL_FILE):
        raise snapshot.is_no_checkpoint()
    return directory, _list_mistral_weights(snapshot, directory)


def _list_mistral_weights(snapshot: HubSnapshot, directory: Path) -> list[str]:
    """Of a form whose files have no fixed names."""
    from huggingface_hub import HfApi, constants

    local = sorted(file.name for file in directory.glob("consolidated*.safetensors"))
    if constants.HF_HUB_OFFLINE:
        return local
    with snapshot.errors_explained():
        names = HfApi(endpoint=constants.ENDPOINT).list_repo_files(
            snapshot.repo, revision=snapshot.commit
        )
    return sorted(n for n in names if re.fullmatch(r"consolidated[^/]*\.safetensors", n))


def _stage(snapshot: HubSnapshot, name: str, directory: Path) -> bool:
    """Puts a weight file, or its header, into `directory`; False if the Hub has no such file."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    file = directory / name
    cached = try_to_load_from_cache(snapshot.repo, name, revision=snapshot.commit)
    if isinstance(cached, str):
        file.symlink_to(cached)
        return True
    with snapshot.errors_explained():
        url = hf_hub_url(snapshot.repo, name, revision=snapshot.commit)
        try:
            header, size = _read_header(url)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return False
    with (
        os_errors_explained("cannot use the directory for temporary files"),
        file.open("wb") as stream,
    ):
        stream.write(header)
        stream.truncate(size)
    return True


def _read_header(url: str) -> tuple[bytes, int]:
    """(a file's length field and header, bytes of the whole file)."""
    start, size = _read_range(url, 0, _FIRST_BYTES)
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < min(end, size) and end <= MAX_HEADER_BYTES:
        start += _read_range(url, len(start), end)[0]
    return start[:end], size


def _read_range(url: str, begin: int, end: int) -> tuple[bytes, int]:
    """(bytes `begin` to `end` of a file, bytes of the whole file). A server that knows no ranges
    sends the file from its beginning; reading stops in time.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled(f"cannot read {url}")
    headers = build_hf_headers() | {
        "Range": f"bytes={begin}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    with http_stream_backoff("GET", url, headers=headers, max_retries=_RETRIES) as response:
        if response.status_code != 206:
            hf_raise_for_status(response)
            begin_here, size = 0, _to_size(response.headers.get("Content-Length"), url)
        else:
            begin_here = begin
            size = _to_size(response.headers.get("Content-Range", "").rpartition("/")[2], url)
        content = _take(response, min(end, size) - begin_here)
    return content[begin - begin_here :], size


def _take(response: Any, wanted: int) -> bytes:
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) >= wanted:
            break
    return bytes(content[:wanted])


def _to_size(text: str | None, url: str) -> int:
    if text is None or not text.isdecimal():
        raise HubError(f"cannot read the header of {url}: the server does not tell the file's size")
    return int(text)
