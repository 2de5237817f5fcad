"""No request makes the server open a file, look up a name, connect to anybody or start a program,
whatever it names.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import ROOT, LiveServer, live_server
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=8, suite="per-commit")

# Every process of the server with Python's usual start writes what it does, to a file that is open
# already.
HOOK = """
import json, os, sys

_LOG = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
           "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
           "urllib.Request", "os.listdir", "os.scandir")

def _hook(event, arguments):
    if event in _EVENTS or (event == "open" and isinstance(arguments[0], (str, bytes))):
        os.write(_LOG, (json.dumps([event, str(arguments[0])]) + "\\n").encode())

sys.addaudithook(_hook)
"""
# Where a request may not lead; the file is there, and names nobody has are asked of a server.
FILE = "file:///etc/passwd"
URL = "http://127.0.0.1:9/secret.json"
NAME = "https://srt-test.invalid/schema.json"


class Audited:
    """A server, and what it has done since `read` was called before."""

    def __init__(self, server: LiveServer, log: Path) -> None:
        self.server = server
        self._log, self._position = log, 0

    def read(self) -> list[tuple[str, str]]:
        with self._log.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        self._position += len(content)
        events = [tuple(json.loads(line)) for line in content.splitlines()]
        # Modules that are first needed now are no file of a request.
        return [
            (event, name)
            for event, name in events
            if not (event == "open" and name.endswith((".py", ".pyc", ".so")))
        ]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    directory = tmp_path_factory.mktemp("audit")
    (directory / "sitecustomize.py").write_text(HOOK)
    log = directory / "log"
    model = write_text_model(directory / "tiny")
    paths = os.pathsep.join([str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": paths, "AUDIT_LOG": str(log)}
    with live_server(model, ["--max-total-tokens", "2048"], env) as server:
        audited = Audited(server, log)
        # What is opened and started once: the worker of templates, the compiler of schemas.
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}
        for body in (chat, chat | {"response_format": schema}):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        events = audited.read()
        assert [name for event, name in events if event == "open" and "tiny" in name]
        assert [name for event, name in events if event == "subprocess.Popen"]
        yield audited


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    return "/v1/chat/completions", body | fields


def says(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2}


def refers(target: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"$ref": target}}, "required": ["a"]}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for target in (FILE, URL, NAME):
        function = {
            "name": "get",
            "description": target,
            "parameters": {"type": "object", "properties": {"a": {"$ref": target}}},
        }
        variables = {"tools": target, "path": "/etc/passwd", "template": target}
        yield chat(**says({"type": "image_url", "image_url": {"url": target}}))
        yield chat(**says({"type": "input_audio", "input_audio": {"data": target}}))
        yield chat(**says({"type": "file", "file": {"file_id": target, "filename": target}}))
        yield chat(messages=[{"role": "user", "content": f"see {target}"}])
        yield chat(response_format=refers(target))
        yield chat(tools=[{"type": "function", "function": function}], tool_choice="required")
        yield chat(tools=[{"type": "mcp", "server_url": target, "server_label": "a"}])
        yield chat(chat_template_kwargs=variables)
        yield chat(chat_template=f"{{% include '{target}' %}}")
        yield chat(model=target)
        yield "/v1/completions", {"prompt": target, "max_tokens": 2}
        yield "/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_grammar": target}
        for kind in ("image", "document"):
            source = {"type": "url", "url": target}
            yield "/v1/messages", {"model": "tiny"} | says({"type": kind, "source": source})
        for part in (
            {"type": "input_image", "image_url": target},
            {"type": "input_file", "file_url": target},
            {"type": "input_file", "file_id": target},
        ):
            item = {"role": "user", "content": [part]}
            yield "/v1/responses", {"input": [item], "max_output_tokens": 2}
        yield "/tokenize", {"prompt": target}
    for path in ("/..%2f..%2fetc/passwd", "/../../etc/passwd", "/page/../../etc/passwd"):
        yield path, {}


def test_no_request_opens_or_reaches_anything(audited: Audited) -> None:
    taken = 0
    with httpx.Client(base_url=audited.server.url, timeout=60) as client:
        for path, body in requests():
            answer = client.post(path, json=body)
            assert answer.status_code < 500, (path, body, answer.text)
            assert audited.read() == [], (path, body, answer.status_code)
            taken += answer.status_code == 200
    # Not all are refused before they could do harm.
    assert taken >= 6
