"""`srt serve` as a process: how it starts, what stops it, and what it leaves behind."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import ROOT, LiveServer, start_server, wait_until
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint

register_cpu_ci(est_time=60, suite="per-commit")

# Without a tokenizer: prompts are token ids.
PROMPT: dict[str, Any] = {"prompt": [1, 5, 9], "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "tiny"
    return write_checkpoint(path, TINY_CONFIG, make_tensors(TINY_CONFIG))


def run_to_its_end(*options: str) -> tuple[int, str]:
    """Status and stderr of a server that does not start."""
    command = [sys.executable, "-m", "srt", "serve", "--quiet", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.returncode, done.stderr


def complete(server: LiveServer, **fields: Any) -> httpx.Response:
    body = PROMPT | {"max_tokens": 8} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


class Reader(threading.Thread):
    """Reads a stream in the background.

    Attributes:
        lines: What came.
        problem: How the connection failed, or None.
    """

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.problem: Exception | None = None
        self._url = f"{server.url}/v1/completions"
        self._body = PROMPT | {"stream": True, "logprobs": 0} | fields
        self.start()
        wait_until(lambda: self.lines or self.problem)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.problem = error

    def tokens(self) -> int:
        """Tokens that came."""
        chunks = [json.loads(line) for line in self.lines if line != "[DONE]"]
        return sum(bool(c.get("choices")) and not c["choices"][0]["finish_reason"] for c in chunks)


def test_the_last_line_of_the_start_says_where_and_what(model: Path) -> None:
    server = start_server(model, "--served-model-name", "tiny", "--threads", "1")
    try:
        line = server.lines[-1]
        assert line.startswith(f"srt: serving tiny at http://127.0.0.1:{server.port} (")
        for word in ("LlamaForCausalLM", "float16", "1 thread,", "KV tokens"):
            assert word in line
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert httpx.get(f"{server.url}/ready").status_code == 200
        facts = httpx.get(f"{server.url}/version").json()
        assert facts["model"] == "tiny"
        assert facts["tier"] in line
        assert complete(server).status_code == 200
        # Another one finds the port taken, before it reads the model.
        status, error = run_to_its_end("--model", str(model), "--port", str(server.port))
        assert status == 2
        assert f"port {server.port}: another process listens there" in error
        assert len(error.splitlines()) == 1
        # A model whose directory goes away is served on.
        hidden = model.with_name("hidden")
        model.rename(hidden)
        try:
            assert complete(server, max_tokens=9).json()["usage"]["completion_tokens"] == 9
        finally:
            hidden.rename(model)
    finally:
        assert server.stop() == 143


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-certfile", "README.md"], "the certificate in README.md cannot be used"),
        (["--ssl-certfile", "/nosuch.pem"], "cannot be used: .*No such file"),
        (["--ssl-keyfile", "x.pem"], "--ssl-keyfile: expected .*found 'x.pem'"),
        (["--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid port"),
        (["--port", "99999"], "--port: expected at most 65535, found 99999"),
        (["--drain-timeout", "-1"], "--drain-timeout: expected a number of seconds above 0"),
        (["--tool-call-parser", "nosuch"], "--tool-call-parser"),
    ],
)
def test_what_can_be_put_right_is_one_line_before_the_model_is_read(
    options: list[str], message: str
) -> None:
    if "--port" not in options:
        options = [*options, "--port", "0"]
    status, error = run_to_its_end("--model", "/nosuch", *options)
    assert status == 2
    assert re.search(message, error.splitlines()[-1])


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    status, error = run_to_its_end("--model", str(tmp_path), "--port", "0")
    assert (status, len(error.splitlines())) == (2, 1)
    assert "config.json" in error


def test_sigterm_lets_running_requests_end_and_takes_no_more(model: Path) -> None:
    server = start_server(model, "--threads", "1", "--drain-timeout", "60")
    reader = Reader(server, max_tokens=240)
    server.process.send_signal(signal.SIGTERM)
    ready = wait_until_not_ready(server)
    assert ready == "draining"
    assert complete(server).status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.process.wait(60) == 143
    reader.join(10)
    assert reader.problem is None
    assert reader.lines[-1] == "[DONE]"
    assert json.loads(reader.lines[-2])["choices"][0]["finish_reason"] == "length"


def wait_until_not_ready(server: LiveServer) -> str:
    answers: list[str] = []

    def is_draining() -> bool:
        answer = httpx.get(f"{server.url}/ready")
        answers.append(answer.json()["status"])
        return answer.status_code == 503

    wait_until(is_draining)
    return answers[-1]


def test_what_outlives_the_drain_gets_an_error_and_the_process_ends(model: Path) -> None:
    server = start_server(model, "--threads", "1", "--drain-timeout", "0.05")
    readers = [Reader(server, max_tokens=240) for _ in range(3)]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 143
    for reader in readers:
        reader.join(10)
        assert reader.problem is None
        assert reader.lines[-1] == "[DONE]"
        last = json.loads(reader.lines[-2])
        assert "choices" in last or last["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_at_once_with_the_engine(model: Path) -> None:
    server = start_server(model, "--threads", "1", "--drain-timeout", "600")
    reader = Reader(server, max_tokens=240, n=16)
    children = subprocess.run(
        ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert children
    server.process.send_signal(signal.SIGINT)
    wait_until_not_ready(server)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 130
    reader.join(10)
    for child in children:
        wait_until(lambda pid=int(child): not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_killed_engine_is_an_error_event_and_then_it_is_back(model: Path) -> None:
    server = start_server(model, "--threads", "1")
    try:
        expected = complete(server).json()["choices"]
        reader = Reader(server, max_tokens=240)
        (child,) = subprocess.run(
            ["pgrep", "-f", f"sys.exit.main.* {server.process.pid} "],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        os.kill(int(child), signal.SIGKILL)
        reader.join(20)
        assert reader.problem is None
        assert json.loads(reader.lines[-2])["error"]["code"] == "engine_died"
        answer = complete(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
        assert int(answer.headers["Retry-After"]) > 0
        assert httpx.get(f"{server.url}/ready").json()["status"] == "restarting"
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
        assert complete(server).json()["choices"] == expected
    finally:
        assert server.stop() == 143


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return key, cert


def test_https_and_a_full_disk_for_the_log(model: Path, certificate: tuple[Path, Path]) -> None:
    """Nobody's request fails because nobody can write it down."""
    key, cert = certificate
    command = [sys.executable, "-m", "srt", "serve", "--model", str(model), "--quiet"]
    command += ["--port", "0", "--threads", "1", "--log-requests"]
    command += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json=PROMPT, verify=context, timeout=60)
            assert answer.status_code == 200
        # What speaks no TLS gets nothing, and does no harm.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 5) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" not in plain.recv(1000)
        assert httpx.get(f"{url}/health", verify=context).status_code == 200
    finally:
        process.terminate()
        assert process.wait(30) == 143
