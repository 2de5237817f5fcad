"""Where tables are printed."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from srt.control_characters import escape_controls

# Wider than any table: without a terminal nothing has to fit into a line, and what reads the lines
# wants them whole.
_UNLIMITED = 10_000


class _Console(Console):
    """Shows control characters, which names in a checkpoint may hold, as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_controls(text, keep="\n"), **options)


def make_console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; as wide as the terminal, or unlimited where it is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNLIMITED
    return _Console(stderr=stderr, highlight=False, width=width)
