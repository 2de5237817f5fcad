"""The log of a server: lines of text or of JSON that never make it wait.

What a line is written to may be full, closed, or a pipe that nobody reads. So a thread of its own
writes, and what it cannot keep up with is dropped and counted.
"""

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from srt.control_characters import escape_controls

_MAX_UNWRITTEN = 10_000
# For what is unwritten at the end.
_SECONDS_TO_END = 1.0
FIELDS = "fields"
"""The attribute of a record with further values by name."""


class TextFormatter(logging.Formatter):
    """Time, level and message, then `name=value`, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        text = f"{moment} {record.levelname} {record.name}: {record.getMessage()}"
        for name, value in getattr(record, FIELDS, {}).items():
            if value is not None:
                text += f" {name}={_show(value)}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return escape_controls(text, keep="\n\t" if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        body |= getattr(record, FIELDS, {})
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    text = str(value)
    return json.dumps(text) if not text or " " in text or '"' in text else text


class LogWriter(logging.Handler):
    """Writes lines to stderr from a thread.

    Args:
        on_dropped: Called for each line that is lost, from any thread.
    """

    def __init__(self, on_dropped: Callable[[], None]) -> None:
        super().__init__()
        self._on_dropped = on_dropped
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(_MAX_UNWRITTEN)
        self._thread = threading.Thread(target=self._write, name="srt log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._on_dropped()

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=_SECONDS_TO_END)
            self._thread.join(_SECONDS_TO_END)
        super().close()

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
            except Exception:  # noqa: BLE001 - there is nowhere to say what is wrong with the log
                self._on_dropped()


@contextlib.contextmanager
def server_log(format: str, on_dropped: Callable[[], None]) -> Iterator[None]:
    """Logs of this process go through a :class:`LogWriter` within.

    Args:
        format: `text` or `json`.
        on_dropped: See there.
    """
    root, own = logging.getLogger(), logging.getLogger("srt.serve")
    # That a client sent no HTTP is counted, and no line of uvicorn's says more than ours.
    others = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error")]
    writer = LogWriter(on_dropped)
    writer.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    before = root.handlers[:], own.level, [other.level for other in others]
    root.handlers[:] = [writer]
    own.setLevel(logging.INFO)
    for other in others:
        other.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.handlers[:], own_level, levels = before
        own.setLevel(own_level)
        for other, level in zip(others, levels, strict=True):
            other.setLevel(level)
        writer.close()
