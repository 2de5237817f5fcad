"""From what a caller gives to requests, with everything checked that can be wrong with them."""

from collections.abc import Sequence
from typing import Any

from srt.configs.model_config import ModelConfig
from srt.errors import RequestError
from srt.managers.schedule_batch import Req, RequestId
from srt.managers.tokenizer import encode, encode_chat
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.sampling_params import SamplingParams


class RequestBuilder:
    """Makes requests for one model.

    Args:
        config: The model's configuration.
        tokenizer: Its tokenizer, or None.
    """

    def __init__(self, config: ModelConfig, tokenizer: Any | None) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def token_ids(
        self,
        prompt: str | Sequence[str] | None,
        messages: Sequence[Any] | None,
        input_ids: Sequence[Any] | None,
    ) -> tuple[list[list[int]], bool]:
        """Token ids of every input, and whether a single one was given."""
        given = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise RequestError(
                "expected one of prompt, messages and input_ids, "
                f"found {' and '.join(names) or 'none'}"
            )
        if input_ids is not None:
            is_single = not input_ids or not isinstance(input_ids[0], Sequence)
            return [list(ids) for ids in ([input_ids] if is_single else input_ids)], is_single
        if self._tokenizer is None:
            raise RequestError(f"{self._config.path} has no tokenizer; give input_ids")
        if prompt is not None:
            texts = [prompt] if isinstance(prompt, str) else prompt
            return [encode(self._tokenizer, text) for text in texts], isinstance(prompt, str)
        assert messages is not None
        is_single = not messages or isinstance(messages[0], dict)
        conversations = [messages] if is_single else messages
        return [
            encode_chat(self._tokenizer, conversation) for conversation in conversations
        ], is_single

    def make_req(self, rid: RequestId, label: str, ids: list[int], params: SamplingParams) -> Req:
        config = self._config
        if not ids:
            raise RequestError(f"{label}: the prompt is empty")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise RequestError(
                    f"{label}: expected token ids from 0 to {config.vocab_size - 1}, "
                    f"found {token!r}"
                )
        room = config.context_length - len(ids)
        if room < 1:
            raise RequestError(
                f"{label}: a prompt of {len(ids)} tokens leaves no room to generate in "
                f"a context of {config.context_length}"
            )
        if params.stop and self._tokenizer is None:
            raise RequestError(f"{label}: stop texts need a tokenizer; give stop_token_ids")
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, ids, params.stop)
        return Req(rid, ids, params, detokenizer, min(params.max_new_tokens, room), label=label)
