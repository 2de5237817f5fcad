"""The runtime as a Python object."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Literal, overload

from srt.configs.engine_config import EngineConfig
from srt.configs.option import documented, takes_arguments_of
from srt.entrypoints.chunk_stream import ChunkRouter, ChunkStream
from srt.entrypoints.model_files import ModelFiles, has_chat_template
from srt.entrypoints.outputs import GenerateChunk, GenerateOutput
from srt.entrypoints.request_inputs import SamplingParamsInput, TokenIds
from srt.errors import EngineStateError, RequestError
from srt.managers.scheduler import Scheduler
from srt.managers.tokenizer import Message
from srt.model_executor.model_runner import ModelRunner
from srt.utils.openmp import warn_of_spinning
from srt.utils.threads import apply_thread_plan, plan_threads


@documented(EngineConfig)
class Engine:
    """A checkpoint, loaded and ready to generate.

    One thread at a time may generate, read streams or :meth:`step`: two at once get an error, not
    wrong tokens. Ctrl-C is taken between forward passes, a second one at once; either way all can
    go on afterwards.

    It is made from an :class:`EngineConfig`, or from what that is made from: `Engine(config)` or
    `Engine(model_path, **options)`.

    Args:
        OPTIONS

    Attributes:
        config: The options.
        model_config: What the checkpoint says about the model.
        tokenizer: The checkpoint's, or None.

    Raises:
        OptionError: An option has a value that it cannot have.
        SrtError: The checkpoint cannot be used; the message says why.
    """

    @overload
    def __init__(self, config: EngineConfig, /) -> None: ...

    @overload
    @takes_arguments_of(EngineConfig)
    def __init__(self) -> None: ...

    def __init__(self, *args: Any, **options: Any) -> None:
        is_config = len(args) == 1 and isinstance(args[0], EngineConfig) and not options
        config: EngineConfig = args[0] if is_config else EngineConfig(*args, **options)
        self.config = config
        warn_of_spinning()
        apply_thread_plan(plan_threads(config.num_threads))
        files = ModelFiles.load(config)
        self.model_config = files.model_config
        self.tokenizer: Any | None = files.tokenizer
        self._builder = files.builder
        self._runner: ModelRunner | None = ModelRunner(self.model_config, config)
        self._router = ChunkRouter(
            Scheduler(
                self._runner,
                config.chunked_prefill_size,
                enable_radix_cache=config.enable_radix_cache,
            )
        )
        self._rids = itertools.count()

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
        return self._router.scheduler

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be given."""
        return has_chat_template(self.tokenizer)

    @overload
    def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParamsInput | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: Literal[False] = False,
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...] | None = None,
        sampling_params: SamplingParamsInput | Sequence[SamplingParamsInput] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        input_ids: Sequence[TokenIds] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: Literal[False] = False,
    ) -> list[GenerateOutput]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParamsInput | Sequence[SamplingParamsInput] | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: Literal[True],
    ) -> ChunkStream: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParamsInput | Sequence[SamplingParamsInput] | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> GenerateOutput | list[GenerateOutput] | ChunkStream: ...

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParamsInput | Sequence[SamplingParamsInput] | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> GenerateOutput | list[GenerateOutput] | ChunkStream:
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
            several, or the iterator. Type checkers know which, but for texts in other sequences
            than lists and tuples, and arrays of ids, which may be one input or several.

        Raises:
            RequestError: An input cannot be served; nothing has been generated then.
            SrtError: The generation for a single input failed. Of several, the one that failed has
                its `error` in its output, and the others go on.
            EngineStateError: The engine is shut down, or another thread is using it.
        """
        _ = self.scheduler  # an engine that cannot be used says so first
        batch, is_single = self._builder.token_ids(
            prompt, messages, input_ids, chat_template_kwargs
        )
        all_params = self._builder.sampling_params(sampling_params, len(batch))
        reqs = [
            self._builder.make_req(next(self._rids), f"request {i}", ids, own)
            for i, (ids, own) in enumerate(zip(batch, all_params, strict=True))
        ]
        chunks = ChunkStream(self._router, reqs, raise_errors=is_single)
        if stream:
            return chunks
        with closing(chunks):
            outputs = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
        return outputs[0] if is_single else [outputs[i] for i in range(len(reqs))]

    def add_request(
        self,
        rid: str,
        prompt: str | None = None,
        sampling_params: SamplingParamsInput | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        check_grammar: bool = True,
    ) -> None:
        """Queues one request, for :meth:`step` to run with the others. May be called from any
        thread.

        Args:
            rid: A text, the name of no request that has not ended; its chunks carry it.
            prompt: As for :meth:`generate`, a single one; likewise the others.
            check_grammar: Refuse a schema, regular expression or grammar that cannot be compiled,
                which may take seconds to find out. Without it a thread compiles it while others
                are served, and such a request ends with an error.

        Raises:
            RequestError: The input cannot be served, or the name is none or taken.
            EngineStateError: The engine is shut down.
        """
        scheduler = self.scheduler
        _check_rid(rid)
        batch, is_single = self._builder.token_ids(
            prompt, messages, input_ids, chat_template_kwargs
        )
        if not is_single:
            raise RequestError(f"request {rid}: expected a single input, found a list")
        params = self._builder.sampling_params([sampling_params], 1)[0]
        req = self._builder.make_req(
            rid, f"request {rid}", batch[0], params, check_grammar=check_grammar
        )
        scheduler.add([req])

    def step(self) -> list[GenerateChunk]:
        """At most one forward pass over all requests; returns the new chunks of those that
        :meth:`add_request` queued.

        Raises:
            EngineStateError: The engine is shut down, or another thread is using it.
        """
        self._router.pump()
        return self._router.take_unclaimed()

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
        return self._router.has_work

    def shutdown(self) -> None:
        """Gives model and cache back to the system, after the pass that another thread is in.
        Afterwards the engine cannot be used, nor its streams be read; what ran has no end.
        """
        self._runner = None
        self._router.shut_down()

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
