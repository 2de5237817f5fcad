"""An engine of a server that computes nothing: it queues as the true one does, and a test says what
its generations bring.
"""

from collections.abc import Sequence

from srt.configs.engine_config import EngineConfig
from srt.sampling.sampling_params import SamplingParams
from srt.serve.engine.child import Child
from srt.serve.engine.client import EngineClient, EngineState
from srt.serve.engine.generations import Generation, GenerationPiece
from srt.serve.engine.protocol import EngineFacts


class FakeGeneration(Generation):
    """Brings what it is given.

    Args:
        params: Of its request.

    Attributes:
        params: Likewise.
        pieces: What it brings.
        num_aborts: How often it was aborted.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.pieces: list[GenerationPiece] = []
        self.num_aborts = 0

    async def __anext__(self) -> GenerationPiece:
        if not self.pieces:
            raise StopAsyncIteration
        return self.pieces.pop(0)

    def abort(self) -> None:
        self.num_aborts += 1


class FakeEngine(EngineClient):
    """Takes requests and keeps them.

    Args:
        config: The engine's options, of which only the model matters.
        max_queued_requests: As of an EngineClient.

    Attributes:
        generations: All that were submitted.
    """

    def __init__(self, config: EngineConfig, *, max_queued_requests: int = 8) -> None:
        super().__init__(config, max_queued_requests=max_queued_requests)
        self.generations: list[FakeGeneration] = []
        self.state = EngineState.READY
        self.facts = EngineFacts(
            pid=0,
            architecture="Fake",
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            tier="scalar",
            threads=1,
            kv_tokens=512,
            context_length=512,
            vocab_size=512,
            max_running_requests=4,
            load_seconds=0.0,
        )

    def _ready_child(self) -> Child:
        return Child(self._config, self._on_message)  # which is never started

    def submit_all(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[Generation]:
        new = [FakeGeneration(params) for _, params in requests]
        self.generations += new
        return list(new)
