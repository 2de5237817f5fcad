"""Chat templates, rendered where they can do no harm.

A template is a program of the checkpoint's author: it may loop for ever or build gigabytes. It runs
in a process of its own (`srt.managers.template_worker`) with a limit on processor time, memory and
output; the process is started by the first conversation and leaves when idle.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.errors import RequestError

# Processor time of one rendering: a conversation of a million tokens takes a twentieth of it.
MAX_SECONDS = 2.0
# Longest wait for a rendering, on a machine that has no time for it.
_PATIENCE_SECONDS = 60.0
MAX_BYTES = 512 << 20
# Characters that a template may write: of its own, and for each character of what it is given.
_OWN_CHARACTERS = 1_000_000
_CHARACTERS_PER_CHARACTER = 8

_PROBLEMS = {
    "refused": "the chat template refuses the messages: {}",
    "syntax": "the chat template cannot be read: {}",
    "failed": "the chat template fails on the messages: {}",
    "long": "the chat template writes {} for these messages",
    "memory": "the chat template takes {} for these messages",
}


class TemplateFailedError(RequestError):
    """A template does with a conversation what it cannot, such as adding a text to an object."""


class TemplateRenderer:
    """Renders templates, one at a time, in one process that it starts when there is work.

    Any thread may use it. After a fork the child has a process of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that `template` makes of `variables`, which JSON can hold.

        Raises:
            RequestError: The template refuses, fails, or does not end within its limits.
        """
        given = _encode(variables)
        limit = _OWN_CHARACTERS + _CHARACTERS_PER_CHARACTER * len(given)
        head = _encode({"template": template, "max_characters": limit})
        # Both are objects; joined they are one.
        request = head[:-1] + b', "variables": ' + given + b"}"
        with self._lock:
            try:
                reply = self._ask(request)
            except BaseException:
                self._stop()
                raise
            if reply.get("problem") == "memory":
                self._stop()
        problem = reply.get("problem")
        if problem is not None:
            message = " ".join(reply["message"].split())
            kind = TemplateFailedError if problem == "failed" else RequestError
            raise kind(_PROBLEMS[problem].format(message))
        return reply["text"]

    def close(self) -> None:
        """Ends the process, if there is one; the next call starts another."""
        with self._lock:
            self._stop()

    def _ask(self, request: bytes) -> dict[str, str]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for is_last in (False, True):
            process = self._running()
            try:
                _write(process, len(request).to_bytes(8, "little") + request, deadline)
                size = int.from_bytes(_read(process, 8, deadline), "little")
                content = _read(process, size, deadline)
                break
            except (EOFError, BrokenPipeError):
                status = process.wait()
                # 0: it was leaving, after a time without work, when the request came.
                if status != 0 or is_last:
                    raise RequestError(_explain_end(status)) from None
        reply: dict[str, str] = json.loads(content.decode("utf-8", "surrogatepass"))
        return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = _start()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _forget(self) -> None:
        """In a forked child: the process, and perhaps the lock, are the parent's."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # not ours to wait for


@functools.cache
def get_renderer() -> TemplateRenderer:
    """The one of this process."""
    import atexit

    renderer = TemplateRenderer()
    atexit.register(renderer.close)
    return renderer


def _start() -> subprocess.Popen[bytes]:
    import jinja2
    import markupsafe

    modules = (jinja2.__file__, markupsafe.__file__)
    paths = dict.fromkeys(str(Path(str(file)).parents[1]) for file in modules)
    worker = Path(__file__).with_name("template_worker.py")
    command = [sys.executable, "-I", "-S", str(worker), *paths, str(MAX_SECONDS), str(MAX_BYTES)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for us
        )
    except OSError as error:
        raise RequestError(
            f"no process can be started to render the chat template: {error}"
        ) from error


def _encode(value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, default=_placeholder)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages hold what JSON cannot: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def _placeholder(value: object) -> object:
    """What transformers shows a template instead of an object: its type, and nothing to call."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _write(process: subprocess.Popen[bytes], content: bytes, deadline: float) -> None:
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    os.set_blocking(descriptor, False)
    view = memoryview(content)
    while view:
        _wait(deadline, write=descriptor)
        view = view[os.write(descriptor, view[: 1 << 16]) :]


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    content = bytearray()
    while len(content) < size:
        _wait(deadline, read=descriptor)
        part = os.read(descriptor, min(size - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


def _wait(deadline: float, *, read: int | None = None, write: int | None = None) -> None:
    poll = select.poll()
    if read is not None:
        poll.register(read, select.POLLIN)
    if write is not None:
        poll.register(write, select.POLLOUT)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise RequestError(f"the chat template has not ended after {_PATIENCE_SECONDS:.0f} seconds")


def _explain_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return (
            f"the chat template takes more than {MAX_SECONDS:.0f} seconds of processor time for "
            "these messages"
        )
    if status < 0:
        return f"the chat template ended the process that renders it (signal {-status})"
    return f"the process that renders the chat template ended with status {status}"
