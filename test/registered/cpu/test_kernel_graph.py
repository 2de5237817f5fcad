"""Recorded ops: a replay gives the bits of the calls that it stands for, on the inputs' present
values, and what cannot be replayed is refused.
"""

import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel import RecordingError, record
from sgl_kernel.testing import isa, random_weight
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import all_ops, sample_calls
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=12, suite="per-commit")

E4M3, F16, F32 = torch.float8_e4m3fn, torch.float16, torch.float32
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
REFUSED = ("convert_weight_packed", "extend_attention_cpu")
FUSED_QKV_EXTEND_SEQ_LENS = 15


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if not isinstance(a, Tensor):
        return bool(a == b)
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def replayable_calls(op: str, seed: int) -> list[tuple[Any, ...]]:
    torch.manual_seed(seed)
    return [
        call
        for call in sample_calls(op)
        if op != "fused_qkv_attention_cpu" or call[FUSED_QKV_EXTEND_SEQ_LENS] is None
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op", [op for op in all_ops() if op not in REFUSED])
def test_a_replay_gives_the_bits_of_a_call(op: str, threads: int) -> None:
    function = getattr(torch.ops.sgl_kernel, op).default
    for tier in TIERS:
        for i in range(len(replayable_calls(op, 0))):
            recorded = replayable_calls(op, 1)[i]
            with isa(tier), torch_threads(threads):
                graph, result = record(partial(function, *recorded))
                assert len(graph) >= 1
                for seed in (2, 3):
                    fresh = replayable_calls(op, seed)[i]
                    for ours, new in zip(recorded, fresh, strict=True):
                        if isinstance(ours, Tensor):
                            ours.copy_(new)
                    graph.replay()
                    expected = function(*fresh)
                    assert same_bits(result, expected), (tier, i)
                    assert same_bits(recorded, fresh), (tier, i)


class Pass:
    """A decoder layer of a decode step, with more work than one thread should do."""

    def __init__(self, requests: int, index: torch.dtype = torch.int64) -> None:
        hidden, heads, kv_heads, head, inner = 256, 8, 4, 32, 320
        qkv = (heads + 2 * kv_heads) * head
        self.ids, self.positions, self.slots = (
            torch.zeros(requests, dtype=index) for _ in range(3)
        )
        self.rows, self.lengths = torch.arange(requests).to(index), torch.ones(requests).to(index)
        self.req_to_token = torch.zeros(requests, 300, dtype=index)
        self.table = torch.randn(700, hidden).bfloat16()
        self.caches = torch.randn(2, 700, kv_heads, head).half()
        self.angles = torch.rand(300, head)
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.norm, self.q_scale = torch.rand(hidden), torch.rand(300) + 0.5
        self.weights = {
            name: sgl_kernel.convert_weight_packed(random_weight(E4M3, *shape))
            for name, shape in {
                "qkv": (qkv, hidden),
                "o": (hidden, heads * head),
                "up": (2 * inner, hidden),
                "down": (hidden, inner),
            }.items()
        }
        self.scale = torch.tensor(2e-4)

    def set(self, lengths: list[int], seed: int) -> None:
        """Requests of these lengths, with tokens and slots of the seed."""
        generator = torch.Generator().manual_seed(seed)
        count = len(lengths)
        self.ids.copy_(torch.randint(0, 700, (count,), generator=generator))
        self.lengths.copy_(torch.tensor(lengths))
        self.positions.copy_((self.lengths - 1).clamp(min=0))
        shuffled = torch.randperm(700, generator=generator)
        for row, length in enumerate(lengths):
            self.req_to_token[row, :length] = shuffled[row : row + length]
            self.slots[row] = shuffled[row + length - 1]

    def run(self) -> Tensor:
        def linear(x: Tensor, name: str, dtype: torch.dtype = F32) -> Tensor:
            return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                x, self.weights[name], self.scale, None, dtype, True
            )

        residual = sgl_kernel.packed_embedding_cpu(self.ids, self.table, False, F32)
        x = sgl_kernel.rmsnorm_cpu(residual, self.norm, 1e-5, F16)
        k_cache, v_cache = self.caches
        x = sgl_kernel.fused_qkv_attention_cpu(
            linear(x, "qkv", F16), self.positions, self.angles, True, self.num_heads,
            self.num_kv_heads, None, None, 0.0, k_cache, v_cache, self.slots, self.req_to_token,
            self.rows, self.lengths, None, 0.2, q_scale=self.q_scale,
        )  # fmt: skip
        x = sgl_kernel.add_rmsnorm_cpu(linear(x, "o"), residual, self.norm, 1e-5, F16)
        x = sgl_kernel.silu_and_mul_cpu(linear(x, "up", F16))
        x = sgl_kernel.add_rmsnorm_cpu(linear(x, "down"), residual, self.norm, 1e-5, F16)
        return sgl_kernel.weight_packed_linear(x, self.table, None, False, F32)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("tier", TIERS)
def test_a_pass_follows_tokens_positions_slots_and_lengths(tier: str, index: torch.dtype) -> None:
    work = Pass(3, index)
    work.set([1, 1, 1], seed=0)
    with isa(tier):
        graph, logits = record(work.run)
        for seed, lengths in enumerate(([1, 1, 1], [299, 3, 40], [2, 300, 1], [0, 130, 65])):
            work.set(lengths, seed)
            before = work.caches.clone()
            for threads in (1, 3, 2):
                with torch_threads(threads):
                    logits.fill_(torch.nan)
                    graph.replay()
                    replayed = logits.clone(), work.caches.clone()
                    work.caches.copy_(before)
                    assert same_bits(replayed, (work.run(), work.caches)), (lengths, threads)


def test_many_replays_on_more_threads_than_processors() -> None:
    work = Pass(2)
    work.set([70, 200], seed=1)
    with torch_threads(5):
        graph, logits = record(work.run)
        expected = logits.clone()
        for _ in range(300):
            logits.fill_(torch.nan)
            graph.replay()
            assert torch.equal(logits, expected)


def index_calls() -> dict[str, tuple[dict[str, Any], dict[str, tuple[Any, Any]]]]:
    """Op -> its arguments, and for each of its indices another valid value and an invalid one."""
    x, weight = torch.randn(2, 8).half(), torch.randn(9, 8).bfloat16()
    heads, angles = torch.randn(2, 4, 8).half(), torch.rand(5, 8)
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    caches = {name: torch.randn(6, 1, 8).half() for name in ("k_cache", "v_cache")}
    requests = {
        "req_to_token": torch.tensor([[1, 2, 3], [4, 5, 0], [0, 1, 5]]),
        "req_pool_indices": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([2, 3]),
    }
    at = torch.tensor([3, 1])
    places = {"positions": at, "indices": torch.tensor([2, 4])}
    fused = {
        "qkv": heads.flatten(1), "cos_sin_cache": angles, "is_neox": True, "num_heads": 2,
        "num_kv_heads": 1, "q_weight": None, "k_weight": None, "eps": 0.0, **places, **caches,
    }  # fmt: skip
    of_places = {"positions": ([0, 4], [0, 5]), "indices": ([5, 0], [-1, 0])}
    of_requests = {
        "req_to_token": ([[0, 5, 1], [2, 2, 2], [1, 1, 1]], [[0, 0, 0], [6, 0, 0], [0, 0, 0]]),
        "req_pool_indices": ([2, 0], [0, 3]),
        "seq_lens": ([3, 1], [4, 1]),
    }
    return {
        "packed_embedding_cpu": (
            {"indices": at, "weight": weight, "is_vnni": True},
            {"indices": ([8, 0], [0, 9])},
        ),
        "rotary_embedding_cpu": (
            {"positions": at, "query": x, "key": x.clone(), "head_size": 8,
             "cos_sin_cache": angles, "is_neox": False},
            {"positions": of_places["positions"]},
        ),
        "store_cache_cpu": (
            {"k": k, "v": v, **caches, "indices": places["indices"]},
            {"indices": of_places["indices"]},
        ),
        "fused_qk_norm_rope_store_cpu": (fused, of_places),
        "decode_attention_cpu": (
            {"query": q, **caches, "output": torch.zeros(2, 2, 8), "key": k, "value": v, "loc": at,
             "attn_logits": None, **requests, "sm_scale": 0.5, "logit_cap": 0.0},
            {"loc": of_places["indices"], **of_requests},
        ),
        "fused_qkv_attention_cpu": (
            {**fused, **requests, "extend_seq_lens": None, "sm_scale": 0.5},
            {**of_places, **of_requests},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("op", index_calls())
def test_indices_are_read_and_checked_at_every_replay(op: str, dtype: torch.dtype) -> None:
    arguments, changes = index_calls()[op]
    function = getattr(sgl_kernel, op)
    for name in changes:
        arguments[name] = arguments[name].to(dtype)

    def copies() -> dict[str, Any]:
        return {n: a.clone() if isinstance(a, Tensor) else a for n, a in arguments.items()}

    graph, result = record(lambda: function(**arguments))
    for name, (valid, invalid) in changes.items():
        arguments[name].copy_(torch.tensor(invalid))
        with pytest.raises(RuntimeError) as of_call:
            function(**copies())
        with pytest.raises(RuntimeError) as of_replay:
            graph.replay()
        assert str(of_replay.value) in str(of_call.value)
        assert str(of_replay.value).startswith(f"sgl_kernel::{op}: {name}: expected ")
        assert type(of_replay.value) is RuntimeError
        arguments[name].copy_(torch.tensor(valid))
        fresh = copies()
        graph.replay()
        assert same_bits(result, function(**fresh)), name
        assert same_bits(list(arguments.values()), list(fresh.values())), name


@pytest.mark.parametrize("op", REFUSED)
def test_ops_that_cannot_be_replayed_say_so(op: str) -> None:
    call = getattr(torch.ops.sgl_kernel, op)
    arguments = sample_calls(op)[0]
    with pytest.raises(RecordingError, match=f"sgl_kernel::{op}: graph: expected no recording"):
        record(lambda: call(*arguments))
    call(*arguments)


def test_prefill_in_the_fused_op_cannot_be_replayed() -> None:
    call = torch.ops.sgl_kernel.fused_qkv_attention_cpu
    arguments = sample_calls("fused_qkv_attention_cpu")[1]
    assert arguments[FUSED_QKV_EXTEND_SEQ_LENS] is not None
    with pytest.raises(RecordingError, match="fused_qkv_attention_cpu: graph: expected no record"):
        record(lambda: call(*arguments))


ROWS, WEIGHT = torch.randn(4, 8).half(), torch.rand(8)


def norm() -> Tensor:
    return sgl_kernel.rmsnorm_cpu(ROWS, WEIGHT, 1e-5)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("named", "foreign"),
    [
        ("aten.add", lambda y: y + 1),
        ("aten.mul_", lambda y: y.mul_(2)),
        ("aten.empty", lambda y: torch.empty(3)),
        ("aten._to_copy|aten.to", lambda y: y.to(F32)),
        ("aten.clone|aten.contiguous", lambda y: y.t().contiguous()),
        ("aten.(clone|_unsafe_view|reshape)", lambda y: y.t().reshape(-1)),
        ("aten.(_local_scalar_dense|item)", lambda y: y[0, 0].item()),
    ],
)
def test_operators_of_others_are_refused_by_name(
    named: str, foreign: Callable[[Tensor], object], inference: bool
) -> None:
    with torch.inference_mode(inference):
        with pytest.raises(RecordingError, match=named):
            record(lambda: foreign(norm()))
        norm()
        graph, _ = record(norm)
    assert len(graph) == 1


@pytest.mark.parametrize("inference", [False, True])
def test_views_are_allowed(inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.randn(6, 32).half()

        def views(x: Tensor) -> Tensor:
            heads = x.view(6, 2, 16).unflatten(2, (2, 8)).flatten(1)
            left, right = heads.narrow(0, 1, 4).split(16, 1)
            same = left[:, :8].to(F16)
            return sgl_kernel.add_rmsnorm_cpu(same, right[..., 8:].detach(), WEIGHT, 1e-5)

        graph, result = record(lambda: views(x))
        x.copy_(torch.randn(6, 32))
        expected = views(x.clone())
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_graph_keeps_its_memory(swapped: bool) -> None:
    """Of tensors that are gone, and of those that have been given other memory."""
    parameters = []

    def make() -> tuple[sgl_kernel.StepGraph, Tensor, Tensor]:
        x, weight = torch.randn(3, 4096).half(), torch.rand(4096)
        graph, out = record(
            lambda: sgl_kernel.rmsnorm_cpu(sgl_kernel.rmsnorm_cpu(x, weight, 1e-5), weight, 1e-5)
        )
        expected = out.clone()
        if swapped:
            parameters.append(weight)
            weight.data = torch.full((4096,), torch.nan)
        return graph, out, expected

    graph, out, expected = make()
    gc.collect()
    garbage = [torch.full((3, 4096), torch.nan, dtype=F16) for _ in range(20)]
    garbage += [torch.full((4096,), torch.nan) for _ in range(20)]
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    assert all(tensor.isnan().all() for tensor in garbage)


def test_an_empty_graph() -> None:
    graph, result = record(lambda: 5)
    graph.replay()
    assert (len(graph), result) == (0, 5)


def test_recordings_do_not_nest() -> None:
    def nested() -> None:
        with pytest.raises(RecordingError, match="this thread is recording already"):
            record(norm)
        norm()

    graph, _ = record(nested)
    assert len(graph) == 1


def test_a_replay_cannot_be_recorded() -> None:
    graph, _ = record(norm)
    with pytest.raises(RecordingError, match=r"StepGraph\.replay: graph: expected no recording"):
        record(graph.replay)
    graph.replay()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_recording(error: type[BaseException]) -> None:
    def fail() -> None:
        norm()
        raise error

    with pytest.raises(error):
        record(fail)
    graph, _ = record(norm)
    assert len(graph) == 1


def test_an_op_that_refuses_its_arguments_gives_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="rmsnorm_cpu: weight: expected size 8") as caught:
        record(lambda: sgl_kernel.rmsnorm_cpu(ROWS, WEIGHT[:7], 1e-5))
    assert not isinstance(caught.value, RecordingError)


def test_recording_is_per_thread() -> None:
    lengths: list[int] = []
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def work() -> None:
        norm()
        inside.wait()
        outside.wait()

    def record_work() -> None:
        lengths.append(len(record(work)[0]))

    thread = threading.Thread(target=record_work)
    thread.start()
    inside.wait()
    norm()
    graph, _ = record(lambda: (norm(), norm()))
    outside.wait()
    thread.join()
    assert (lengths, len(graph)) == ([1], 2)


def test_graphs_of_several_threads() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        layer = Pass(2)
        layer.set([100 + seed, 3], seed)
        graph, logits = record(layer.run)
        expected = logits.clone()
        for _ in range(50):
            logits.fill_(torch.nan)
            graph.replay()
            if not torch.equal(logits, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_graphs_cannot_be_copied(copied: Callable[[object], object]) -> None:
    graph, _ = record(norm)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(graph)


def test_a_process_that_records_loads_no_compiler_and_ends_in_silence() -> None:
    code = """
import sys, torch, sgl_kernel
x, w = torch.randn(4, 8), torch.rand(8)
graph, _ = sgl_kernel.record(lambda: sgl_kernel.rmsnorm_cpu(x, w, 1e-5))
graph.cycle = sys.modules["kept"] = [graph]
graph.replay()
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
