"""Where the messages of `srt chat` come from: a person at a terminal, or the lines of a pipe."""

import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from srt.utils.text_streams import read_stdin_line

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

KEYS = (
    "Enter sends. Alt-Enter (or Esc, then Enter) begins a new line; a pasted block stays one "
    "message. Up, Down and Ctrl-R look through earlier messages. Ctrl-C stops an answer or drops "
    "what is typed, Ctrl-D ends"
)
# What the history file keeps; longer messages are not remembered.
_MAX_ENTRIES = 1000
_MAX_ENTRY_BYTES = 16 << 10


class MessageReader(ABC):
    """Hands out messages one after another."""

    @abstractmethod
    def read(self) -> str | None:
        """The next message, without space around it; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C; what had been typed is dropped.
        """


class LineReader(MessageReader):
    """One message a line of stdin, in UTF-8."""

    def read(self) -> str | None:
        line = read_stdin_line("a line of stdin")
        return line.strip() if line else None


class TerminalReader(MessageReader):
    """Messages typed with line editing and history.

    Args:
        history: File of earlier messages; None keeps them only while the process runs.
    """

    def __init__(self, history: Path | None) -> None:
        self._session = _make_session(history)

    def read(self) -> str | None:
        try:
            return self._session.prompt().strip()
        except EOFError:
            return None


def is_terminal() -> bool:
    """Whether a person types messages and sees what is typed."""
    streams = (sys.stdout, sys.stderr)
    return (
        sys.stdin is not None
        and sys.stdin.isatty()
        and any(stream is not None and stream.isatty() for stream in streams)
    )


def history_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of earlier messages, in the user's directory for state (XDG); None if there is no
    home directory.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # so says the specification
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        state = os.path.join(home, ".local", "state")
    return Path(state, "srt", "chat_history")


def open_history(file: Path | None) -> "History":
    """The history in `file`, which only its owner can read, cut to the newest entries; in memory
    if it cannot be written.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def store_string(self, string: str) -> None:
            if _is_kept(string):
                super().store_string(string)

    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not through a link: it would be written where it points to.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        os.close(os.open(file, flags, 0o600))
        file.chmod(0o600)
        history = PrivateHistory(str(file))
        entries = list(history.load_history_strings())  # the newest first
        if len(entries) > _MAX_ENTRIES:
            _rewrite(file, PrivateHistory, reversed(entries[:_MAX_ENTRIES]))
    except OSError as error:
        print(f"messages are not remembered: {error}", file=sys.stderr)
        return InMemoryHistory()
    return history


def _is_kept(message: str) -> bool:
    try:
        return len(message.encode("utf-8")) <= _MAX_ENTRY_BYTES
    except UnicodeEncodeError:
        return False


def _rewrite(file: Path, kind: "type[History]", entries: Iterable[str]) -> None:
    """Replaces the file at once by one with these entries, the newest last."""
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # mode 0600
    os.close(descriptor)
    try:
        history = kind(name)  # type: ignore[call-arg]
        for entry in entries:
            history.store_string(entry)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _make_session(history: Path | None) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=~is_searching)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        "> ",
        history=open_history(history),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        # Where answers go to a file, the prompt is shown on stderr. Otherwise nothing is said, so
        # that a dumb terminal gets no control sequences.
        output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
    )
