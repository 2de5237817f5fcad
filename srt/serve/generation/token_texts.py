"""Tokens as clients see them in log-probabilities."""

import json
from typing import Any

from srt.managers.special_tokens import special_token_texts


class TokenTexts:
    """Text and bytes of single tokens.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_token_texts(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in json.dumps(decoder) else None
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        r"""Its text; of bytes that are no text by themselves, OpenAI's `bytes:\xf0\x9f`."""
        return self._look_up(token_id)[0]

    def content(self, token_id: int) -> bytes:
        """Its bytes."""
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        found = self._known.get(token_id)
        if found is None:
            content = self._bytes(token_id)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            found = self._known[token_id] = (text, content)
        return found

    def _bytes(self, token_id: int) -> bytes:
        special = self._special.get(token_id)
        if special is not None:
            return special.encode("utf-8", "replace")
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # a row of the model's vocabulary that the tokenizer does not have
            return b""
        token = token.decode("utf-8", "replace") if isinstance(token, bytes) else token
        if self._byte_of is not None and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode("utf-8", "replace")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table: printable
    ones for themselves, the others from U+0100 on, in order).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
