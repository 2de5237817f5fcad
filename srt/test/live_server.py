"""A server on a free port, for tests."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from srt.test.tiny_text_model import write_text_model

_READY = re.compile(r"srt: serving (\S+) at (https?://\S+) \((.*)\)")
_START_SECONDS = 120.0
ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / ".demo" / "SmolLM2-135M-Instruct-FP8"


@dataclass
class LiveServer:
    """A running `srt serve`.

    Attributes:
        process: Its process.
        url: Where it listens, without a path.
        model: The name of its model.
        lines: What it has written to stdout and stderr.
    """

    process: "subprocess.Popen[str]"
    url: str = ""
    model: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])

    def stop(self, seconds: float = 20.0) -> int:
        """Ends it as a service manager does; returns its status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def start_server(model: Path, *options: str, env: "dict[str, str] | None" = None) -> LiveServer:
    """Starts one; returns when it has said that it is ready.

    Raises:
        RuntimeError: It has ended before, with what it wrote.
    """
    command = [sys.executable, "-m", "srt", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--quiet", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=None if env is None else os.environ | env,
    )
    server = LiveServer(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip("\n"))
            match = _READY.match(line)
            if match:
                server.model, server.url = match[1], match[2]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(_START_SECONDS) or not server.url:
        process.kill()
        raise RuntimeError("the server has not started:\n" + "\n".join(server.lines))
    return server


@contextmanager
def live_server(
    model: Path = DEMO_MODEL, options: Sequence[str] = (), env: "dict[str, str] | None" = None
) -> Iterator[LiveServer]:
    """A server of a model, by default the demo model, that is ended afterwards."""
    server = start_server(model, *options, env=env)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def tiny_chat_server(directory: Path, template: str) -> Iterator[LiveServer]:
    """A server of a tiny model with a tokenizer and this chat template, whose calls are Hermes's.

    Args:
        directory: Where the model is written.
        template: The chat template.
    """
    model = write_text_model(directory / "tiny")
    (model / "chat_template.jinja").write_text(template)
    options = ["--max-total-tokens", "4096", "--tool-call-parser", "hermes"]
    with live_server(model, options) as server:
        yield server


def wait_until(condition: "object", seconds: float = 20.0) -> None:
    """Waits until a callable returns something true.

    Raises:
        TimeoutError: It has not in this time.
    """
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} seconds")
        time.sleep(0.01)
