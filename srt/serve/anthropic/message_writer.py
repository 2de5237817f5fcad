"""An answer in Anthropic's shape: the events of its stream, and the message that they make."""

from typing import Any

from pydantic import TypeAdapter

from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, ToolCallDelta, Usage

# Clients send a block of thinking back only if it is signed. Nothing here looks at it.
SIGNATURE = "unsigned"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_OBJECT = TypeAdapter(dict[str, Any])

Event = dict[str, Any]


class MessageWriter:
    """Turns the events of one answer into those of a stream; collects the message meanwhile.

    At most one block is open at a time, and none when the message ends.

    Args:
        message_id: The message's name.
        model: The model's.
        prompt_tokens: Tokens of the prompt.
        shows_thinking: False for blocks of thinking without their text.
    """

    def __init__(
        self, message_id: str, model: str, prompt_tokens: int, *, shows_thinking: bool = True
    ) -> None:
        self._shows_thinking = shows_thinking
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._call: int | None = None
        self._arguments: list[str] = []
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            # How much of it was cached is known with the first token.
            "usage": _usage(Usage(prompt_tokens, 0, 0)),
        }

    def begin(self) -> list[Event]:
        """The events before the answer."""
        message = self.message | {"content": [], "usage": dict(self.message["usage"])}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def write(self, event: AnswerEvent) -> list[Event]:
        """The events of an event; after the end's no further one may come.

        Raises:
            ApiError: The engine could not go on.
        """
        if isinstance(event, AnswerEnd):
            return self._end(event)
        return self._delta(event)

    def _delta(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._open({"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                self._blocks[-1]["thinking"] += delta.reasoning
                events.append(self._part("thinking_delta", thinking=delta.reasoning))
        if delta.content:
            events += self._open({"type": "text", "text": ""})
            self._blocks[-1]["text"] += delta.content
            events.append(self._part("text_delta", text=delta.content))
        for call in delta.tool_calls:
            events += self._tool_call(call)
        return events

    def _tool_call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            events += self._close()
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name}
            events += self._open(block | {"input": {}})
            self._call, self._arguments = call.index, []
        elif not self._is_open or self._call != call.index:
            raise ValueError(f"arguments of call {call.index}, which is not the one that is open")
        if call.arguments:
            self._arguments.append(call.arguments)
            events.append(self._part("input_json_delta", partial_json=call.arguments))
        return events

    def _open(self, block: dict[str, Any]) -> list[Event]:
        """Sees to it that a block of this type is open."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return []
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        start = {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": dict(block),
        }
        return [*events, start]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open, self._call = False, None
        block = self._blocks[-1]
        events: list[Event] = []
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._part("signature_delta", signature=SIGNATURE))
        elif block["type"] == "tool_use":
            block["input"] = _parsed("".join(self._arguments))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _part(self, kind: str, **values: str) -> Event:
        return {
            "type": "content_block_delta",
            "index": len(self._blocks) - 1,
            "delta": {"type": kind, **values},
        }

    def _end(self, end: AnswerEnd) -> list[Event]:
        if end.error is not None:
            raise ApiError(500, end.error, code="generation_failed")
        if end.finish_reason == "abort":
            raise ApiError(503, "the request was ended by the server", code="aborted")
        events = self._close()
        reason, sequence = _STOP_REASONS[end.finish_reason], None
        if end.finish_reason == "stop" and isinstance(end.matched_stop, str):
            reason, sequence = "stop_sequence", end.matched_stop
        usage = _usage(end.usage)
        stop = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        self.message |= stop | {"usage": usage}
        return [
            *events,
            {"type": "message_delta", "delta": stop, "usage": dict(usage)},
            {"type": "message_stop"},
        ]


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's input tokens are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _parsed(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object. Of those that are cut off, what there is, as Anthropic's
    client makes it of a stream; text that is no object stays visible as such.
    """
    try:
        return _OBJECT.validate_json(arguments or "{}", experimental_allow_partial=True)
    except ValueError:
        return {"INVALID_JSON": arguments}
