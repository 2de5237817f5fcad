"""From what a caller gives to requests, with everything checked that can be wrong with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from srt.configs.model_config import ModelConfig
from srt.entrypoints.request_inputs import as_conversations, as_texts, as_token_ids
from srt.errors import RequestError
from srt.managers.schedule_batch import Req, RequestId
from srt.managers.special_tokens import special_token_texts
from srt.managers.tokenizer import (
    ChatOptions,
    Message,
    encode,
    encode_chat,
    encode_rendered,
    render_chat,
)
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.grammar import GrammarCompiler
from srt.sampling.sampling_params import DistributionParams, SamplingParams
from srt.values import describe


class RequestBuilder:
    """Makes requests for one model.

    Args:
        config: The model's configuration.
        tokenizer: Its tokenizer, or None.
        defaults: What stands in for sampling parameters that a request leaves open.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Any | None,
        defaults: DistributionParams | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._defaults = defaults or DistributionParams()
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
        self._special_tokens = {} if tokenizer is None else special_token_texts(tokenizer)

    def token_ids(
        self,
        prompt: object,
        messages: object,
        input_ids: object,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[list[int]], bool]:
        """Token ids of every input, and whether a single one was given."""
        given = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise RequestError(
                "expected one of prompt, messages and input_ids, "
                f"found {' and '.join(names) or 'none'}"
            )
        if chat_template_kwargs is not None and messages is None:
            raise RequestError("chat_template_kwargs go with messages")
        if input_ids is not None:
            return as_token_ids(input_ids)
        if self._tokenizer is None:
            raise RequestError(f"{self._config.path} has no tokenizer; give input_ids")
        if prompt is not None:
            texts, is_single = as_texts(prompt)
            return [encode(self._tokenizer, text) for text in texts], is_single
        conversations, is_single = as_conversations(messages)
        return [
            encode_chat(self._tokenizer, conversation, ChatOptions(chat_template_kwargs))
            for conversation in conversations
        ], is_single

    def chat_prompt(
        self, messages: Sequence[Message], options: ChatOptions
    ) -> tuple[list[int], str]:
        """Token ids and text of a conversation.

        Raises:
            RequestError: There is no tokenizer, or as of :func:`encode_chat`.
        """
        if self._tokenizer is None:
            raise RequestError(f"{self._config.path} has no tokenizer; give input_ids")
        text = render_chat(self._tokenizer, messages, options)
        return encode_rendered(self._tokenizer, text), text

    def sampling_params(self, given: object, count: int) -> list[SamplingParams]:
        """Sampling parameters of `count` inputs, without None in what has a default here."""
        values = list(given) if isinstance(given, Sequence) else [given] * count
        if len(values) != count:
            raise RequestError(f"sampling_params: expected one or {count}, found {len(values)}")
        result = []
        for value in values:
            if value is None:
                value = SamplingParams()
            elif isinstance(value, Mapping):
                value = SamplingParams.from_mapping(value)
            if not isinstance(value, SamplingParams):
                raise RequestError(
                    f"sampling_params: expected SamplingParams, found {describe(value)}"
                )
            result.append(value.with_defaults(self._defaults))
        return result

    def check(self, label: str, ids: list[int], params: SamplingParams) -> None:
        """Whether a request can be served, as far as that is known without the cache's size.

        Raises:
            RequestError: It cannot; the message calls it `label`.
        """
        config = self._config
        if not ids:
            raise RequestError(f"{label}: the prompt is empty")
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            found = next(token for token in ids if not 0 <= token < config.vocab_size)
            raise RequestError(
                f"{label}: expected token ids from 0 to {config.vocab_size - 1}, found {found!r}"
            )
        if len(ids) >= config.context_length:
            raise RequestError(
                f"{label}: a prompt of {len(ids)} tokens leaves no room to generate in "
                f"a context of {config.context_length}"
            )
        for token in params.logit_bias or ():
            if token >= config.vocab_size:
                raise RequestError(
                    f"{label}: logit_bias: expected token ids from 0 to {config.vocab_size - 1}, "
                    f"found {token}"
                )
        if params.stop and self._tokenizer is None:
            raise RequestError(f"{label}: stop texts need a tokenizer; give stop_token_ids")

    def check_grammar(self, params: SamplingParams) -> None:
        """Whether the schema, regular expression or grammar of a request can be compiled, which may
        take seconds. Any thread may call it.

        Raises:
            RequestError: It cannot.
        """
        if self._grammars is not None:
            self._grammars.check(params)
        elif params.is_structured:
            raise RequestError(f"{self._config.path} has no tokenizer, which a grammar needs")

    def make_req(
        self,
        rid: RequestId,
        label: str,
        ids: list[int],
        params: SamplingParams,
        *,
        check_grammar: bool = True,
    ) -> Req:
        """One request.

        Args:
            rid: Its name.
            label: What errors call it.
            ids: Its prompt.
            params: Its sampling parameters.
            check_grammar: Whether to make sure that its grammar can be compiled, which may take
                seconds; a request whose grammar cannot be fails when it begins.

        Raises:
            RequestError: It cannot be served.
        """
        self.check(label, ids, params)
        room = self._config.context_length - len(ids)
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                ids,
                params.stop or (),
                special_tokens=self._special_tokens,
                skip_special_tokens=params.skip_special_tokens,
                shown=params.shown_special_tokens or (),
                min_new_tokens=params.min_new_tokens,
            )
        if check_grammar or self._grammars is None:
            self.check_grammar(params)
        return Req(
            rid,
            ids,
            params,
            detokenizer,
            min(params.max_new_tokens, room),
            label=label,
            grammar=None if self._grammars is None else self._grammars.make(params),
        )
