"""Messages of the system in the middle of a conversation."""

from collections.abc import Mapping
from typing import Any


def as_reminder(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the system as one of the user, marked as agents mark theirs.

    Agents write such messages wherever they are in a conversation; most chat templates refuse them
    anywhere but at its beginning.

    Args:
        message: With a content of parts of text.
    """
    texts = "\n".join(part["text"] for part in message["content"])
    text = f"<system-reminder>\n{texts}\n</system-reminder>"
    return {"role": "user", "content": [{"type": "text", "text": text}]}
