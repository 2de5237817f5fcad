"""The runtime as a Python object."""

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from srt.checkpoint.hub import resolve_model
from srt.configs.model_config import ModelConfig
from srt.entrypoints.chunk_stream import ChunkRouter, ChunkStream
from srt.entrypoints.engine_options import check_engine_options
from srt.entrypoints.outputs import GenerateChunk
from srt.entrypoints.request_builder import RequestBuilder
from srt.entrypoints.request_inputs import TokenIds
from srt.errors import EngineStateError, RequestError
from srt.managers.scheduler import Scheduler
from srt.managers.special_tokens import end_token_ids
from srt.managers.tokenizer import Message, load_tokenizer
from srt.mem_cache.cache_size import DEFAULT_MEM_FRACTION
from srt.model_executor.cpu_graph_runner import default_batch_sizes
from srt.model_executor.model_runner import ModelRunner
from srt.sampling.sampling_defaults import get_sampling_defaults
from srt.sampling.sampling_params import SamplingParams
from srt.utils.threads import apply_thread_plan, plan_threads


class Engine:
    """A checkpoint, loaded and ready to generate.

    One thread at a time may generate, read streams or :meth:`step`: two at once get an error, not
    wrong tokens. Ctrl-C is taken between forward passes, a second one at once; either way all can
    go on afterwards.

    Args:
        model_path: The checkpoint's directory, or `org/name` on the Hugging Face Hub.
        revision: Branch, tag or commit of a model on the Hub; None for `main`.
        dtype: Dtype of activations: `bfloat16`, or `float16` (`auto`), which is more exact and as
            fast; bfloat16 has the larger range.
        quantization: `fp8`, `fp8-per-channel` or `fp8-block` quantizes an unquantized checkpoint
            while it is loaded; None runs it as it is.
        context_length: Longest sequence, prompt and output together; None for the model's own
            limit.
        max_running_requests: Most requests decoded together; further ones wait.
        max_total_tokens: Tokens that the KV cache holds; None chooses by `mem_fraction`.
        mem_fraction: Share of the memory that is free after loading which the KV cache may take.
        kv_cache_dtype: `auto` for the dtype of activations, or `fp8_e4m3`, which halves the cache;
            scales come from the checkpoint where it has them.
        quantize_lm_head: Hold the output projection in FP8, a scale a token of the vocabulary,
            where the checkpoint has it in 16 bits. Faster where the vocabulary is large, and less
            exact.
        enable_radix_cache: Keep keys and values of ended requests for those with the same prefix.
        chunked_prefill_size: Most prompt tokens of one forward pass; longer prompts take several.
        disable_graph: Run the operators of every decode pass from Python, instead of recording
            and replaying them.
        enable_torch_compile: Decode through torch.compile; compiling takes from seconds to minutes
            at start.
        compiled_batch_sizes: Batch sizes to compile; None for powers of two up to
            `max_running_requests`.
        packed_cache: Directory in which packed weights are kept, so that the next start maps them
            instead of packing; None for none.
        num_threads: Threads of the process's Torch operators and the kernels; None takes one a
            physical core that the process may use (`srt.utils.threads`).
        sampling_defaults: What stands in for sampling parameters that a request leaves open:
            `model` for what the checkpoint's generation_config.json says (greedy where it says
            nothing), or `greedy`.
        template_needed_by: What the caller needs a chat template for, in words; a checkpoint
            without one is refused then, before its weights are read.
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
        quantization: str | None = None,
        context_length: int | None = None,
        max_running_requests: int = 32,
        max_total_tokens: int | None = None,
        mem_fraction: float = DEFAULT_MEM_FRACTION,
        kv_cache_dtype: str = "auto",
        quantize_lm_head: bool = False,
        enable_radix_cache: bool = True,
        chunked_prefill_size: int = 512,
        disable_graph: bool = False,
        enable_torch_compile: bool = False,
        compiled_batch_sizes: Sequence[int] | None = None,
        packed_cache: str | Path | None = None,
        num_threads: int | None = None,
        sampling_defaults: str = "model",
        template_needed_by: str | None = None,
        progress: bool = True,
    ) -> None:
        check_engine_options(
            model_path=model_path,
            revision=revision,
            dtype=dtype,
            quantization=quantization,
            context_length=context_length,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            mem_fraction=mem_fraction,
            kv_cache_dtype=kv_cache_dtype,
            chunked_prefill_size=chunked_prefill_size,
            compiled_batch_sizes=compiled_batch_sizes,
            packed_cache=packed_cache,
            num_threads=num_threads,
        )
        apply_thread_plan(plan_threads(num_threads))
        self.model_config = ModelConfig.from_pretrained(
            resolve_model(model_path, revision, progress=progress),
            dtype,
            context_length,
            quantization,
        )
        defaults = get_sampling_defaults(self.model_config.path, sampling_defaults)
        self.tokenizer: Any | None = load_tokenizer(self.model_config.path)
        if template_needed_by is not None and not self.has_chat_template:
            raise RequestError(
                f"{template_needed_by} needs a chat template, which {model_path} does not have"
            )
        if self.tokenizer is not None:
            ends = self.model_config.eos_token_ids | end_token_ids(self.tokenizer)
            self.model_config = replace(self.model_config, eos_token_ids=ends)
        batch_sizes = compiled_batch_sizes or default_batch_sizes(max_running_requests)
        self._runner: ModelRunner | None = ModelRunner(
            self.model_config,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            mem_fraction=mem_fraction,
            kv_cache_dtype=kv_cache_dtype,
            quantize_lm_head=quantize_lm_head,
            compiled_batch_sizes=batch_sizes if enable_torch_compile else (),
            record_graphs=not disable_graph,
            progress=progress,
            packed_cache=None if packed_cache is None else Path(packed_cache),
        )
        self._router: ChunkRouter | None = ChunkRouter(
            Scheduler(self._runner, chunked_prefill_size, enable_radix_cache=enable_radix_cache)
        )
        self._builder = RequestBuilder(self.model_config, self.tokenizer, defaults)
        self._rids = itertools.count()
        self._pid = os.getpid()

    @property
    def model_runner(self) -> ModelRunner:
        """Model and KV cache, for callers who want logits.

        Raises:
            EngineStateError: The engine is shut down.
        """
        if self._runner is None:
            raise EngineStateError("the engine is shut down")
        return self._runner

    @property
    def scheduler(self) -> Scheduler:
        """The running requests and their cache.

        Raises:
            EngineStateError: The engine is shut down.
        """
        return self._live_router().scheduler

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be given."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Any:
        """Generates for one input or for several, which are decoded together.

        Args:
            prompt: A text as it is, or several.
            sampling_params: For all inputs, or one for each, also as a dict of the names of
                :class:`SamplingParams`; None for the defaults.
            messages: Instead of a prompt: a conversation (`[{"role": "user", "content": "..."}]`)
                for the chat template, or several.
            input_ids: Instead of a prompt: token ids, or several lists of them; also as arrays or
                tensors of integers.
            chat_template_kwargs: With messages: variables for the chat template, such as
                `{"enable_thinking": False}`.
            stream: Return an iterator of :class:`GenerateChunk`, one for every token as it comes,
                instead of results.

        Returns:
            A :class:`GenerateOutput` for one input, a list of them in the order of the inputs for
            several, or the iterator.

        Raises:
            RequestError: An input cannot be served; nothing has been generated then.
            SrtError: The generation for a single input failed. Of several, the one that failed has
                its `error` in its output, and the others go on.
            EngineStateError: The engine is shut down, or another thread is using it.
        """
        router = self._live_router()
        batch, is_single = self._builder.token_ids(
            prompt, messages, input_ids, chat_template_kwargs
        )
        all_params = self._builder.sampling_params(sampling_params, len(batch))
        reqs = [
            self._builder.make_req(next(self._rids), f"request {i}", ids, own)
            for i, (ids, own) in enumerate(zip(batch, all_params, strict=True))
        ]
        chunks = ChunkStream(router, reqs, raise_errors=is_single)
        if stream:
            return chunks
        with closing(chunks):
            outputs = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
        return outputs[0] if is_single else [outputs[i] for i in range(len(reqs))]

    def add_request(
        self,
        rid: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Queues one request, for :meth:`step` to run with the others. May be called from any
        thread.

        Args:
            rid: A text, the name of no request that has not ended; its chunks carry it.
            prompt: As for :meth:`generate`, a single one; likewise the others.

        Raises:
            RequestError: The input cannot be served, or the name is none or taken.
            EngineStateError: The engine is shut down.
        """
        router = self._live_router()
        _check_rid(rid)
        batch, is_single = self._builder.token_ids(
            prompt, messages, input_ids, chat_template_kwargs
        )
        if not is_single:
            raise RequestError(f"request {rid}: expected a single input, found a list")
        params = self._builder.sampling_params([sampling_params], 1)[0]
        req = self._builder.make_req(rid, f"request {rid}", batch[0], params)
        router.scheduler.add([req])

    def step(self) -> list[GenerateChunk]:
        """At most one forward pass over all requests; returns the new chunks of those that
        :meth:`add_request` queued.

        Raises:
            EngineStateError: The engine is shut down, or another thread is using it.
        """
        router = self._live_router()
        router.pump()
        return router.take_unclaimed()

    def abort(self, rid: str) -> None:
        """Ends a request that :meth:`add_request` queued; its last chunk comes with the next step.
        May be called from any thread; nothing happens if there is no such request. The name can be
        used again when that chunk has come.

        Raises:
            RequestError: `rid` is not a text.
            EngineStateError: The engine is shut down.
        """
        _check_rid(rid)
        self.scheduler.abort([rid])

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return self._live_router().has_work

    def shutdown(self) -> None:
        """Gives model and cache back to the system, after the pass that another thread is in.
        Afterwards the engine cannot be used, nor its streams be read; what ran has no end.
        """
        router, self._runner, self._router = self._router, None, None
        if router is not None:
            router.shut_down()

    def _live_router(self) -> ChunkRouter:
        if self._router is None:
            raise EngineStateError("the engine is shut down")
        if os.getpid() != self._pid:
            # Its threads are the parent's: a pass would wait for them for ever.
            raise EngineStateError(
                "the engine was loaded before the fork that made this process; load one after it"
            )
        return self._router

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _check_rid(rid: object) -> None:
    if not isinstance(rid, str):
        raise RequestError(f"rid: expected a text, found {rid!r}")
