"""What the memory allows: a token cannot be decoded faster than the weights that it needs are
read.
"""

import statistics
import time

import torch
from torch import nn

import sgl_kernel  # noqa: F401  (registers the probe)
from srt.bench.workload import Case
from srt.models.decoder import CausalLM

# More than any cache holds, for each thread.
_PROBE_BYTES = 256 << 20
_REPETITIONS = 5


def decode_bytes(model: CausalLM) -> int:
    """Bytes of weights that one token reads: all but the rows of the token table that it does not
    look up.
    """
    table: nn.Parameter = model.model.embed_tokens.weight
    is_read_whole = model.lm_head is None
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if is_read_whole else total - table.nbytes


def read_bandwidth(threads: int) -> float:
    """Bytes a second that all threads together read from memory."""
    buffer = torch.ones(threads * _PROBE_BYTES // 4)
    seconds: list[float] = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        torch.ops.sgl_kernel_benchmark.read_probe.default(buffer)
        seconds.append(time.perf_counter() - started)
    return buffer.nbytes / statistics.median(seconds)


def decode_bound(bandwidth: float, weight_bytes: int, kv_bytes_per_token: int, case: Case) -> float:
    """Tokens a second of a batch that reads the weights once, and each request's keys and values,
    at `bandwidth`.
    """
    length = case.input_len + case.output_len / 2
    step = weight_bytes + case.batch * length * kv_bytes_per_token
    return case.batch * bandwidth / step
