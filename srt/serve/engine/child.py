"""One process of the engine, from its start to its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from srt.configs.engine_config import EngineConfig
from srt.errors import SrtError
from srt.serve.engine.protocol import (
    EngineFacts,
    FrameReader,
    ProtocolError,
    TokenIdArray,
    encode_frame,
)
from srt.utils.openmp import spin_limit_beside_server

# Finds the same modules as this process does, wherever it was started.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from srt.serve.engine.process import main; sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))"
)
_SECONDS_TO_END = 5.0


class Child(asyncio.Protocol):
    """A process that loads an engine and serves this end of a socket.

    Args:
        config: The engine's options.
        on_message: Called with each message after the engine is ready.
    """

    def __init__(self, config: EngineConfig, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._config = config
        self._on_message = on_message
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        loop = asyncio.get_running_loop()
        self._facts: asyncio.Future[EngineFacts] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._failing: asyncio.Future[None] | None = None

    async def start(self) -> EngineFacts:
        """Starts the process; returns when the model is loaded.

        Raises:
            SrtError: It cannot be loaded, or the process ends while loading.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps([path or os.getcwd() for path in sys.path])],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | spin_limit_beside_server(os.environ),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the server
                )
            except OSError as error:
                ours.close()
                raise SrtError(f"no process can be started for the engine: {error}") from error
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=ours)
        options = {field.name: getattr(self._config, field.name) for field in fields(EngineConfig)}
        options = {name: _as_json(value) for name, value in options.items()}
        self.send({"op": "config", "config": options})
        try:
            return await self._facts
        except BaseException:
            await self.end()
            raise

    def send(self, message: dict[str, Any], ids: TokenIdArray | None = None) -> None:
        """Sends a message; one to a process that has ended is lost with it."""
        assert self._transport is not None
        self._transport.write(encode_frame(message, ids))

    async def ended(self) -> str:
        """Waits for the end of the process; returns how it ended, in words."""
        await self._lost
        return await self.end()

    async def end(self) -> str:
        """Ends the process; returns how it ended, in words."""
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is None:
            return "before it began"
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            # Its end of the socket closes, and that is when it leaves.
            await asyncio.wait_for(_wait(process), _SECONDS_TO_END)
        if process.poll() is None:
            process.kill()
            await _wait(process)
        return _explain(process.returncode)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, content: bytes) -> None:
        try:
            for message, _ in self._reader.feed(content):
                if self._facts.done():
                    self._on_message(message)
                else:
                    self._take_first(message)
        except ProtocolError:
            # Nothing that it says can be believed any more.
            assert self._process is not None
            self._process.kill()
            raise

    def connection_lost(self, error: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        if not self._facts.done():
            assert self._process is not None
            self._failing = asyncio.ensure_future(self._fail_start())

    async def _fail_start(self) -> None:
        how = await self.end()
        if not self._facts.done():
            self._facts.set_exception(
                SrtError(f"the engine's process ended {how} while it loaded the model")
            )

    def _take_first(self, message: dict[str, Any]) -> None:
        if message["op"] == "ready":
            self._facts.set_result(EngineFacts(**message["facts"]))
        else:
            self._facts.set_exception(SrtError(message["error"]))


async def _wait(process: "subprocess.Popen[bytes]") -> None:
    pause = 0.005
    while process.poll() is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)


def _explain(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, (tuple, range)) else value
