"""What a parser of a model's text looks like."""

from typing import Protocol

from srt.serve.generation.answers import AnswerDelta


class AnswerParser(Protocol):
    """Splits the text of one answer, as it comes, into content, reasoning and tool calls.

    What comes out depends on the whole text only, not on where it was cut: the same deltas, joined.
    A text that looks like a call and is none comes out as content; nothing is lost, ever.
    """

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes what the model wrote next; returns what is certain by now."""
        ...

    def finish(self) -> list[AnswerDelta]:
        """The rest, when the text has ended."""
        ...

    @property
    def has_tool_calls(self) -> bool:
        """Whether a complete call has come."""
        ...
