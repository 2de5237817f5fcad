"""From token ids to text while it is being generated."""

from collections.abc import Sequence
from typing import Any

# Prompt tokens decoded along with the output, so that a tokenizer that treats the start of a text
# specially sees none.
_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one request, piece by piece.

    A piece never ends in the middle of a UTF-8 character, and never holds the beginning of a stop
    text that may yet be
    completed: such ends wait for the next token. A character that is still incomplete when the
        generation ends is dropped.

    Attributes are replaced, never changed in place: a shallow copy goes its own way.

    Args:
        tokenizer: A transformers tokenizer.
        prompt_ids: The prompt.
        stop: Texts that end the output.

    Attributes:
        text: All text released so far; it ends before a stop text.
        matched_stop: The stop text that was found, or None.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)  # tokens whose text is known
        self._known = self._decode(self._ids)  # text of the window up to there
        self._held = ""  # decoded, but possibly the beginning of a stop text
        self.text = ""
        self.matched_stop: str | None = None

    def append(self, token_id: int) -> str:
        """Takes the next token; returns the text that it releases, often empty."""
        self._ids = [*self._ids, token_id]
        decoded = self._decode(self._ids)
        if decoded.endswith(_REPLACEMENT):
            return ""
        self._held += decoded[len(self._known) :]
        # The window restarts at the last tokens, so that the cost of a token does not grow with the
        # text.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._known = self._decode(self._ids)
        return self._release(self._cut())

    def finish(self) -> str:
        """Ends the text; returns what was still held back."""
        if self.matched_stop is None:
            decoded = self._decode(self._ids).rstrip(_REPLACEMENT)
            self._held += decoded[len(self._known) :]
            self._cut()
            return self._release(len(self._held))
        return ""

    def _cut(self) -> int:
        """How much of the held text may go out. Shortens it to what precedes a stop text that is
        complete.
        """
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            position, self.matched_stop = min(found)
            self._held = self._held[:position]
            return position
        return len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        self.text += released
        return released

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
