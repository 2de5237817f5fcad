"""Decode without Python: the operators of a pass are recorded when a batch size occurs again, and
run in one call for every later pass of that size.

The kernels are those of an eager pass and give the same bits. What a pass reads, from tokens to the
request table, lies in the memory that :class:`DecodeBuffers` reuses, and lengths are looked at anew
each time.
"""

import logging

from torch import Tensor, nn

from sgl_kernel import Arena, RecordingError, StepGraph, record
from srt.layers.forward_batch_info import ForwardBatch
from srt.utils.inference_mode import in_inference_mode

logger = logging.getLogger(__name__)


class StepGraphRunner:
    """Runs decode passes, recorded where that is possible.

    Args:
        model: A loaded model.
        reserve: Bytes of memory for activations that are worth asking for at once, see
            :class:`sgl_kernel.Arena`.
    """

    def __init__(self, model: nn.Module, reserve: int = 0) -> None:
        self._model = model
        self._arena = Arena(reserve)
        self._graphs: dict[int, tuple[StepGraph, Tensor]] = {}
        # Recording takes two passes, which a size that a growing batch has once would not return.
        # One request alone comes back with its next token.
        self._seen = {1}
        # Why passes of this model cannot be recorded, once that has turned out.
        self.refusal: str | None = None

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """Batch sizes that are replayed from now on."""
        return tuple(sorted(self._graphs))

    @in_inference_mode
    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits `[B, vocab_size]` of a batch of :class:`DecodeBuffers`; the next pass may write
        over them.
        """
        size = batch.input_ids.shape[0]
        recorded = self._graphs.get(size)
        if recorded is not None:
            graph, logits = recorded
            graph.replay()
            return logits
        if size in self._seen and self.refusal is None:
            try:
                self._graphs[size] = record(lambda: self._model(batch), self._arena)
                return self._graphs[size][1]
            except RecordingError as error:
                self.refusal = str(error)
                logger.info("decode passes of this model run one by one: %s", error)
        self._seen.add(size)
        eager: Tensor = self._model(batch)
        return eager
