"""What requests pass before they reach an API, over an application that answers everything."""

import asyncio
import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from srt.errors import OptionError
from srt.managers.forward_pass import WorkDone
from srt.serve.config import ServerConfig
from srt.serve.engine.generations import GenerationEnd
from srt.serve.engine.protocol import EngineStats
from srt.serve.errors import ApiError
from srt.serve.logs import FIELDS, JsonFormatter, LogWriter, TextFormatter
from srt.serve.metrics import ServerMetrics
from srt.serve.middleware.auth import load_keys
from srt.serve.middleware.origins import is_loopback
from srt.serve.middleware.refusals import refuse
from srt.serve.middleware.stack import protect
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="per-commit")

ROOT = Path(__file__).resolve().parents[3]
KEY = "sk-secret-1"
JSON = {"content-type": "application/json"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, and errors as the application does."""
    length, more = 0, True
    try:
        while more:
            message = await receive()
            length += len(message.get("body", b""))
            more = message.get("more_body", False)
    except ApiError as error:
        await refuse(scope, send, error)
        return
    body = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def request(
    method: str,
    path: str,
    *,
    config: ServerConfig | None = None,
    keys: tuple[str, ...] = (),
    metrics: ServerMetrics | None = None,
    app: ASGIApp = echo,
    **options: Any,
) -> httpx.Response:
    stack = protect(app, config or ServerConfig(), keys, metrics or ServerMetrics(), "m")

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(stack)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer  {KEY} "}, 200),
        ({"authorization": "Bearer other"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY[:-1]}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": KEY}, 200),
    ],
)
def test_keys(headers: dict[str, Any], status: int) -> None:
    answer = request("GET", "/v1/models", keys=(KEY, "other"), headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.text


def test_refusals_have_the_shape_of_the_api() -> None:
    answer = request("POST", "/v1/messages", keys=(KEY,), headers=JSON, content=b"{}")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["type"] == "error"
    assert answer.json()["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/api.js"])
def test_what_is_open_with_keys(path: str) -> None:
    assert request("GET", path, keys=(KEY,)).status_code == 200
    assert request("POST", path, keys=(KEY,), headers=JSON).status_code == 401


@pytest.mark.parametrize(
    "path", ["/metrics", "/version", "/openapi.json", "/favicon.ico", "/v1/models"]
)
def test_what_is_closed_with_keys(path: str) -> None:
    assert request("GET", path, keys=(KEY,)).status_code == 401


def test_keys_come_from_options_a_file_and_the_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("\n one \r\ntwo\n\n")
    file.chmod(0o600)
    config = ServerConfig(api_key=("zero",), api_key_file=file)
    assert load_keys(config, {"SRT_API_KEY": "env"}) == ("zero", "env", "one", "two")
    assert load_keys(ServerConfig(), {}) == ()
    assert not caplog.records
    file.chmod(0o644)
    load_keys(config, {})
    assert "can be read by other users" in caplog.text and "one" not in caplog.text
    assert "zero" not in repr(config)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"a b\n", b"\xff\xfe", b"schl\xc3\xbcssel"])
def test_a_file_without_usable_keys_opens_no_server(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(OptionError, match="api_key_file: expected"):
        load_keys(ServerConfig(api_key_file=file), {})


def test_empty_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="SRT_API_KEY: expected a key that is not empty"):
        load_keys(ServerConfig(), {"SRT_API_KEY": ""})
    with pytest.raises(OptionError, match="api_key"):
        ServerConfig(api_key=("",))
    with pytest.raises(OptionError, match="visible ASCII"):
        load_keys(ServerConfig(api_key=("a b",)), {})
    with pytest.raises(OptionError, match="No such file"):
        load_keys(ServerConfig(api_key_file=tmp_path / "none"), {})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.8.9.1", "[::1]", "a.localhost"])
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback(host)
    assert request("GET", "/v1/models", headers={"host": f"{host}:30000"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "", "[::"])
def test_names_that_lead_here_by_an_attackers_will(host: str) -> None:
    headers = {"host": host}
    assert not is_loopback(host)
    assert request("GET", "/v1/models", headers=headers).status_code == 403
    # With a key, or where others are to come, any name will do.
    key = {"x-api-key": KEY}
    assert request("GET", "/v1/models", keys=(KEY,), headers=headers | key).status_code == 200
    public = ServerConfig(host="0.0.0.0")
    assert request("GET", "/v1/models", config=public, headers=headers).status_code == 200


def test_allowed_hosts() -> None:
    config = ServerConfig(host="0.0.0.0", allowed_host=("chat.example",))
    for host, status in (("chat.example:80", 200), ("Chat.Example", 200), ("localhost", 403)):
        assert (
            request("GET", "/health", config=config, headers={"host": host}).status_code == status
        )
    any_name = ServerConfig(allowed_host=("*",))
    assert request("GET", "/health", config=any_name, headers={"host": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"origin": "https://friend.example"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:81"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://proxied.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_pages_of_strangers(headers: dict[str, str], status: int) -> None:
    config = ServerConfig(allow_origin=("https://friend.example",))
    for method in ("GET", "POST"):
        answer = request(method, "/v1/models", config=config, headers=JSON | headers)
        assert answer.status_code == status


def test_cors_is_closed_by_default_and_opens_for_those_named() -> None:
    ask = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    closed = request("OPTIONS", "/v1/models", headers=ask)
    assert closed.status_code == 403 and "access-control-allow-origin" not in closed.headers
    config = ServerConfig(allow_origin=("https://friend.example",))
    for keys in ((), (KEY,)):  # a browser asks without a key
        answer = request("OPTIONS", "/v1/models", config=config, keys=keys, headers=ask)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_be_called_json(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = request("POST", "/v1/completions", headers=headers, content=b"{}")
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    named = {"content-type": "Application/JSON; charset=utf-8"}
    assert request("POST", "/v1/completions", headers=named, content=b"{}").text == "2"


def test_long_bodies_are_refused_by_header_and_as_they_come() -> None:
    config = ServerConfig(max_body_bytes=100)

    async def parts(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 10

    for content, status in ((b"x" * 100, 200), (b"x" * 101, 413), (parts(10), 200)):
        answer = request("POST", "/x", config=config, headers=JSON, content=content)
        assert answer.status_code == status
    answer = request("POST", "/x", config=config, headers=JSON, content=parts(11))
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    assert answer.json()["error"]["code"] == "body_too_large"


def test_request_ids_and_headers() -> None:
    answer = request("GET", "/health", headers={"x-request-id": "abc-1/2"})
    assert answer.headers["x-request-id"] == "abc-1/2"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for given in ("a b", "x" * 129, "", 'a"b'):
        made = request("GET", "/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert made != given and len(made) == 32


def test_a_line_for_each_request_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    headers = JSON | {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
    request("POST", "/v1/x?api_key=" + KEY, keys=(KEY,), headers=headers, content=b"CONTENT")
    request("GET", "/health")
    lines = [record for record in caplog.records if record.message == "request"]
    assert [line.levelno for line in lines] == [logging.INFO, logging.DEBUG]
    for formatter in (TextFormatter(), JsonFormatter()):
        # All but what the client of this test says itself.
        own = [record for record in caplog.records if record.name != "httpx"]
        text = "\n".join(formatter.format(record) for record in own)
        assert "/v1/x" in text and KEY not in text and "CONTENT" not in text
    fields = getattr(lines[0], FIELDS)
    assert fields["outcome"] == "ok" and fields["status"] == 200 and fields["method"] == "POST"
    assert json.loads(JsonFormatter().format(lines[0]))["path"] == "/v1/x"


def test_content_is_logged_on_demand_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = ServerConfig(log_requests=True)
    request("POST", "/v1/x", config=config, headers=JSON, content=b'"hi\n\x1b[2J"')
    line = next(record for record in caplog.records if record.message == "request")
    assert getattr(line, FIELDS)["request"] == '"hi\n\x1b[2J"'
    assert getattr(line, FIELDS)["answer"] == "9"
    assert TextFormatter().format(line).isprintable()


class _FullStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", ["full", "closed", "missing"])
def test_a_log_that_cannot_be_written_breaks_nothing(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    target = {"full": _FullStream(), "closed": closed, "missing": None}[stream]
    dropped = threading.Semaphore(0)
    writer = LogWriter(lambda: dropped.release())
    writer.setFormatter(TextFormatter())
    monkeypatch.setattr(sys, "stderr", target)
    for _ in range(3):
        writer.handle(logging.makeLogRecord({"msg": "x"}))
    assert all(dropped.acquire(timeout=10) for _ in range(3))
    writer.close()


def test_a_log_that_nobody_reads_makes_nothing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    lost: list[int] = []
    writer = LogWriter(lambda: lost.append(1))
    writer.setFormatter(TextFormatter())
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        record = logging.makeLogRecord({"msg": "x" * 100})
        began = time.monotonic()
        for _ in range(12_000):
            writer.handle(record)
        assert time.monotonic() - began < 5 and len(lost) > 100
        os.set_blocking(read, False)

        def drain() -> None:
            while writer._thread.is_alive():
                try:
                    os.read(read, 1 << 16)
                except BlockingIOError:
                    time.sleep(0.001)

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        writer.close()
        reader.join(10)
    os.close(read)


END = GenerationEnd("stop", None, None, 7, 3, 5, 0.01, 0.02, 0.3)


def test_metrics_of_generations() -> None:
    metrics = ServerMetrics()
    observer = metrics.observe_generation()
    for _ in range(5):
        observer.on_tokens()
    observer.on_end(END)
    metrics.observe_generation().on_error("engine_died")
    value: Callable[..., float | None] = metrics.registry.get_sample_value
    assert value("srt_prompt_tokens_total") == 7
    assert value("srt_cached_prompt_tokens_total") == 3
    assert value("srt_generation_tokens_total") == 5
    assert value("srt_time_to_first_token_seconds_count") == 1
    assert value("srt_inter_token_latency_seconds_count") == 4
    assert value("srt_request_queue_time_seconds_sum") == 0.01
    assert value("srt_generations_total", {"finish_reason": "stop"}) == 1
    assert value("srt_generations_total", {"finish_reason": "error"}) == 1


def test_metrics_of_the_engine_and_of_requests() -> None:
    metrics = ServerMetrics()
    stats = EngineStats(running=2, kv_tokens=100, kv_used_tokens=25, work=WorkDone(decode_passes=9))
    metrics.watch_engine(lambda: ("m", stats, None, 4, 1))
    request("GET", "/health", metrics=metrics)
    request("GET", "/" + "x" * 50, metrics=metrics)
    request("POST", "/tokenize", metrics=metrics)
    value: Callable[..., float | None] = metrics.registry.get_sample_value
    assert value("srt_num_requests_running") == 2
    assert value("srt_num_requests_waiting") == 4
    assert value("srt_kv_cache_usage_ratio") == 0.25
    assert value("srt_steps_total", {"mode": "decode"}) == 9
    assert value("srt_engine_restarts_total") == 1
    assert value("srt_requests_total", {"path": "/health", "outcome": "ok"}) == 1
    assert value("srt_requests_total", {"path": "other", "outcome": "ok"}) == 1
    assert value("srt_requests_total", {"path": "/tokenize", "outcome": "refused"}) == 1


def test_a_token_costs_microseconds() -> None:
    observer = ServerMetrics().observe_generation()
    began = time.perf_counter()
    for _ in range(10_000):
        observer.on_tokens()
    assert (time.perf_counter() - began) / 10_000 < 100e-6


def test_no_metric_has_a_label_that_clients_choose() -> None:
    metrics = ServerMetrics()
    for path in range(50):
        request("GET", f"/v1/models/{path}", metrics=metrics)
    text = generate_latest(metrics.registry).decode()
    assert text.count("srt_requests_total{") == 1


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = ServerMetrics()
    metrics.watch_engine(lambda: ("m", EngineStats(), None, 0, 0))
    metrics.count_refused(400)
    request("GET", "/health", metrics=metrics)
    known = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    board = json.loads((ROOT / "deploy/grafana/srt.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\bsrt_\w+", query)}
    assert len(queries) > 20 and asked <= known
    assert all(query.count("(") == query.count(")") for query in queries)
    # What the server counts and nobody looks at would be there for nothing.
    families = {family.name for family in metrics.registry.collect()}
    shown = {name for name in families if any(one.startswith(name) for one in asked)}
    assert families - shown == {
        "srt_generations",
        "srt_kv_cache_used_tokens",
        "srt_request_prompt_tokens",
        "srt_request_generation_tokens",
    }
    documented = (ROOT / "docs/serving.md").read_text()
    assert not [name for name in families if f"`{name}" not in documented]
