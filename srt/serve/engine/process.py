"""The engine's process: an :class:`srt.Engine` that takes requests from a socket between passes.

One thread does all. It never waits for the server: what the socket cannot take yet is kept, and
sent after a later pass.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from srt.errors import SrtError
from srt.serve.engine.protocol import (
    EngineFacts,
    EngineStats,
    Frame,
    FrameReader,
    TokenIdArray,
    encode_chunk,
    encode_frame,
)

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 20
# Statistics go with a step when so much time has passed since the last.
_STATS_SECONDS = 0.2


class Channel:
    """Frames over a socket, without waiting to send.

    Raises:
        EOFError: The other end has gone; from any method.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._unsent = bytearray()

    def receive(self, *, wait: bool) -> list[Frame]:
        """What has come; with `wait` at least one frame, while sending what is unsent."""
        frames: list[Frame] = []
        while True:
            try:
                content = self._socket.recv(_RECEIVE_BYTES)
                if not content:
                    raise EOFError
                frames += self._reader.feed(content)
            except BlockingIOError:
                if frames or not wait:
                    return frames
                writable = [self._socket] if self._unsent else []
                select.select([self._socket], writable, [])
                self.flush()
            except ConnectionError as error:
                raise EOFError from error

    def send(self, message: dict[str, Any], ids: TokenIdArray | None = None) -> None:
        """Sends a frame, now or later."""
        self._unsent += encode_frame(message, ids)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError from error

    def close(self) -> None:
        """Sends the rest, waiting for it, and ends the connection."""
        self._socket.setblocking(True)
        self.flush()
        self._socket.close()


class EngineLoop:
    """Runs an engine for the other end of a channel.

    Args:
        engine: The engine.
        channel: Where requests come from and chunks go.
    """

    def __init__(self, engine: "Engine", channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._arrived: dict[str, float] = {}
        self._queued: dict[str, float] = {}
        self._told = 0.0

    def run(self) -> None:
        """Serves until the other end goes.

        Raises:
            EOFError: It has gone.
        """
        engine = self._engine
        was_busy = True
        while True:
            is_busy = engine.has_work
            if was_busy and not is_busy:
                self._channel.send({"op": "step", "chunks": [], "stats": self._stats()})
            was_busy = is_busy
            for message, ids in self._channel.receive(wait=not is_busy):
                self._take(message, ids)
            if engine.has_work:
                self._step()

    def _take(self, message: dict[str, Any], ids: TokenIdArray) -> None:
        if message["op"] == "abort":
            for rid in message["rids"]:
                self._engine.abort(rid)
            return
        rid = message["rid"]
        self._arrived[rid] = time.perf_counter()
        try:
            # The server has checked the grammar; to do so here would keep others waiting.
            self._engine.add_request(
                rid, input_ids=ids, sampling_params=message["params"], check_grammar=False
            )
        except SrtError as error:
            del self._arrived[rid]
            self._channel.send({"op": "refused", "rid": rid, "error": str(error)})

    def _step(self) -> None:
        chunks = self._engine.step()
        now = time.perf_counter()
        admitted = [str(rid) for rid in self._engine.scheduler.admitted]
        for rid in admitted:
            if rid in self._arrived:
                self._queued[rid] = now - self._arrived.pop(rid)
        lines = []
        for chunk in chunks:
            rid = str(chunk.rid)
            queued = self._queued.get(rid, 0.0)
            if chunk.output is not None:
                self._queued.pop(rid, None)
                queued = queued or now - self._arrived.pop(rid, now)
            lines.append(encode_chunk(chunk, queued))
        message: dict[str, Any] = {"op": "step", "chunks": lines}
        if admitted:
            message["admitted"] = admitted
        if now - self._told >= _STATS_SECONDS:
            self._told, message["stats"] = now, self._stats()
        if len(message) > 2 or lines:
            self._channel.send(message)
        else:
            self._channel.flush()

    def _stats(self) -> dict[str, Any]:
        scheduler = self._engine.scheduler
        kv = scheduler.kv
        return asdict(
            EngineStats(
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                kv_tokens=kv.size,
                kv_used_tokens=kv.size - kv.available_size,
                kv_cached_tokens=kv.cached_size,
                retractions=scheduler.num_retractions,
                work=scheduler.work,
            )
        )


def main(descriptor: int, parent: int) -> int:
    """Serves the server at the other end of a socket; returns the exit status.

    Args:
        descriptor: The socket's, inherited.
        parent: The server's process; this one ends with it.
    """
    started = time.perf_counter()
    # Ctrl-C in a terminal reaches all its processes, and to end is the server's to say.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        (message, _), *_ = channel.receive(wait=True)
        try:
            engine = _load(message["config"])
        except SrtError as error:
            channel.send({"op": "failed", "error": str(error)})
            channel.close()
            return 2
        channel.send({"op": "ready", "facts": asdict(_facts(engine, started))})
        EngineLoop(engine, channel).run()
    except EOFError:
        return 0
    return 1


def _load(options: dict[str, Any]) -> "Engine":
    from srt.utils.kernels import load_kernels

    load_kernels()
    from srt.entrypoints.engine import Engine

    return Engine(**options)


def _facts(engine: "Engine", started: float) -> EngineFacts:
    import torch

    import sgl_kernel

    config, runner = engine.model_config, engine.model_runner
    return EngineFacts(
        pid=os.getpid(),
        architecture=config.architecture,
        dtype=str(config.dtype).removeprefix("torch."),
        kv_cache_dtype=str(runner.kv_pool.k_buffer[0].dtype).removeprefix("torch."),
        tier=sgl_kernel.cpu_info()["tier"],
        threads=torch.get_num_threads(),
        kv_tokens=runner.allocator.size,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        max_running_requests=engine.config.max_running_requests,
        load_seconds=time.perf_counter() - started,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
