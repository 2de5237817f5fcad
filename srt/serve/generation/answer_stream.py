"""Answers as they come: one from a generation, and several at once."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from srt.serve.engine.generations import Generation, GenerationEnd
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, FinishReason, Usage
from srt.serve.parsers.answer_parser import AnswerParser


class AnswerStream:
    """The events of one answer. Whoever does not read it to its end aborts it.

    Args:
        generation: What the engine generates.
        parser: Splits its text; None where all of it is content.
    """

    def __init__(self, generation: Generation, parser: AnswerParser | None = None) -> None:
        self._generation = generation
        self._parser = parser

    def abort(self) -> None:
        """Ends the generation, if it has not ended."""
        self._generation.abort()

    async def events(self) -> AsyncIterator[AnswerEvent]:
        """Deltas, then the end.

        Raises:
            ApiError: The engine could not go on.
        """
        parser, reasoning = self._parser, 0
        async for piece in self._generation:
            if parser is None:
                deltas = [AnswerDelta(content=piece.text)]
            else:
                deltas = parser.feed(piece.text) if piece.text else []
                if piece.end is not None:
                    deltas += parser.finish()
                deltas = deltas or [AnswerDelta()]
                if any(delta.reasoning for delta in deltas):
                    reasoning += len(piece.token_ids)
            first, *rest = deltas
            yield AnswerDelta(
                first.content, first.reasoning, first.tool_calls, piece.logprobs, piece.token_ids
            )
            for delta in rest:
                yield delta
            if piece.end is not None:
                called = parser is not None and parser.has_tool_calls
                yield _answer_end(piece.end, called, reasoning)


def _answer_end(end: GenerationEnd, called: bool, reasoning_tokens: int) -> AnswerEnd:
    reason: FinishReason = "abort"
    if end.finish_reason in ("stop", "length"):
        # A text that ends in the middle of a second call has a first one all the same.
        reason = "tool_calls" if called and end.finish_reason == "stop" else "stop"
        reason = "length" if end.finish_reason == "length" else reason
    usage = Usage(
        end.prompt_tokens,
        end.cached_tokens,
        end.completion_tokens,
        min(reasoning_tokens, end.completion_tokens),
    )
    return AnswerEnd(reason, end.matched_stop, usage, end.error, end.prompt_logprobs)


def split_by_answer(
    events: Iterable[tuple[int, AnswerEvent]], count: int
) -> list[list[AnswerEvent]]:
    """What :func:`merge_answers` gave, for each of `count` answers."""
    split: list[list[AnswerEvent]] = [[] for _ in range(count)]
    for index, event in events:
        split[index].append(event)
    return split


async def merge_answers(
    answers: Sequence[AnswerStream],
) -> AsyncIterator[tuple[int, AnswerEvent]]:
    """The events of several answers with the index of each, as they come. When it is closed or one
    fails, those that have not ended are aborted.

    Raises:
        ApiError: The engine could not go on.
    """
    try:
        if len(answers) == 1:
            async for event in answers[0].events():
                yield 0, event
            return
        # As many as there are answers: none waits for long, and none runs ahead of the reader.
        queue: asyncio.Queue[tuple[int, AnswerEvent] | BaseException] = asyncio.Queue(len(answers))

        async def read(index: int) -> None:
            try:
                async for event in answers[index].events():
                    await queue.put((index, event))
            except Exception as error:  # noqa: BLE001 - raised again by the reader
                await queue.put(error)

        tasks = [asyncio.ensure_future(read(index)) for index in range(len(answers))]
        try:
            left = len(answers)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                left -= isinstance(item[1], AnswerEnd)
        finally:
            for task in tasks:
                task.cancel()
    finally:
        for answer in answers:
            answer.abort()
