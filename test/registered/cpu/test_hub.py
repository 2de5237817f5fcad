"""Models by name on the Hub: a server on this machine speaks the few requests that downloading
makes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from srt.checkpoint.hub import resolve_model
from srt.cli.main import main
from srt.errors import CheckpointError, HubError
from srt.test.ci_register import register_cpu_ci
from srt.test.local_hub import local_hub, set_endpoint

register_cpu_ci(est_time=4, suite="per-commit")

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
INDEX = json.dumps({"weight_map": {"x": "part-[1].safetensors", "y": "part-[2].safetensors"}})
SHARDS = ("part-[1].safetensors", "part-[2].safetensors")
# Files that no checkpoint needs, or that another form of the weights would need.
NOISE = ("pytorch_model.bin", "model.gguf", "README.md", "original/consolidated.00.pth")


@dataclass
class FakeHub:
    """One repository `org/model`; `status` and `code` turn every answer into an error."""

    files: dict[str, bytes]
    status: int = 200
    code: str = ""
    refuse_files: bool = False
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of the files that were downloaded."""
        pattern = re.compile(r"GET /org/model/resolve/\w+/(.+)")
        matches = [pattern.fullmatch(request) for request in self.requests]
        return {m[1].replace("%5B", "[").replace("%5D", "]") for m in matches if m}


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add(self.headers["Authorization"])
        is_file = "/resolve/" in path
        if hub.status != 200 and (is_file or not hub.refuse_files):
            self._send(hub.status, b"{}", {"X-Error-Code": hub.code})
        elif not path.removeprefix("/api/models").startswith("/org/model"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif is_file:
            commit, name = re.fullmatch(r"/org/model/resolve/(\w+)/(.+)", path).groups()  # type: ignore[union-attr]
            body = hub.files[name.replace("%5B", "[").replace("%5D", "]")]
            self._send(200, body, {"ETag": f'"{hash(body):x}"', "X-Repo-Commit": commit})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": f"{hash(body):x}"}
                for name, body in hub.files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        else:
            revision = path.partition("/revision/")[2] or "main"
            commit = COMMITS.get(revision, revision)
            if commit not in COMMITS.values():
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": "org/model", "sha": commit, "siblings": siblings}
            self._send(200, json.dumps(info).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = ["config.json", "tokenizer.json", "generation_config.json", *SHARDS, *NOISE]
    fake = FakeHub({name: name.encode() for name in files})
    fake.files["model.safetensors.index.json"] = INDEX.encode()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    handler = type("Bound", (Handler,), {"hub": fake})
    with local_hub(handler, tmp_path, monkeypatch) as fake.url:
        yield fake


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def lose_network(monkeypatch: pytest.MonkeyPatch) -> None:
    set_endpoint("http://127.0.0.1:1", monkeypatch)  # refuses connections


def test_fetches_what_running_needs(hub: FakeHub) -> None:
    directory = resolve_model("org/model")
    expected = {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *SHARDS,
    }
    assert hub.fetched() == expected == {file.name for file in directory.iterdir()}
    assert all((directory / name).read_bytes() == hub.files[name] for name in expected)
    assert directory.name == COMMITS["main"]
    assert "Bearer hf_secret" in hub.tokens


def test_second_call_downloads_nothing(hub: FakeHub) -> None:
    first = resolve_model("org/model")
    hub.requests.clear()
    assert resolve_model("org/model") == first
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            ["config.json", "model.safetensors", "consolidated.safetensors", "params.json"],
            {"config.json", "model.safetensors"},
        ),
        (
            ["params.json", "consolidated.safetensors", "tekken.json", "README.md"],
            {"params.json", "consolidated.safetensors", "tekken.json"},
        ),
        (
            ["params.json", "consolidated-1.safetensors", "consolidated.safetensors.index.json"],
            {"params.json", "consolidated-1.safetensors", "consolidated.safetensors.index.json"},
        ),
    ],
    ids=["Hugging Face's form wins", "Mistral's own form", "Mistral's own form in shards"],
)
def test_forms(hub: FakeHub, files: list[str], expected: set[str]) -> None:
    hub.files = {name: name.encode() for name in files}
    resolve_model("org/model")
    assert hub.fetched() == expected


@pytest.mark.parametrize("spelling", ["v1", COMMITS["v1"]])
@pytest.mark.parametrize("at_name", [True, False])
def test_revision(hub: FakeHub, spelling: str, at_name: bool) -> None:
    model, revision = (f"org/model@{spelling}", None) if at_name else ("org/model", spelling)
    assert resolve_model(model, revision).name == COMMITS["v1"]


@pytest.mark.parametrize("cut", [go_offline, lose_network])
@pytest.mark.parametrize("model", ["org/model", "org/model@v1", f"org/model@{COMMITS['v1']}"])
def test_works_from_the_cache_without_network(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, cut: object, model: str
) -> None:
    directory = resolve_model(model)
    assert callable(cut)
    cut(monkeypatch)
    hub.requests.clear()
    assert resolve_model(model) == directory
    assert hub.requests == []


def test_error_when_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "not, or not completely, in the cache .*, and HF_HUB_OFFLINE keeps"
    go_offline(monkeypatch)
    with pytest.raises(HubError, match=message):
        resolve_model("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    shard = resolve_model("org/model") / SHARDS[1]
    shard.resolve().unlink()
    shard.unlink()
    go_offline(monkeypatch)
    # Old versions of the library do not tell what a snapshot should hold.
    with pytest.raises(HubError, match=rf"{message}|lacks part-\[2\].safetensors"):
        resolve_model("org/model")


def test_shard_that_the_hub_lacks(hub: FakeHub) -> None:
    del hub.files[SHARDS[1]]
    with pytest.raises(HubError, match=r"org/model lacks part-\[2\].safetensors, which"):
        resolve_model("org/model")


def test_error_without_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_network(monkeypatch)
    with pytest.raises(HubError, match=r"in the cache .*, and http://127.0.0.1:1 cannot be reach"):
        resolve_model("org/model")


@pytest.mark.parametrize(
    ("model", "status", "code", "message"),
    [
        ("org/other", 200, "", "org/other is neither a local directory nor a model at .*token"),
        ("org/model@v2", 200, "", "org/model has no revision 'v2'"),
        ("org/model", 401, "RepoNotFound", "neither a local directory nor a model.*HF_TOKEN"),
        ("org/model", 403, "GatedRepo", "access to org/model is restricted; accept.*hf auth login"),
        ("org/model", 500, "", "cannot be reached .*500"),
        ("org/-model", 200, "", "neither a local directory nor a name on the Hub"),
    ],
)
def test_error_of_the_hub(hub: FakeHub, model: str, status: int, code: str, message: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(HubError, match=message) as info:
        resolve_model(model)
    assert "\n" not in str(info.value)


def test_gated_files_of_a_public_listing(hub: FakeHub) -> None:
    hub.status, hub.code, hub.refuse_files = 403, "GatedRepo", True
    with pytest.raises(HubError, match="access to org/model is restricted"):
        resolve_model("org/model")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "no safetensors weights"),
        (["params.json", "consolidated.00.pth"], "no safetensors weights"),
        (["model.gguf"], "is no checkpoint: it has neither config.json nor params.json"),
    ],
)
def test_unusable_repository(hub: FakeHub, files: list[str], message: str) -> None:
    hub.files = {name: name.encode() for name in files}
    with pytest.raises(HubError, match=message):
        resolve_model("org/model")
    assert not any(name.endswith((".bin", ".pth", ".gguf")) for name in hub.fetched())


def test_local_path_wins(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org/model").mkdir(parents=True)
    assert resolve_model("org/model") == Path("org/model")
    assert resolve_model(tmp_path) == tmp_path
    assert hub.requests == []
    with pytest.raises(HubError, match="org/model is a local path, which has no revision 'v1'"):
        resolve_model("org/model", "v1")


@pytest.mark.parametrize("model", ["model", "./org/model", "/org/model", "a/b/c", "../model", ""])
def test_what_is_no_name_is_a_missing_directory(hub: FakeHub, model: str) -> None:
    if model:
        with pytest.raises(CheckpointError, match="a directory, or org/name on the Hugging Face"):
            resolve_model(model)
    assert hub.requests == []


def test_two_revisions(hub: FakeHub) -> None:
    with pytest.raises(HubError, match="two revisions are given, the other is 'main'"):
        resolve_model("org/model@v1", "main")


def test_command_line(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", "org/model", "--revision", "v2", "--prompt", "x"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err == f"srt: error: org/model has no revision 'v2' at {hub.url}\n"
