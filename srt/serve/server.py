"""A server from its start to its end."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from srt.configs.engine_config import EngineConfig
from srt.entrypoints.model_files import ModelFiles
from srt.errors import SrtError
from srt.managers.special_tokens import added_token_texts, special_token_texts
from srt.serve.app import make_app
from srt.serve.config import ServerConfig
from srt.serve.engine.client import EngineClient
from srt.serve.engine.protocol import EngineFacts
from srt.serve.logs import server_log
from srt.serve.metrics import ServerMetrics
from srt.serve.middleware.auth import load_keys
from srt.serve.middleware.connections import BoundedProtocol, ConnectionLimits
from srt.serve.middleware.origins import is_loopback
from srt.serve.middleware.stack import protect
from srt.serve.parsers.choice import AnswerParsers
from srt.serve.state import ServerState

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 128
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds for answers to be written once their requests have ended.
_FLUSH_SECONDS = 5


def run_server(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serves until a signal comes; returns the exit status, 128 and its number.

    Raises:
        SrtError: The address, the certificate or the model cannot be used.
    """
    metrics = ServerMetrics()
    with server_log(config.log_format, metrics.dropped_log_lines.inc):
        keys = load_keys(config, os.environ)
        if not keys and not is_loopback(config.host):
            logger.warning("no API key is set: all who reach %s may use the model", config.host)
        _check_certificate(config)
        _allow_connections(config.max_connections)
        with _listen(config) as listening:
            server = _Server(config, engine_config, listening, keys, metrics)
            return uvloop.run(server.run())


class _Server:
    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        listening: socket.socket,
        keys: tuple[str, ...],
        metrics: ServerMetrics,
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        self._config = config
        self._engine_config = engine_config
        self._listening = listening
        self._signal: asyncio.Future[int] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        for signum in _ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        engine = EngineClient(
            self._engine_config,
            max_queued_requests=self._config.max_queued_requests,
            request_timeout=self._config.request_timeout,
            metrics=self._metrics,
        )
        starting = asyncio.ensure_future(self._start(engine))
        try:
            await _first(starting, self._signal)
            if self._signal.done():
                return 128 + self._signal.result()
            state, facts = starting.result()
            return await self._serve(state, facts)
        finally:
            starting.cancel()
            await engine.close()

    async def _start(self, engine: EngineClient) -> tuple[ServerState, EngineFacts]:
        """Both processes read the checkpoint at the same time."""
        load = asyncio.to_thread(ModelFiles.load, self._engine_config)
        loading, starting = asyncio.ensure_future(load), asyncio.ensure_future(engine.start())
        both = (loading, starting)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            # What is wrong with the checkpoint's files both find.
            files, facts = await loading, await starting
        finally:
            starting.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        config = self._config
        names = config.served_model_name or (Path(self._engine_config.model_path).name,)
        return ServerState(
            config=config,
            engine_config=self._engine_config,
            files=files,
            parsers=_make_parsers(files, config),
            engine=engine,
            model_names=tuple(names),
            started_at=int(time.time()),
            metrics=self._metrics,
        ), facts

    async def _serve(self, state: ServerState, facts: EngineFacts) -> int:
        assert self._signal is not None
        config = self._config
        limits = ConnectionLimits(
            max_connections=config.max_connections,
            receive_timeout=config.receive_timeout,
            send_timeout=config.send_timeout,
            on_refused=self._metrics.count_refused,
        )
        app = protect(make_app(state), config, self._keys, self._metrics, state.model_name)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=partial(BoundedProtocol, limits=limits),  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=config.keep_alive_timeout,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                lifespan="off",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        # Signals are ours: see _on_signal.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.ensure_future(server.serve(sockets=[self._listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        print(self._describe(state, facts), flush=True)
        await _first(serving, self._signal)
        if not self._signal.done():
            serving.result()
            raise SrtError("the HTTP server has ended by itself")
        await self._drain(state)
        server.should_exit = True
        await serving
        return 128 + self._signal.result()

    async def _drain(self, state: ServerState) -> None:
        """Lets running requests end, but for those that take too long."""
        state.is_draining = True
        timeout = self._config.drain_timeout
        engine = state.engine
        if engine.num_open:
            logger.warning("waiting up to %g s for %d requests", timeout, engine.num_open)
        deadline = time.monotonic() + timeout
        while engine.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await engine.close()

    def _on_signal(self, signum: int) -> None:
        assert self._signal is not None
        if self._signal.done():
            os._exit(128 + signum)  # the engine's process ends with this one
        self._signal.set_result(signum)

    def _describe(self, state: ServerState, facts: EngineFacts) -> str:
        host, port, *_ = self._listening.getsockname()
        host = f"[{host}]" if ":" in host else host
        threads = "1 thread" if facts.threads == 1 else f"{facts.threads} threads"
        scheme = "https" if self._config.ssl_certfile else "http"
        return (
            f"srt: serving {state.model_name} at {scheme}://{host}:{port} ({facts.architecture}, "
            f"{facts.dtype}, {facts.tier}, {threads}, "
            f"{facts.kv_tokens:,} KV tokens)"
        )


def _make_parsers(files: ModelFiles, config: ServerConfig) -> AnswerParsers:
    tokenizer = files.tokenizer
    template = "" if tokenizer is None else tokenizer.chat_template
    special = {} if tokenizer is None else special_token_texts(tokenizer)
    added = {} if tokenizer is None else added_token_texts(tokenizer)
    parsers = AnswerParsers(
        template if isinstance(template, str) else "",
        config.tool_call_parser,
        config.reasoning_parser,
        {text: token for token, text in special.items()},
        {text: token for token, text in added.items()},
    )
    if parsers.tool_call_parser is not None and not parsers.shows_tools:
        logger.warning(
            "--tool-call-parser %s: the chat template shows the model no tools; conversations have "
            "to say themselves which there are",
            config.tool_call_parser,
        )
    return parsers


async def _first(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _allow_connections(count: int) -> None:
    """Raises this process's limit of open files, if that is what would limit connections."""
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning(
                "%d connections need %d open files, of which the system allows %d",
                count,
                needed,
                allowed,
            )


@contextlib.contextmanager
def _listen(config: ServerConfig) -> Iterator[socket.socket]:
    where = f"{config.host} port {config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason = "another process listens there (--port 0 takes a free port)"
        raise SrtError(f"cannot listen at {where}: {reason}") from error
    with listening:
        yield listening


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(str(f) for f in (config.ssl_certfile, config.ssl_keyfile) if f)
        raise SrtError(f"the certificate in {files} cannot be used: {error}") from error
