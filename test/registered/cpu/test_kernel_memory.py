"""What an op writes overlaps nothing else that it is given, not in part, and not itself."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import all_ops, sample_calls

register_cpu_ci(est_time=6, suite="per-commit")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
WRITING = [
    op
    for op in all_ops()
    if any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in getattr(torch.ops.sgl_kernel, op).default._schema.arguments
    )
]
# Keys and values that a step of latent attention stores may share memory, see below; scratch that
# is not used may lie anywhere.
UNUSED = ("attn_logits",)


def calls_of(op: str) -> list[dict[str, Any]]:
    names = [
        argument.name for argument in getattr(torch.ops.sgl_kernel, op).default._schema.arguments
    ]
    torch.manual_seed(3)
    return [dict(zip(names, call, strict=False)) for call in sample_calls(op)]


def run(op: str, call: dict[str, Any]) -> Any:
    return getattr(torch.ops.sgl_kernel, op).default(**call)


def written_arguments(op: str, call: dict[str, Any]) -> list[str]:
    arguments = getattr(torch.ops.sgl_kernel, op).default._schema.arguments
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if op == "decode_attention_cpu" and call["key"] is None:
        return ["output"]  # the caches are read
    if op == "rotary_embedding_cpu" and call["query"].dim() == 3:
        return []  # only the results are written
    return names


def nbytes(tensor: Tensor) -> int:
    """From the first element to behind the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def placed(tensor: Tensor, memory: torch.UntypedStorage, offset: int) -> Tensor:
    """The same numbers at that byte of `memory`."""
    assert offset % tensor.itemsize == 0
    there = torch.empty(0, dtype=tensor.dtype).set_(
        memory, offset // tensor.itemsize, tensor.shape, tensor.stride()
    )
    return there.copy_(tensor)


def tensors_of(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in call.items() if isinstance(x, Tensor)}


def bits(value: Any) -> list[bytes]:
    tensors = [value] if isinstance(value, Tensor) else value or []
    return [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("op", WRITING)
def test_written_memory_overlaps_no_other(op: str) -> None:
    refused = 0
    for call in calls_of(op)[:3]:
        tensors = tensors_of(call)
        for name, other in itertools.product(written_arguments(op, call), tensors):
            if name == other or other in UNUSED:
                continue
            size = nbytes(tensors[name])
            for offset in {0, size // 2 // 8 * 8, (size - 1) // 8 * 8}:
                memory = torch.UntypedStorage(size + nbytes(tensors[other]) + 64)
                changed = {**call, name: placed(tensors[name], memory, 0)}
                changed[other] = placed(tensors[other], memory, offset)
                if not overlap(changed[name], changed[other]):
                    continue
                before = bytes(memory)
                with pytest.raises(RuntimeError, match=rf"{op}: (\w+): expected memory of its own"):
                    run(op, changed)
                assert bytes(memory) == before, (name, other, offset)
                refused += 1
    assert refused


def overlap(a: Tensor, b: Tensor) -> bool:
    """By looking: a byte that is set through one shows in the other."""
    as_bytes = [
        torch.empty(0, dtype=torch.uint8).set_(
            t.untyped_storage(),
            t.storage_offset() * t.itemsize,
            (*t.shape, t.itemsize),
            (*(s * t.itemsize for s in t.stride()), 1),
        )
        for t in (a, b)
    ]
    kept = a.untyped_storage().clone()
    as_bytes[0].zero_()
    as_bytes[1].fill_(1)
    shared = bool(as_bytes[0].any())
    a.untyped_storage().copy_(kept)
    return shared


@pytest.mark.parametrize("op", WRITING)
def test_tensors_side_by_side_in_one_buffer(op: str) -> None:
    """They give the bits of tensors of their own."""
    for call in calls_of(op):
        apart = {n: x.clone() if isinstance(x, Tensor) else x for n, x in call.items()}
        expected = bits(run(op, apart)) + bits(
            [apart[name] for name in written_arguments(op, call)]
        )
        tensors = tensors_of(call)
        memory = torch.UntypedStorage(sum(nbytes(x) + 8 for x in tensors.values()))
        offset, together = 0, dict(call)
        for name in sorted(tensors):
            together[name] = placed(tensors[name], memory, offset)
            offset += -(-nbytes(tensors[name]) // 8) * 8
        got = bits(run(op, together)) + bits(
            [together[name] for name in written_arguments(op, call)]
        )
        assert got == expected


@pytest.mark.parametrize("op", WRITING)
def test_what_is_written_does_not_overlap_itself(op: str) -> None:
    refused = 0
    for call in calls_of(op):
        for name in written_arguments(op, call):
            tensor = call[name]
            if tensor.shape[0] > 1:
                with pytest.raises(
                    RuntimeError, match=f"{name}: expected rows that do not overlap"
                ):
                    run(op, {**call, name: tensor[:1].clone().expand(tensor.shape)})
                refused += 1
    assert refused


def test_bmm_in_place_is_refused() -> None:
    y = torch.ones(2, 3, 32, dtype=BF16)
    weight = torch.ones(2, 32, 32, dtype=BF16)
    for out in (y, y.detach()):
        with pytest.raises(
            RuntimeError,
            match=r"bmm_cpu: out: expected memory of its own, since it is written while mat1 is "
            r"read, got tensors that overlap: \[2, 3, 32\] and \[2, 3, 32\]",
        ):
            sgl_kernel.bmm_cpu(out, y, weight, False, None)


def test_columns_and_rows_of_one_tensor_are_apart() -> None:
    """As in a fused projection, and in a buffer whose rows belong to two tensors in turn."""
    torch.manual_seed(0)
    weight = torch.randn(4, 16, 32).to(BF16)
    x = torch.randn(5, 4, 32).to(BF16)
    expected = torch.empty(4, 5, 16, dtype=BF16)
    sgl_kernel.bmm_cpu(expected, x.transpose(0, 1), weight, False, None)

    columns = torch.empty(5, 4, 48, dtype=BF16)
    columns[..., :32] = x
    sgl_kernel.bmm_cpu(
        columns[..., 32:].transpose(0, 1), columns[..., :32].transpose(0, 1), weight, False, None
    )
    assert torch.equal(columns[..., 32:].transpose(0, 1), expected)

    rows = torch.empty(5, 2, 4, 32, dtype=BF16)
    rows[:, 0] = x
    out = rows[:, 1, :, :16]
    sgl_kernel.bmm_cpu(out.transpose(0, 1), rows[:, 0].transpose(0, 1), weight, False, None)
    assert torch.equal(out.transpose(0, 1), expected)


def latent_step(**changes: Any) -> dict[str, Any]:
    """A decode step whose values are the first columns of its keys, in the cache as well."""
    torch.manual_seed(1)
    cache, key = torch.randn(9, 1, 40).half(), torch.randn(2, 1, 40).half()
    call = {
        "query": torch.randn(2, 4, 40).half(), "k_cache": cache, "v_cache": cache[..., :32],
        "output": torch.empty(2, 4, 32).half(), "key": key, "value": key[..., :32],
        "loc": torch.tensor([3, 7]), "attn_logits": None,
        "req_to_token": torch.tensor([[1, 2, 3, 0], [5, 7, 0, 0]]),
        "req_pool_indices": torch.tensor([0, 1]), "seq_lens": torch.tensor([3, 2]),
        "sm_scale": 0.2, "logit_cap": 0.0,
    }  # fmt: skip
    return {**call, **changes}


def test_a_latent_cache_is_stored_once() -> None:
    shared = latent_step()
    run("decode_attention_cpu", shared)
    apart = latent_step()
    apart["v_cache"] = apart["v_cache"].clone()
    run("decode_attention_cpu", apart)
    assert torch.equal(shared["output"], apart["output"])
    assert torch.equal(shared["k_cache"], apart["k_cache"])

    stored = latent_step()
    names = ("key", "value", "k_cache", "v_cache", "loc")
    torch.ops.sgl_kernel.store_cache_cpu.default(*[stored[name] for name in names])
    assert torch.equal(stored["k_cache"], apart["k_cache"])


@pytest.mark.parametrize("change", ["value", "k_scale", "v_cache"])
def test_caches_that_share_memory_otherwise_are_refused(change: str) -> None:
    call = latent_step()
    if change == "value":
        call["value"] = call["value"].clone()
    elif change == "k_scale":
        call["k_scale"] = 2.0
    else:
        call["v_cache"] = call["k_cache"][..., 4:36]
    with pytest.raises(RuntimeError, match="k_cache: expected memory of its own"):
        run("decode_attention_cpu", call)
    with pytest.raises(RuntimeError, match="store_cache_cpu: k_cache: expected memory of its own"):
        torch.ops.sgl_kernel.store_cache_cpu.default(
            call["key"], call["value"], call["k_cache"], call["v_cache"], call["loc"],
            k_scale=call.get("k_scale", 1.0),
        )  # fmt: skip
    # Without new tokens the caches are only read.
    run("decode_attention_cpu", {**call, "key": None, "value": None, "loc": None})


@pytest.mark.parametrize("flat", ["keys", "values", "both"])
def test_values_are_the_first_of_each_head_of_keys(flat: str) -> None:
    """Not the first columns of a token's keys, which with several heads are other numbers."""
    torch.manual_seed(2)
    key, cache = torch.randn(3, 2, 8).half(), torch.zeros(4, 2, 8).half()
    value = key[..., :4]
    if flat in ("values", "both"):
        value = key.view(3, 16)[:, :8]  # two heads of four elements: the first head of keys
    stored = key.view(3, 16) if flat in ("keys", "both") else key
    slots = torch.tensor([0, 3, 1])

    def store(v_cache: Tensor) -> None:
        sgl_kernel.store_cache_cpu(stored, value, cache, v_cache, slots)

    if flat == "keys":
        store(cache[..., :4])
        assert torch.equal(cache[slots], key)
        return
    with pytest.raises(RuntimeError, match="k_cache: expected memory of its own"):
        store(cache[..., :4])
    assert not cache.any()
    apart = torch.empty(4, 2, 4).half()
    store(apart)
    assert torch.equal(cache[slots], key)
    assert torch.equal(apart[slots], key[:, 0].reshape(3, 2, 4))


@pytest.mark.parametrize("name", ["key", "value", "loc"])
def test_what_is_stored_is_checked_before_its_memory_is_looked_at(name: str) -> None:
    call = latent_step()
    call[name] = call[name].to_sparse()
    message = f"decode_attention_cpu: {name}: expected a dense"
    with pytest.raises(RuntimeError, match=message):
        run("decode_attention_cpu", call)


@pytest.mark.parametrize(
    ("starts", "lengths", "message"),
    [
        ([0, 1], [2, 2], "got 1 for request 1, among the rows of request 0"),
        ([2, 0], [1, 3], "got 2 for request 0, among the rows of request 1"),
        ([0, 0], [2, 2], "got 0 for request [01], among the rows of request [01]"),
    ],
)
def test_requests_do_not_share_rows(starts: list[int], lengths: list[int], message: str) -> None:
    q, cache = torch.zeros(4, 2, 8), torch.zeros(9, 1, 8)
    table = torch.zeros(2, 4, dtype=torch.int32)
    lens = torch.tensor(lengths)

    def extend(starts: list[int]) -> None:
        sgl_kernel.extend_attention_cpu(
            q, None, None, torch.empty(4, 2, 8), cache, cache, table, torch.tensor([0, 1]), lens,
            lens, torch.tensor(starts), 3, 0.5, 0.0,
        )  # fmt: skip

    with pytest.raises(RuntimeError, match=f"extend_start_loc: .*{message}"):
        extend(starts)
    extend([lengths[1], 0])


def test_a_norm_of_expanded_rows() -> None:
    """What is only read may overlap itself."""
    row, weight = torch.randn(1, 16), torch.rand(16)
    residual = torch.zeros(3, 16)
    out = sgl_kernel.add_rmsnorm_cpu(row.expand(3, 16), residual, weight, 1e-5)
    assert torch.equal(residual, row.expand(3, 16))
    assert torch.equal(out, sgl_kernel.rmsnorm_cpu(row, weight, 1e-5).expand(3, 16))
