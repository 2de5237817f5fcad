"""A text that is still being written, for parsers that are written as if it were whole.

A parser is a generator. Where it must know more to decide, it yields, and goes on when there is
more; so what it makes of a text cannot depend on where the text was cut.
"""

import json
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""A generator that yields to wait for text, and returns something."""

Emit = Callable[[str], object]


class TextReader:
    """Text that has come and has not been taken.

    Attributes:
        text: It.
        taken: All that was taken since :meth:`mark`, which is called wherever none of it will be
            asked for, so that a long answer is not kept.
    """

    def __init__(self) -> None:
        self.text = ""
        self.taken = ""
        self._is_complete = False

    def feed(self, text: str) -> None:
        """Adds what was written next."""
        self.text += text

    def complete(self) -> None:
        """Says that nothing comes any more."""
        self._is_complete = True

    def mark(self) -> None:
        """Begins to remember what is taken."""
        self.taken = ""

    def take(self, count: int) -> str:
        """The next characters."""
        part, self.text = self.text[:count], self.text[count:]
        self.taken += part
        return part

    def more(self) -> Waiting[bool]:
        """Waits for more text; false if there is none."""
        length = len(self.text)
        while len(self.text) == length:
            if self._is_complete:
                return False
            yield
        return True

    def skip_space(self) -> Waiting[str]:
        """Takes white space, and returns it."""
        space = ""
        while True:
            rest = self.text.lstrip()
            space += self.take(len(self.text) - len(rest))
            if rest or not (yield from self.more()):
                return space

    def starts_with(self, options: Sequence[str]) -> Waiting[str | None]:
        """Which of some texts comes next, the longest if several do; nothing is taken."""
        while True:
            if any(len(o) > len(self.text) and o.startswith(self.text) for o in options) and (
                yield from self.more()
            ):
                continue
            return max((o for o in options if self.text.startswith(o)), key=len, default=None)

    def literal(self, text: str) -> Waiting[bool]:
        """Takes a text if it comes next."""
        if (yield from self.starts_with((text,))) is None:
            return False
        self.take(len(text))
        return True

    def until(self, markers: Sequence[str], emit: Emit) -> Waiting[str | None]:
        """Takes the text before the first of some markers, and that marker, which is returned; None
        if there is none. White space before a marker is held back until the marker is known: it
        goes to `emit` with a separate call.
        """
        while True:
            found = [(at, -len(m), m) for m in markers if (at := self.text.find(m)) >= 0]
            if found:
                at, _, marker = min(found)
                # A longer marker may begin at the same place and not be complete.
                longer = [m for m in markers if len(m) > len(marker) and m.startswith(marker)]
                if longer and any(m.startswith(self.text[at:]) for m in longer):
                    yield from self.more()
                    longer = [m for m in longer if self.text.startswith(m, at)]
                    marker = max(longer, key=len, default=marker)
                _emit_split(self.take(at), emit)
                self.take(len(marker))
                return marker
            held = max((_overlap(self.text, marker) for marker in markers), default=0)
            body = self.text[: len(self.text) - held].rstrip()
            if body:
                emit(self.take(len(body)))
            if not (yield from self.more()):
                _emit_split(self.take(len(self.text)), emit)
                return None

    def json_string(self) -> Waiting[str | None]:
        """Takes a string of JSON; None, and what was taken is gone, if there is none."""
        raw: list[str] = []
        if not self.text and not (yield from self.more()):
            return None
        if self.text[0] != '"' or not (yield from self.json_value(raw.append)):
            return None
        try:
            value = json.loads("".join(raw))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def json_value(self, emit: Emit) -> Waiting[bool]:
        """Takes a value of JSON, as it comes; false if the text ends within it. Only brackets and
        strings are looked at: whether the rest is right is for whoever reads it.
        """
        depth, in_string, escaped, is_scalar = 0, False, False, True
        started = False
        while True:
            for at, character in enumerate(self.text):
                if in_string:
                    if escaped:
                        escaped = False
                    elif character == "\\":
                        escaped = True
                    elif character == '"':
                        in_string = False
                        if depth == 0:
                            emit(self.take(at + 1))
                            return True
                    continue
                if character == '"':
                    in_string, is_scalar = True, False
                elif character in "{[":
                    depth, is_scalar = depth + 1, False
                elif character in "}]" and depth:
                    depth -= 1
                    if depth == 0:
                        emit(self.take(at + 1))
                        return True
                elif is_scalar and (character in ",}]" or (started and character.isspace())):
                    if at:
                        emit(self.take(at))
                    return started or at > 0
                started = True
            if self.text:
                emit(self.take(len(self.text)))
            if not (yield from self.more()):
                return is_scalar and started


def _emit_split(text: str, emit: Emit) -> None:
    """Text, then the white space at its end."""
    body = text.rstrip()
    for part in (body, text[len(body) :]):
        if part:
            emit(part)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
