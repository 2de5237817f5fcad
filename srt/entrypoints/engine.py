"""The runtime as a Python object."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from srt.configs.model_config import ModelConfig
from srt.entrypoints.outputs import GenerateChunk, GenerateOutput
from srt.errors import RequestError
from srt.managers.schedule_batch import Req
from srt.managers.scheduler import Scheduler
from srt.managers.tokenizer import Message, encode, encode_chat, load_tokenizer
from srt.model_executor.cpu_graph_runner import default_batch_sizes
from srt.model_executor.model_runner import ModelRunner
from srt.model_loader.hub import resolve_model
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.sampling_params import SamplingParams


class Engine:
    """A checkpoint, loaded and ready to generate. One thread may use it at a time.

    Args:
        model_path: The checkpoint's directory, or `org/name` on the Hugging Face Hub.
        revision: Branch, tag or commit of a model on the Hub; None for `main`.
        dtype: Dtype of activations: `bfloat16`, or `float16` (`auto`), which is more exact and as
            fast; bfloat16 has the larger range.
        context_length: Longest sequence, prompt and output together; None for the model's own
            limit.
        max_running_requests: Most requests decoded together; further ones wait.
        max_total_tokens: Tokens that the KV cache holds; None chooses by the free memory.
        chunked_prefill_size: Most prompt tokens of one forward pass; longer prompts take several.
        enable_graph: Decode through torch.compile; compiling takes from seconds to minutes at
            start.
        graph_batch_sizes: Batch sizes to compile; None for powers of two up to
            `max_running_requests`.
        num_threads: Threads of the process's Torch operators; None leaves them as they are.
        progress: Show progress bars on stderr if that is a terminal.

    Raises:
        SrtError: The checkpoint cannot be used; the message says why.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        context_length: int | None = None,
        max_running_requests: int = 32,
        max_total_tokens: int | None = None,
        chunked_prefill_size: int = 2048,
        enable_graph: bool = False,
        graph_batch_sizes: Sequence[int] | None = None,
        num_threads: int | None = None,
        progress: bool = True,
    ) -> None:
        for name, value in (
            ("max_running_requests", max_running_requests),
            ("max_total_tokens", max_total_tokens),
            ("chunked_prefill_size", chunked_prefill_size),
            ("num_threads", num_threads),
            ("graph_batch_sizes", min(graph_batch_sizes or [1])),
        ):
            if value is not None and value < 1:
                raise RequestError(f"{name}: expected an integer >= 1, found {value}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model_config = ModelConfig.from_pretrained(
            resolve_model(model_path, revision, progress=progress), dtype, context_length
        )
        self.tokenizer: Any | None = load_tokenizer(self.model_config.path)
        self._chunked_prefill_size = chunked_prefill_size
        batch_sizes = graph_batch_sizes or default_batch_sizes(max_running_requests)
        self._runner: ModelRunner | None = ModelRunner(
            self.model_config,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            graph_batch_sizes=batch_sizes if enable_graph else (),
            progress=progress,
        )

    @property
    def model_runner(self) -> ModelRunner:
        """Model and KV cache, for callers who want logits.

        Raises:
            RuntimeError: The engine is shut down.
        """
        if self._runner is None:
            raise RuntimeError("the engine is shut down")
        return self._runner

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be given."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> Any:
        """Generates for one input or for several, which are decoded together.

        Args:
            prompt: A text as it is, or several.
            sampling_params: For all inputs, or one for each; None for the defaults of
                :class:`SamplingParams`.
            messages: Instead of a prompt: a conversation (`[{"role": "user", "content": "..."}]`)
                for the chat template, or several.
            input_ids: Instead of a prompt: token ids, or several lists of them.
            stream: Return an iterator of :class:`GenerateChunk`, one for every token as it comes,
                instead of results.

        Returns:
            A :class:`GenerateOutput` for one input, a list of them in the order of the inputs for
            several, or the iterator.

        Raises:
            RequestError: An input cannot be served; nothing has been generated then.
        """
        batch, is_single = self._token_ids(prompt, messages, input_ids)
        params = sampling_params or SamplingParams()
        all_params = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(all_params) != len(batch):
            raise RequestError(
                f"sampling_params: expected one or {len(batch)}, found {len(all_params)}"
            )
        reqs = [
            self._make_req(i, *pair) for i, pair in enumerate(zip(batch, all_params, strict=True))
        ]
        scheduler = Scheduler(self.model_runner, self._chunked_prefill_size)
        scheduler.add(reqs)
        chunks = _run(scheduler)
        if stream:
            return chunks
        outputs = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
        return outputs[0] if is_single else [outputs[i] for i in range(len(reqs))]

    def shutdown(self) -> None:
        """Gives model and cache back to the system; the engine cannot be used afterwards."""
        self._runner = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _token_ids(
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
        if self.tokenizer is None:
            raise RequestError(f"{self.model_config.path} has no tokenizer; give input_ids")
        if prompt is not None:
            texts = [prompt] if isinstance(prompt, str) else prompt
            return [encode(self.tokenizer, text) for text in texts], isinstance(prompt, str)
        assert messages is not None
        is_single = not messages or isinstance(messages[0], dict)
        conversations = [messages] if is_single else messages
        return [
            encode_chat(self.tokenizer, conversation) for conversation in conversations
        ], is_single

    def _make_req(self, index: int, ids: list[int], params: SamplingParams) -> Req:
        config = self.model_config
        if not ids:
            raise RequestError(f"request {index}: the prompt is empty")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise RequestError(
                    f"request {index}: expected token ids from 0 to {config.vocab_size - 1}, "
                    f"found {token!r}"
                )
        room = config.context_length - len(ids)
        if room < 1:
            raise RequestError(
                f"request {index}: a prompt of {len(ids)} tokens leaves no room to generate in "
                f"a context of {config.context_length}"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(f"request {index}: stop texts need a tokenizer; give stop_token_ids")
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, ids, params.stop)
        return Req(index, ids, params, detokenizer, min(params.max_new_tokens, room))


def _run(scheduler: Scheduler) -> Iterator[GenerateChunk]:
    """Chunks of all requests until they end; gives their cache back if the caller stops reading."""
    try:
        while scheduler.has_work:
            for event in scheduler.step():
                ended = event.req.finish_reason is not None
                output = GenerateOutput.from_req(event.req) if ended else None
                yield GenerateChunk(event.req.index, event.token_id, event.text, output)
    finally:
        scheduler.abort()
