"""From token ids to text while it is being generated."""

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

# Prompt tokens decoded along with the output, so that a tokenizer that treats the start of a text
# specially sees none.
_CONTEXT_TOKENS = 5
# Bytes, and so tokens, of a character that is not complete.
_INCOMPLETE_BYTES = 3
# More tokens whose text ends in U+FFFD are no character.
_PENDING_TOKENS = 8
_WINDOW_TOKENS = 32
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one request, piece by piece. All pieces together are what the tokenizer makes of
    prompt and output, after what it makes of the prompt.

    A piece never ends in the middle of a UTF-8 character, and never holds the beginning of a stop
    text that may yet be completed: such ends wait for the next token. A character that the prompt
    begins and the output completes belongs to the output; one that is still incomplete when
    the generation ends is U+FFFD, as it is to the tokenizer.

    Attributes are replaced, never changed in place: a shallow copy goes its own way.

    Args:
        tokenizer: A transformers tokenizer.
        prompt_ids: The prompt.
        stop: Texts that end the output. They are looked for in the text with all special tokens.
        special_tokens: Texts of special tokens, by id.
        skip_special_tokens: Leave them out of the text.
        shown: But for these, by id.
        min_new_tokens: Stop texts that are complete within so many tokens do not count.

    Attributes:
        text: All text released so far; it ends before a stop text.
        matched_stop: The stop text that was found, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        special_tokens: Mapping[int, str] | None = None,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip = skip_special_tokens
        # Tokens that the text leaves out; stop texts see them.
        skipped = (special_tokens or {}) if skip_special_tokens else {}
        self._hidden = {token: text for token, text in skipped.items() if token not in shown}
        self._marks = {token: text for token, text in skipped.items() if token in shown}
        self._exempt_tokens = min_new_tokens
        self._ids = self._context(prompt_ids)
        self._read = len(self._ids)  # tokens whose text is known
        self._known = self._decode(self._ids)  # text of the window up to there
        self._held = ""  # decoded, but possibly the beginning of a stop text
        self._shown = ""  # a 1 for each character of it that is part of the text, else a 0
        self._exempt = 0  # characters of it at which no stop text can end
        self.text = ""
        self.matched_stop: str | None = None

    def append(self, token_id: int) -> str:
        """Takes the next token; returns the text that it releases, often empty."""
        if token_id in self._hidden:
            self._hold(self._hidden[token_id], "0")
        elif token_id in self._marks:
            self._hold(self._rest(), "1")
            self._hold(self._marks[token_id], "1")
        else:
            self._take([*self._ids, token_id])
        count = self._cut()
        if self._exempt_tokens > 0:
            self._exempt_tokens -= 1
            self._exempt = len(self._held)
        return self._release(count)

    def finish(self) -> str:
        """Ends the text; returns what was still held back."""
        if self.matched_stop is not None:
            return ""
        self._hold(self._rest(), "1")
        self._cut()
        return self._release(len(self._held))

    def _rest(self) -> str:
        """The text of tokens that waited for others, which will not come."""
        decoded = self._decode(self._ids)
        rest = decoded[_common(self._known, decoded) :]
        self._read, self._known = len(self._ids), decoded
        return rest

    def _take(self, ids: list[int]) -> None:
        """Holds the text of the window's last token, and of those that waited for it."""
        decoded = self._decode(ids)
        end = len(decoded)
        if decoded.endswith(_REPLACEMENT):
            if len(ids) - self._read <= _PENDING_TOKENS:
                self._ids = ids
                return
            # Only the last may be a character that has just begun, or as many as it has bytes.
            end -= _INCOMPLETE_BYTES
        self._hold(decoded[_common(self._known, decoded) : end], "1")
        # The window restarts at the last tokens, so that the cost of a token does not grow with the
        # text; but not at one that has no text, or that continues a character.
        if end < len(decoded):
            self._ids = ids[-_PENDING_TOKENS:]
            self._read, self._known = len(self._ids), self._decode(self._ids)[:-_INCOMPLETE_BYTES]
            return
        tail = ids[self._read :]
        text = self._decode(tail)
        if (text and not text.startswith(_REPLACEMENT)) or len(ids) > _WINDOW_TOKENS:
            ids, decoded = tail, text
        self._ids, self._read, self._known = ids, len(ids), decoded

    def _hold(self, text: str, shown: str) -> None:
        self._held += text
        self._shown += shown * len(text)

    def _cut(self) -> int:
        """How much of the held text may go out. Shortens it to what precedes a stop text that is
        complete.
        """
        if self._exempt_tokens == 0:
            found = []
            for stop in self._stop:
                position = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
                if position >= 0:
                    found.append((position, stop))
            if found:
                position, self.matched_stop = min(found)
                self._held = self._held[:position]
                return position
        return len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)

    def _release(self, count: int) -> str:
        released, shown = self._held[:count], self._shown[:count]
        self._held, self._shown = self._held[count:], self._shown[count:]
        self._exempt = max(0, self._exempt - count)
        if "0" in shown:
            pairs = zip(released, shown, strict=True)
            released = "".join(character for character, is_shown in pairs if is_shown == "1")
        self.text += released
        return released

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from one that does not continue a character."""
        last = prompt_ids[-2 * _CONTEXT_TOKENS :]
        ids = [token for token in last if token not in self._hidden]
        start = max(0, len(ids) - _CONTEXT_TOKENS)
        while start > 0 and self._decode(ids[start:]).startswith(_REPLACEMENT):
            start -= 1
        return ids[start:]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text


def _common(known: str, decoded: str) -> int:
    """How much of both is the same: all of `known`, unless its last character was incomplete."""
    if decoded.startswith(known):
        return len(known)
    return next(i for i, (a, b) in enumerate(zip_longest(known, decoded)) if a != b)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
