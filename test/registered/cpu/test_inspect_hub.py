"""`srt inspect org/name`: headers by range requests from a server on this machine that speaks the
Hub's requests, and counts what it sends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from srt.checkpoint import hub_headers
from srt.checkpoint.hub import resolve_model
from srt.cli.main import main
from srt.errors import CheckpointError, HubError
from srt.inspection.report import inspect_model
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.local_hub import local_hub, set_endpoint
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint

register_cpu_ci(est_time=8, suite="per-commit")

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """One repository `org/model`.

    Attributes:
        files: Its content.
        refused: File name -> (status, error code) that it is answered with.
        ranges: Whether the server knows range requests.
        sent: File name -> bytes of it that were sent.
        ranged: Ranges that were asked for, by file name.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    ranges: bool = True
    says_size: bool = True
    sent: dict[str, int] = field(default_factory=dict)
    ranged: dict[str, list[str]] = field(default_factory=dict)
    url: str = ""
    lock: Lock = field(default_factory=Lock)

    def fill(self, directory: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in directory.iterdir()}

    def sent_of_weights(self) -> int:
        return sum(n for name, n in self.sent.items() if name.endswith(".safetensors"))


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        file = re.fullmatch(r"/org/model/resolve/\w+/(.+)", path)
        if file is not None:
            self.send_file(file[1])
        elif not path.startswith("/api/models/org/model"):
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": f"{hash(body):x}"}
                for name, body in hub.files.items()
            ]
            self.send(200, json.dumps(tree).encode())
        elif path.partition("/revision/")[2] in ("", "main", COMMIT):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(info).encode())
        else:
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def send_file(self, name: str) -> None:
        hub = self.hub
        if name in hub.refused or name not in hub.files:
            status, code = hub.refused.get(name, (404, "EntryNotFound"))
            self.send(status, b"{}", {"X-Error-Code": code})
            return
        body, status = hub.files[name], 200
        headers = {"ETag": f'"{hash(body):x}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is not None:
            with hub.lock:
                hub.ranged.setdefault(name, []).append(asked[0])
            if hub.ranges:
                total = len(body) if hub.says_size else "*"
                headers["Content-Range"] = f"bytes {asked[1]}-{asked[2]}/{total}"
                body, status = body[int(asked[1]) : int(asked[2]) + 1], 206
        self.send(status, body, headers, name)

    def send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "GET":
            return
        # Piece by piece: what a client does not want to read is not sent.
        for start in range(0, len(body), 1 << 14):
            try:
                self.wfile.write(body[start : start + (1 << 14)])
            except OSError:
                return
            with self.hub.lock:
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(body[start:][: 1 << 14])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    monkeypatch.setattr(hub_headers, "_RETRIES", 0)
    handler = type("Bound", (Handler,), {"hub": fake})
    with local_hub(handler, tmp_path, monkeypatch) as fake.url:
        yield fake


def write_model(directory: Path, shards: int = 1, **extra: torch.Tensor) -> Path:
    """A tiny FP8 Llama in one or more files."""
    tensors = quantize(make_tensors(TINY_CONFIG)) | {
        name.replace("__", "."): value for name, value in extra.items()
    }
    write_checkpoint(directory, TINY_CONFIG, tensors, {"quant_method": "fp8"})
    if shards > 1:
        (directory / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {n: f"model-{i % shards}.safetensors" for i, n in enumerate(names)}
        for file in set(files.values()):
            save_file({n: tensors[n] for n in names if files[n] == file}, directory / file)
        index = json.dumps({"weight_map": files})
        (directory / "model.safetensors.index.json").write_text(index)
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_finds_what_a_download_would_find(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST_BYTES", 8 << 10)
    local = write_model(tmp_path / "local", shards)
    hub.fill(local)
    remote = inspect_model("org/model")
    total = sum(len(body) for name, body in hub.files.items() if name.endswith(".safetensors"))
    assert hub.sent_of_weights() <= shards * (8 << 10) < total / 20
    assert len(hub.ranged) == shards
    expected = inspect_model(local)
    assert remote.runs_here
    assert remote.path == "org/model"
    for name in ("modules", "files", "dtypes", "ignored", "parameters", "scheme"):
        assert getattr(remote, name) == getattr(expected, name)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["mistral-own", "modelopt-block", "fbgemm", "deepseek"])
def test_forms(hub: FakeHub, tmp_path: Path, name: str) -> None:
    write_fp8_checkpoint(FORMATS[name], tmp_path / "local", TINY_CONFIG, make_tensors(TINY_CONFIG))
    hub.fill(tmp_path / "local")
    remote = inspect_model("org/model@main")
    assert remote.problems == []
    assert remote.modules == inspect_model(tmp_path / "local").modules


@pytest.mark.parametrize("ranges", [True, False])
def test_a_long_header_takes_a_second_request(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST_BYTES", 100)
    hub.fill(write_model(tmp_path / "local"))
    hub.ranges = ranges
    assert inspect_model("org/model").runs_here
    asked = hub.ranged["model.safetensors"]
    assert asked[0] == "bytes=0-99"
    assert len(asked) == 2
    if ranges:
        body = hub.files["model.safetensors"]
        assert hub.sent_of_weights() == 8 + int.from_bytes(body[:8], "little")


def test_a_server_without_ranges_sends_little_in_vain(hub: FakeHub, tmp_path: Path) -> None:
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    hub.fill(write_model(tmp_path / "local", model__layers__0__mlp__down_proj__bias=large))
    hub.ranges = False
    inspection = inspect_model("org/model")
    assert "down_proj.bias" in inspection.problems[0]
    # What the kernel's buffers took before the connection was closed.
    assert hub.sent_of_weights() < 32 << 20


def test_names_the_model_in_what_speaks_against_it(hub: FakeHub, tmp_path: Path) -> None:
    local = write_model(tmp_path / "local", model__layers__0__mlp__down_proj__bias=torch.ones(96))
    hub.fill(local)
    (problem,) = inspect_model("org/model").problems
    assert problem == inspect_model(local).problems[0].replace(str(local), "org/model")
    assert "file: org/model/model.safetensors" in problem


def test_cached_files_are_used(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fill(write_model(tmp_path / "local", 3))
    resolve_model("org/model")
    hub.sent.clear()
    hub.ranged.clear()
    assert inspect_model("org/model").runs_here
    assert (hub.ranged, hub.sent_of_weights()) == ({}, 0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert inspect_model("org/model").runs_here
    set_endpoint("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert inspect_model("org/model").runs_here


def test_offline_without_the_weights(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fill(write_model(tmp_path / "local"))
    inspect_model("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"not completely, in the cache .*HF_HUB_OFFLINE"):
        inspect_model("org/model")


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ((403, "GatedRepo"), "access to org/model is restricted"),
        ((401, "RepoNotFound"), "a private model needs a token"),
        ((404, "EntryNotFound"), "org/model lacks model-1.safetensors, which"),
        ((500, ""), "org/model.* from .*: .*500"),
    ],
)
def test_weights_that_cannot_be_had(
    hub: FakeHub, tmp_path: Path, refused: tuple[int, str], message: str
) -> None:
    hub.fill(write_model(tmp_path / "local", 3))
    hub.refused["model-1.safetensors"] = refused
    with pytest.raises(HubError, match=message) as caught:
        inspect_model("org/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["org/other", "org/model@v2", "org/-bad", "nowhere"])
def test_models_that_are_not_there(
    hub: FakeHub, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", model]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_a_model_without_weights(hub: FakeHub, tmp_path: Path) -> None:
    local = write_model(tmp_path / "local")
    (local / "model.safetensors").rename(local / "pytorch_model.bin")
    hub.fill(local)
    inspection = inspect_model("org/model")
    assert not inspection.has_weights
    assert inspection.problems == ["there are no safetensors weights in the directory"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda body: body[:-7], "truncated"),
        (lambda body: body[:5], "truncated"),
        (lambda body: b"", "truncated"),
        (lambda body: b"\xff" * 8 + body[8:], "truncated or not a safetensors file"),
        (lambda body: body[:8] + b"[" * 200 + body[208:], "corrupt header"),
    ],
)
def test_damaged_headers(hub: FakeHub, tmp_path: Path, damage: object, message: str) -> None:
    hub.fill(write_model(tmp_path / "local"))
    assert callable(damage)
    hub.files["model.safetensors"] = damage(hub.files["model.safetensors"])
    with pytest.raises((HubError, CheckpointError), match=f"{message}.*org/model/model"):
        inspect_model("org/model")


def test_a_server_that_hides_the_size(hub: FakeHub, tmp_path: Path) -> None:
    hub.fill(write_model(tmp_path / "local"))
    hub.says_size = False
    with pytest.raises(HubError, match="does not tell the file's size"):
        inspect_model("org/model")


def test_command_line(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fill(write_model(tmp_path / "local"))
    assert main(["inspect", "org/model", "--revision", "main", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == "org/model"
    assert report["runs_here"] is True
