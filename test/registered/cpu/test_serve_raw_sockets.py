"""Bytes that are no request, or hardly one: each is answered with a refusal or a closed connection,
in bounded time and memory, and the server goes on as before.
"""

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, live_server, wait_until
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=25, suite="per-commit")

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
# What the server is told to wait for the rest of a request.
RECEIVE_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_text_model(tmp_path_factory.mktemp("models") / "tiny")
    options = "--max-total-tokens 2048 --send-timeout 2 --max-connections 64 --keep-alive-timeout 2"
    limits = f" --receive-timeout {RECEIVE_SECONDS:g} --max-body-bytes {1 << 20}"
    with live_server(model, (options + limits).split()) as running:
        yield running


def exchange(server: LiveServer, content: bytes, *, seconds: float = 15.0) -> bytes:
    """What comes until the server closes the connection, which it must within the time."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        answer = b""
        try:
            connection.sendall(content)
            while part := connection.recv(1 << 16):
                answer += part
        except ConnectionError:  # closed while there was more to send
            pass
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def generate(server: LiveServer) -> str:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["text"])


def memory(server: LiveServer) -> int:
    """Resident bytes of the server's process."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


HOSTILE = {
    "many headers": (GET + b"".join(b"X-%d: a\r\n" % i for i in range(10_000)) + b"\r\n", {431}),
    "long header": (GET + b"X: " + b"a" * 200_000 + b"\r\n\r\n", {431}),
    "header without end": (GET + b"X: " + b"a" * 400_000, {431}),
    "long URL": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {414}),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", {400}),
    "two hosts": (GET + b"Host: evil.example\r\nConnection: close\r\n\r\n", {400}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400, 505}),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505}),
    "HTTP/9.1": (b"GET /health HTTP/9.1\r\nHost: localhost\r\n\r\n", {400, 505}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), {400}),
    "NUL in the URL": (b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "NUL in a header": (GET + b"X: a\0b\r\n\r\n", {400}),
    "invalid UTF-8 in the URL": (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", {400}),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", {400}),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", {400}),
    "length that overflows": (HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", {400}),
    "length and chunks": (HEAD + LENGTH + CHUNKED + b"\r\n0\r\n\r\n", {400}),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", {400}),
    "bad chunk size": (HEAD + CHUNKED + b"\r\nzz\r\nabc\r\n0\r\n\r\n", {400}),
    "chunk longer than said": (HEAD + CHUNKED + b"\r\n2\r\nabcdef\r\n0\r\n\r\n", {400}),
    "folded header": (GET + b"X: a\r\n b\r\nConnection: close\r\n\r\n", {200, 400}),
    "space before colon": (GET + b"X : a\r\nConnection: close\r\n\r\n", {400}),
    "bare LF": (GET.replace(b"\r\n", b"\n") + b"Connection: close\n\n", {200, 400}),
    "body of no JSON": (HEAD + b"Connection: close\r\nContent-Length: 3\r\n\r\n{{{", {400}),
    "invalid UTF-8": (
        HEAD + b'Connection: close\r\nContent-Length: 15\r\n\r\n{"prompt":"\xff\xfe"}',
        {400},
    ),
    "deep JSON": (
        HEAD + b"Connection: close\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
        {400},
    ),
    "50 MB": (HEAD + b"Content-Length: 50000000\r\n\r\n" + b"x" * 50_000_000, {413}),
    "50 MB that do not wait for leave": (
        HEAD + b"Expect: 100-continue\r\nContent-Length: 50000000\r\n\r\n" + b"x" * 50_000_000,
        {413},
    ),
    "50 MB that wait for leave": (
        HEAD + b"Expect: 100-continue\r\nContent-Length: 50000000\r\n\r\n",
        {413},
    ),
    "50 MB in chunks": (
        HEAD + CHUNKED + b"\r\n" + b"10000\r\n%s\r\n" % (b"x" * 65536) * 763,
        {413},
    ),
    "upgrade": (
        GET
        + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
        {200, 400},
    ),
    "half a head": (GET[:20], {408}),
    "half a body": (HEAD + LENGTH + b"\r\n" + BODY[:5], {408}),
    "half a chunk": (HEAD + CHUNKED + b"\r\n20\r\nab", {408}),
    "line breaks only": (b"\r\n" * 10, {0, 408}),
    "nothing": (b"", {0}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_request(server: LiveServer, name: str) -> None:
    content, expected = HOSTILE[name]
    began = time.monotonic()
    answer = exchange(server, content)
    assert status(answer) in expected, answer[:300]
    assert time.monotonic() - began < RECEIVE_SECONDS + 8
    if status(answer) >= 400:
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["error"]["message"] and "code" in body["error"]


def test_what_is_refused_before_it_is_read_has_the_shape_of_its_path(server: LiveServer) -> None:
    head = b"POST /v1/messages?a=b HTTP/1.1\r\nHost: localhost\r\n"
    answer = exchange(server, head + b"X: " + b"a" * 100_000 + b"\r\n\r\n")
    assert status(answer) == 431
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["type"] == "error" and body["error"]["message"]


def test_a_head_and_a_body_that_trickle_are_ended(server: LiveServer) -> None:
    for start in (GET, HEAD + LENGTH + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=15) as connection:
            connection.sendall(start)
            began, answer = time.monotonic(), b""
            connection.settimeout(0.2)
            while time.monotonic() - began < 10:
                try:
                    connection.sendall(b"a")
                    answer += connection.recv(1000)
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            assert time.monotonic() - began < RECEIVE_SECONDS + 2
            assert status(answer) in (0, 408)


def test_requests_in_one_packet_are_answered_in_order(server: LiveServer) -> None:
    first = HEAD + LENGTH + b"\r\n" + BODY
    answer = exchange(server, first + GET + b"\r\n" + GET + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"text_completion") < answer.index(b'{"status":"ok"}')


def test_connections_beyond_the_most_are_refused(server: LiveServer) -> None:
    open_ones = []
    try:
        for _ in range(64):
            open_ones.append(socket.create_connection(("127.0.0.1", server.port)))
        answers = [exchange(server, GET + b"Connection: close\r\n\r\n") for _ in range(3)]
        assert [status(answer) for answer in answers] == [503] * 3
    finally:
        for connection in open_ones:
            connection.close()
    wait_until(lambda: status(exchange(server, GET + b"Connection: close\r\n\r\n")) == 200)


def test_a_reader_who_does_not_read_is_left(server: LiveServer) -> None:
    """Its requests end, and what they held is free."""
    body = json.dumps(
        {"prompt": "a", "max_tokens": 1800, "ignore_eos": True, "stream": True}
        | {"logprobs": 20, "temperature": 1, "n": 1}
    ).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: metric(server, 'srt_requests_total{outcome="disconnected"') > 0, 60)
    wait_until(lambda: metric(server, "srt_num_requests_running") == 0)


def metric(server: LiveServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def mutate(rng: random.Random, content: bytes) -> bytes:
    """A request with some bytes changed, taken out, doubled or cut off."""
    result = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(result)) if result else 0
        match rng.randrange(5):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del result[at : at + rng.randrange(1, 8)]
            case 2:
                result[at:at] = result[at : at + rng.randrange(1, 30)]
            case 3:
                result[at:at] = rng.choice(
                    [b"\r\n", b"\0", b"\n", b": ", b"\xff", b"\r\n\r\n", b"0"]
                )
            case _:
                del result[at:]
    return bytes(result)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_requests(server: LiveServer, count: int) -> None:
    before = generate(server)
    rng = random.Random(16)
    seeds = [GET + b"\r\n", HEAD + LENGTH + b"\r\n" + BODY]
    seeds.append(
        HEAD + CHUNKED + b"\r\n10\r\n" + BODY[:16] + b"\r\n10\r\n" + BODY[16:] + b"\r\n0\r\n\r\n"
    )
    if count > 100:
        generate(server)
    used = memory(server)
    for _ in range(count):
        content = mutate(rng, rng.choice(seeds))
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := connection.recv(1 << 16):
                    answer += part
            except ConnectionResetError:
                pass
        codes = [
            int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line[:9] == b"HTTP/1.1 "
        ]
        assert not [code for code in codes if code >= 500 and code != 505], (content, answer[:500])
    assert generate(server) == before
    wait_until(lambda: memory(server) < used + (30 << 20))


def test_the_server_answers_as_before_and_holds_no_more(server: LiveServer) -> None:
    before, used = generate(server), memory(server)
    for _ in range(3):
        for name in ("many headers", "header without end", "50 MB in chunks", "deep JSON"):
            exchange(server, HOSTILE[name][0])
    assert generate(server) == before
    wait_until(lambda: memory(server) < used + (30 << 20))
    assert server.process.poll() is None
    assert not [line for line in server.lines if "Traceback" in line]
