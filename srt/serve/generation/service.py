"""From what a client asks to answers: prompts become token ids, everything is checked, and all
requests of a call are queued or none is.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from srt.errors import RequestError
from srt.managers.messages import Message
from srt.managers.tokenizer import ChatOptions
from srt.sampling.random_numbers import SEED_LIMIT
from srt.sampling.sampling_params import SamplingParams
from srt.serve.errors import ApiError, shutting_down
from srt.serve.generation.answer_stream import AnswerStream
from srt.serve.parsers.answer_parser import AnswerParser
from srt.serve.parsers.choice import ToolChoice
from srt.serve.state import ServerState

# Seeds of a request's further answers lie so far apart: an odd number, so that all differ.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ChatCall:
    """A conversation whose next message is asked for.

    Attributes:
        messages: The conversation.
        params: How tokens are chosen; `max_new_tokens` is ignored.
        max_tokens: Most tokens of an answer; None for what is left of the context.
        n: How many answers.
        options: How the chat template is rendered; its tools are those of `choice`.
        choice: Which functions an answer may call.
        separate_reasoning: Whether reasoning is told from content.
    """

    messages: Sequence[Message]
    params: SamplingParams
    max_tokens: int | None = None
    n: int = 1
    options: ChatOptions = field(default_factory=ChatOptions)
    choice: ToolChoice = field(default_factory=ToolChoice)
    separate_reasoning: bool = True


@dataclass(frozen=True)
class CompletionCall:
    """Prompts to go on from.

    Attributes:
        prompts: Texts or token ids.
        params: As of :class:`ChatCall`, likewise the next two.
    """

    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams
    max_tokens: int | None = None
    n: int = 1


@dataclass(frozen=True)
class PromptAnswers:
    """The answers to a prompt.

    Attributes:
        input_ids: The prompt.
        answers: As many as were asked for.
    """

    input_ids: list[int]
    answers: list[AnswerStream]


class GenerationService:
    """Starts answers.

    Args:
        state: The server's.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat(self, call: ChatCall) -> PromptAnswers:
        """Answers to a conversation.

        Raises:
            ApiError: It cannot be served; nothing has been queued then.
        """
        params, choice, parsers = call.params, call.choice, self._state.parsers
        if choice.tools and parsers.tool_call_parser is None and not choice.is_forced:
            raise ApiError(
                400,
                "tools: expected none, since this model's chat template shows no tools, or calls "
                "in a form that is not known here (--tool-call-parser names one); tool_choice can "
                "force a call all the same",
                param="tools",
            )
        if choice.is_forced:
            if params.is_structured:
                raise ApiError(
                    400,
                    "tool_choice: a forced call does not go with another form of the answer",
                    param="tool_choice",
                )
            params = replace(params, json_schema=choice.schema())
        await self._check(params)
        ids, text = await self._chat_prompt(call.messages, call.options)
        plan = parsers.plan(choice, text, params, separate_reasoning=call.separate_reasoning)
        return self._start([ids], plan.params, call.max_tokens, call.n, "messages", plan.make)[0]

    async def complete(self, call: CompletionCall) -> list[PromptAnswers]:
        """Answers to each prompt.

        Raises:
            ApiError: One cannot be served; nothing has been queued then.
        """
        await self._check(call.params)
        prompts = [
            await self._token_ids(prompt, None, None, "prompt")
            if isinstance(prompt, str)
            else list(prompt)
            for prompt in call.prompts
        ]
        return self._start(prompts, call.params, call.max_tokens, call.n, "prompt")

    async def tokenize(self, prompt: str | None, messages: Sequence[Message] | None) -> list[int]:
        """Token ids of a prompt or a conversation.

        Raises:
            ApiError: There is no tokenizer or no template, or it refuses.
        """
        what = "prompt" if messages is None else "messages"
        return await self._token_ids(prompt, messages, None, what)

    async def chat_token_ids(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Token ids of a conversation, as :meth:`chat` has them.

        Raises:
            ApiError: There is no tokenizer or no template, or it refuses.
        """
        return (await self._chat_prompt(messages, options))[0]

    async def _chat_prompt(
        self, messages: Sequence[Message], options: ChatOptions
    ) -> tuple[list[int], str]:
        """In a thread: a template may take seconds."""
        prompt = self._state.files.builder.chat_prompt
        try:
            return await asyncio.to_thread(prompt, list(messages), options)
        except RequestError as error:
            raise ApiError(400, str(error), param="messages") from error

    async def _check(self, params: SamplingParams) -> None:
        """Refuses what needs no prompt to be refused."""
        if self._state.is_draining:
            raise shutting_down()
        self._state.engine.check_available()
        if params.is_structured:
            try:
                await asyncio.to_thread(self._state.files.builder.check_grammar, params)
            except RequestError as error:
                raise ApiError(400, str(error), code="invalid_grammar") from error

    async def _token_ids(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        template_kwargs: Mapping[str, Any] | None,
        param: str,
    ) -> list[int]:
        """In a thread: a long prompt takes a while, and a template may take seconds."""
        build = self._state.files.builder.token_ids
        try:
            batch, _ = await asyncio.to_thread(build, prompt, messages, None, template_kwargs)
        except RequestError as error:
            raise ApiError(400, str(error), param=param) from error
        return batch[0]

    def _start(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        max_tokens: int | None,
        n: int,
        param: str,
        make_parser: Callable[[], AnswerParser | None] = lambda: None,
    ) -> list[PromptAnswers]:
        # Before work is done for each: a call may ask for many thousands.
        self._state.engine.check_room(len(prompts) * n)
        facts = self._state.engine.facts
        assert facts is not None
        longest = min(facts.context_length, facts.kv_tokens)
        builder = self._state.files.builder
        params = builder.sampling_params([params], 1)[0]
        requests: list[tuple[list[int], SamplingParams]] = []
        for ids in prompts:
            limit = max(1, longest - len(ids)) if max_tokens is None else max_tokens
            if params.min_new_tokens > limit:
                raise ApiError(
                    400,
                    f"min_tokens: expected an integer from 0 to the most tokens ({limit}), found "
                    f"{params.min_new_tokens}",
                    param="min_tokens",
                )
            for index in range(n):
                own = replace(params, max_new_tokens=limit, seed=_seed(params.seed, index))
                requests.append((ids, own))
            try:
                builder.check(param, ids, requests[-1][1])
            except RequestError as error:
                code = "context_length_exceeded" if len(ids) >= longest else None
                message = str(error)
                field = "logit_bias" if message.startswith(f"{param}: logit_bias") else param
                raise ApiError(400, message, param=field, code=code) from error
        parsers = [make_parser() for _ in requests]
        generations = self._state.engine.submit_all(requests)
        # From here on nothing may fail: nobody would abort what has been queued.
        answers = list(map(AnswerStream, generations, parsers))
        return [PromptAnswers(ids, answers[i * n : (i + 1) * n]) for i, ids in enumerate(prompts)]


def _seed(seed: int | None, index: int) -> int | None:
    """The seed of a request's answer: that of the first is the request's own."""
    return None if seed is None else (seed + index * _SEED_STEP) % SEED_LIMIT
