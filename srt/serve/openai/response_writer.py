"""An answer in the Responses API's shape: the events of its stream, and the response that they
make.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

from srt.sampling.logprobs import TokenLogprob
from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, ToolCallDelta, Usage
from srt.serve.openai.responses_tools import OfferedTools, text_argument

Event = dict[str, Any]
Logprobs = Callable[[list[TokenLogprob]], list[dict[str, Any]]]


class ResponseWriter:
    """Turns the events of one answer into those of a stream; collects the response meanwhile.

    At most one item is open at a time, and none when the response ends. Reasoning, text and each
    call are items of their own.

    Args:
        echo: What the response says of its request.
        logprobs: Puts log-probabilities into the API's shape; None where they are not asked for.
        offered: The tools that it may call.
    """

    def __init__(
        self,
        echo: dict[str, Any],
        logprobs: Logprobs | None = None,
        offered: OfferedTools | None = None,
    ) -> None:
        self._logprobs = logprobs
        self._offered = offered or OfferedTools(())
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._call: int | None = None
        self._custom = ""
        self._pending: list[TokenLogprob] = []
        self.response: dict[str, Any] = echo | {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._items,
            "usage": None,
        }

    def begin(self) -> list[Event]:
        """The events before the answer."""
        return [self._event(f"response.{kind}", **self._so_far()) for kind in _BEGINNING]

    def write(self, event: AnswerEvent) -> list[Event]:
        """The events of an event; after the end's no further one may come.

        Raises:
            ApiError: The engine could not go on.
        """
        return self._end(event) if isinstance(event, AnswerEnd) else self._delta(event)

    def fail(self, error: ApiError) -> Event:
        """The event of an answer that cannot go on."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", **self._so_far())

    def _delta(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if self._logprobs is not None:
            self._pending += delta.logprobs
        if delta.reasoning:
            events += self._open("reasoning") + self._add("reasoning_text", delta.reasoning)
            self._pending.clear()
        if delta.content:
            events += self._open("message")
            events += self._add("output_text", delta.content, self._take_logprobs())
        for call in delta.tool_calls:
            events += self._tool_call(call)
        return events

    def _tool_call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            events += self._close("completed")
            tool = self._offered.identity(call.name)
            kind, argument = "function_call", "arguments"
            if tool.is_custom:
                kind, argument = "custom_tool_call", "input"
            item = {"call_id": call.id, "name": tool.name, argument: ""}
            if tool.namespace is not None:
                item["namespace"] = tool.namespace
            events += self._open(kind, item)
            self._call, self._custom = call.index, ""
        elif not self._is_open or self._call != call.index:
            raise ValueError(f"arguments of call {call.index}, which is not the one that is open")
        if self._items[-1]["type"] == "custom_tool_call":
            # Its text is known when its JSON is complete.
            self._custom += call.arguments
        elif call.arguments:
            self._items[-1]["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, **self._place(), delta=call.arguments))
        self._pending.clear()
        return events

    def _open(self, kind: str, fields: dict[str, Any] | None = None) -> list[Event]:
        """Sees to it that an item of this type is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return []
        events = self._close("completed")
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        item |= {"status": "in_progress"} | (fields or {})
        self._items.append(item)
        self._is_open = True
        index = len(self._items) - 1
        added = _copy(item)
        events.append(self._event("response.output_item.added", output_index=index, item=added))
        if kind in ("reasoning", "message"):
            part = self._new_part(kind)
            item["content"].append(part)
            events.append(
                self._event("response.content_part.added", **self._place(0), part=dict(part))
            )
        return events

    def _new_part(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _add(
        self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> list[Event]:
        """A piece of text, for the open item."""
        part = self._items[-1]["content"][0]
        part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if logprobs is not None:
            part["logprobs"] = [*part["logprobs"], *logprobs]
            fields["logprobs"] = logprobs
        return [self._event(f"response.{kind}.delta", **self._place(0), **fields)]

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Those of the tokens whose text has come."""
        entries, self._pending = self._pending, []
        return [] if self._logprobs is None else self._logprobs(entries)

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open, self._call = False, None
        item, events = self._items[-1], list[Event]()
        if item["type"] == "message" and self._pending:
            events += self._add("output_text", "", self._take_logprobs())
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            kind = "response.function_call_arguments.done"
            events.append(self._event(kind, **self._place(), **done))
        elif item["type"] == "custom_tool_call":
            item["input"] = text = text_argument(self._custom)
            kind = "response.custom_tool_call_input"
            if text:
                events.append(self._event(f"{kind}.delta", **self._place(), delta=text))
            events.append(self._event(f"{kind}.done", **self._place(), input=text))
        else:
            part = item["content"][0]
            done = {"text": part["text"]}
            if part["type"] == "output_text":
                done["logprobs"] = part["logprobs"]
            place = self._place(0)
            events.append(self._event(f"response.{part['type']}.done", **place, **done))
            events.append(self._event("response.content_part.done", **place, part=dict(part)))
        index = len(self._items) - 1
        events.append(
            self._event("response.output_item.done", output_index=index, item=_copy(item))
        )
        return events

    def _end(self, end: AnswerEnd) -> list[Event]:
        if end.error is not None:
            raise ApiError(500, end.error, code="generation_failed")
        if end.finish_reason == "abort":
            raise ApiError(503, "the request was ended by the server", code="aborted")
        status = "incomplete" if end.finish_reason == "length" else "completed"
        events = self._close(status)
        self.response |= {"status": status, "usage": _usage(end.usage)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", **self._so_far())]

    def _so_far(self) -> dict[str, Any]:
        return {"response": self.response | {"output": [_copy(item) for item in self._items]}}

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        index = len(self._items) - 1
        place = {"item_id": self._items[-1]["id"], "output_index": index}
        return place if content_index is None else place | {"content_index": content_index}

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._sequence_number
        self._sequence_number += 1
        return {"type": kind, "sequence_number": number, **fields}


_BEGINNING = ("created", "in_progress")
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now."""
    if "content" not in item:
        return dict(item)
    return item | {"content": [dict(part) for part in item["content"]]}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
