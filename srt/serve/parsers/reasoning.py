"""Reasoning that a model writes before its answer."""

from dataclasses import dataclass

from srt.serve.generation.answers import AnswerDelta
from srt.serve.parsers.text_reader import TextReader, Waiting


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is marked.

    Attributes:
        begin: What stands before it.
        end: What stands after it.
    """

    begin: str
    end: str


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]")


class ReasoningSplitter:
    """Splits a text into its reasoning and the rest. White space around the marks belongs to
    neither. Reasoning that does not end has no rest.

    Args:
        form: How reasoning is marked.
        begins_inside: The prompt ends with the mark of its beginning.
        verbatim: Reasoning is what was written, with its marks and all white space.

    Attributes:
        rest: Text after the reasoning that has come since it was last taken.
    """

    def __init__(
        self, form: ReasoningFormat, *, begins_inside: bool, verbatim: bool = False
    ) -> None:
        self._form = form
        self._is_verbatim = verbatim
        self._begins_inside = begins_inside
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._space = ""
        self.rest: list[str] = []
        self._run = self._split()
        next(self._run, None)

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes what was written next; returns the reasoning of it."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[AnswerDelta]:
        """The rest, when the text has ended."""
        self._reader.complete()
        return self._advance()

    def _advance(self) -> list[AnswerDelta]:
        next(self._run, None)
        text, self._reasoning = "".join(self._reasoning), []
        return [AnswerDelta(reasoning=text)] if text else []

    def _split(self) -> Waiting[None]:
        reader, form = self._reader, self._form
        reader.mark()
        yield from reader.skip_space()
        is_inside = yield from reader.literal(form.begin)
        if is_inside or self._begins_inside:
            yield from reader.skip_space()
            self._add_mark(reader.taken)
            end = yield from reader.until((form.end,), self._add)
            space = yield from reader.skip_space()
            self._add_mark((end or "") + space)
        else:
            self.rest.append(reader.taken)
        while True:
            reader.mark()
            self.rest.append(reader.take(len(reader.text)))
            if not (yield from reader.more()):
                return

    def _add_mark(self, text: str) -> None:
        if self._is_verbatim and text:
            self._reasoning.append(text)

    def _add(self, text: str) -> None:
        self._reader.mark()
        if text.isspace() and not self._is_verbatim:
            self._space += text
        else:
            self._reasoning.append(self._space + text)
            self._space = ""
