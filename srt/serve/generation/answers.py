"""Events of an answer, as it comes. Every API puts them into its own shape."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the command line knows the parsers' names, and does not wait for Torch
    from srt.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a tool call.

    Attributes:
        index: Which of the answer's calls, from 0.
        arguments: What follows of the text of its arguments, an object in JSON.
        id: With the first delta of a call: a name for it; else None.
        name: With the first delta of a call: the function's name, whole; else None.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class AnswerDelta:
    """What follows of an answer.

    Attributes:
        content: Text for the reader.
        reasoning: Text of the model's reasoning.
        tool_calls: Parts of tool calls.
        logprobs: Of the tokens that have come since the delta before, if asked for; their text may
            be in a later delta, or in none.
        token_ids: Those tokens.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: "tuple[TokenLogprob, ...]" = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What an answer, or several to one prompt, took.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them whose keys and values were in the cache.
        completion_tokens: Tokens generated.
        reasoning_tokens: Those of them that are reasoning, where a parser tells; else 0.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class AnswerEnd:
    """The last event of an answer.

    Attributes:
        finish_reason: `tool_calls` where the model ended after a complete call; `abort` where the
            engine could not go on.
        matched_stop: The token or stop text that ended it, or None.
        usage: What it took.
        error: Why the engine could not go on, or None.
        prompt_logprobs: Of the prompt's tokens, if asked for; the first is None.
    """

    finish_reason: FinishReason
    matched_stop: int | str | None
    usage: Usage
    error: str | None = None
    prompt_logprobs: "tuple[TokenLogprob | None, ...] | None" = None


AnswerEvent = AnswerDelta | AnswerEnd
