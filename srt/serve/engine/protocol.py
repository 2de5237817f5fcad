"""Messages between the server and its engine's process, over a stream socket.

A frame is the lengths of its two parts, four bytes each, little-endian, then JSON in UTF-8, then
token ids as int32. Both ends are ours and of one version; nothing is unpickled.

To the engine: `config` (once, first), `add`, `abort`. From it: `ready` or `failed` (once, first),
then `step` for each pass that brings something.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from srt.entrypoints.outputs import GenerateChunk
from srt.managers.forward_pass import WorkDone
from srt.sampling.logprobs import TokenLogprob
from srt.sampling.sampling_params import SamplingParams
from srt.serve.engine.generations import GenerationEnd, GenerationPiece

_HEADER = struct.Struct("<II")
# Longest part of a frame: far above what a context of tokens can take, and below what would hurt.
MAX_PART = 1 << 30

TokenIdArray = NDArray[np.int32]
Frame = tuple[dict[str, Any], TokenIdArray]


class ProtocolError(Exception):
    """What came is no frame of this protocol."""


def encode_frame(message: Mapping[str, Any], ids: TokenIdArray | None = None) -> bytes:
    """A frame."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    # A stop text or an answer never holds a lone surrogate, an error may quote one.
    head = text.encode("utf-8", "surrogatepass")
    tail = b"" if ids is None else ids.tobytes()
    return _HEADER.pack(len(head), len(tail)) + head + tail


class FrameReader:
    """Takes bytes as they come and gives whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, content: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes.

        Raises:
            ProtocolError: They are none.
        """
        self._buffer += content
        while len(self._buffer) >= _HEADER.size:
            head_size, tail_size = _HEADER.unpack_from(self._buffer)
            if max(head_size, tail_size) > MAX_PART or tail_size % 4:
                raise ProtocolError(f"a frame of {head_size} and {tail_size} bytes")
            start = _HEADER.size + head_size
            if len(self._buffer) < start + tail_size:
                return
            head = bytes(self._buffer[_HEADER.size : start])
            ids = np.frombuffer(bytes(self._buffer[start : start + tail_size]), dtype=np.int32)
            del self._buffer[: start + tail_size]
            try:
                message = json.loads(head.decode("utf-8", "surrogatepass"))
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"a frame that is not JSON: {error}") from error
            if not isinstance(message, dict):
                raise ProtocolError("a frame that is not an object")
            yield message, ids


@dataclass(frozen=True)
class EngineFacts:
    """What an engine that has been loaded says of itself.

    Attributes:
        pid: Its process.
        architecture: The model's class, as its configuration names it.
        dtype: That of activations.
        kv_cache_dtype: That of keys and values.
        tier: The ISA tier that its kernels use.
        threads: How many compute.
        kv_tokens: Tokens that its KV cache holds.
        context_length: The longest sequence.
        vocab_size: Rows of its logits.
        max_running_requests: Most requests that are decoded together.
        load_seconds: From the start of its process until it was loaded.
    """

    pid: int
    architecture: str
    dtype: str
    kv_cache_dtype: str
    tier: str
    threads: int
    kv_tokens: int
    context_length: int
    vocab_size: int
    max_running_requests: int
    load_seconds: float


@dataclass(frozen=True)
class EngineStats:
    """An engine's load and what it has done since it was loaded.

    Attributes:
        running: Requests that are being prefilled or decoded.
        waiting: Requests that are in the engine and have not begun, or have been retracted.
        kv_tokens: Slots of the KV cache.
        kv_used_tokens: Slots that running requests use, shared prefixes once.
        kv_cached_tokens: Slots of prefixes that no running request uses.
        retractions: Requests that gave their slots back and began again.
        work: What its passes have computed.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_used_tokens: int = 0
    kv_cached_tokens: int = 0
    retractions: int = 0
    work: WorkDone = field(default_factory=WorkDone)

    @classmethod
    def from_message(cls, values: dict[str, Any]) -> "EngineStats":
        """Of what `asdict` made of one."""
        return cls(**values | {"work": WorkDone(**values["work"])})


def add_message(rid: str, params: SamplingParams) -> dict[str, Any]:
    """A request, whose prompt is the frame's second part; defaults are left out."""
    given = {
        one.name: value
        for one in fields(SamplingParams)
        if (value := getattr(params, one.name)) != one.default
    }
    return {"op": "add", "rid": rid, "params": given}


def encode_chunk(chunk: GenerateChunk, queue_seconds: float) -> list[Any]:
    """What a pass brings for a request."""
    output, end = chunk.output, None
    if output is not None:
        end = asdict(
            GenerationEnd(
                finish_reason=output.finish_reason,
                matched_stop=output.matched_stop,
                error=output.error,
                prompt_tokens=output.prompt_tokens,
                cached_tokens=output.cached_tokens,
                completion_tokens=output.completion_tokens,
                queue_seconds=queue_seconds,
                prefill_seconds=output.prefill_seconds,
                decode_seconds=output.decode_seconds,
            )
        )
        if output.prompt_logprobs is not None:
            end["prompt_logprobs"] = [_encode_logprob(entry) for entry in output.prompt_logprobs]
    return [chunk.rid, chunk.token_id, chunk.text, _encode_logprob(chunk.logprob), end]


def decode_chunk(values: list[Any]) -> tuple[str, GenerationPiece]:
    """The request's name and what came, of what :func:`encode_chunk` made."""
    rid, token_id, text, logprob, end = values
    if end is not None:
        prompt = end["prompt_logprobs"]
        if prompt is not None:
            end["prompt_logprobs"] = tuple(_decode_logprob(entry) for entry in prompt)
        end = GenerationEnd(**end)
    entry = _decode_logprob(logprob)
    return rid, GenerationPiece(
        text=text,
        token_ids=() if token_id is None else (token_id,),
        logprobs=() if entry is None else (entry,),
        end=end,
    )


def _encode_logprob(entry: TokenLogprob | None) -> list[Any] | None:
    return None if entry is None else [entry.token_id, entry.logprob, entry.top]


def _decode_logprob(values: list[Any] | None) -> TokenLogprob | None:
    if values is None:
        return None
    token_id, logprob, top = values
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))
