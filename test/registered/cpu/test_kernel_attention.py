"""Attention over the paged KV cache against float64, on every tier that this machine has."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import UNIT_ROUNDOFF, check_close, isa
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels.references import reference_attention
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=25, suite="per-commit")

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
U = UNIT_ROUNDOFF[F32]
SLOTS, CONTEXT = 600, 512


@dataclass
class Pool:
    """A KV cache, and three requests whose tokens lie anywhere in it."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    req_to_token: Tensor = field(
        default_factory=lambda: torch.stack(
            [torch.randperm(SLOTS)[:CONTEXT] for _ in range(5)]
        ).int()
    )
    req_pool_indices: Tensor = field(default_factory=lambda: torch.tensor([3, 0, 4]))

    def slots(self, request: int, length: int) -> Tensor:
        return self.req_to_token[self.req_pool_indices[request], :length].long()


@dataclass(frozen=True)
class Options:
    """What changes the scores and who sees them."""

    logit_cap: float = 0.0
    sliding_window: int = 0
    sinks: Tensor | None = None


def random_pool(
    kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, scales: bool = False
) -> Pool:
    def cache(width: int) -> Tensor:
        return torch.randn(SLOTS, kv_heads, width).to(dtype)

    return Pool(cache(head_dim), cache(v_head_dim), *((0.3, 1.7) if scales else (1.0, 1.0)))


def reference(
    q: Tensor, pool: Pool, request: int, seq_len: int, scale: float, options: Options
) -> tuple[Tensor, Tensor]:
    """Outputs of the last tokens of a request in float64, and a bound on float32's error."""
    slots = pool.slots(request, seq_len)
    k = pool.k_cache[slots].double() * pool.k_scale
    v = pool.v_cache[slots].double() * pool.v_scale
    return reference_attention(
        q, k, v, scale, options.logit_cap, options.sliding_window, options.sinks
    )


def decode(q: Tensor, pool: Pool, seq_lens: list[int], scale: float, options: Options) -> Tensor:
    out = torch.full((*q.shape[:2], pool.v_cache.shape[2]), math.nan, dtype=q.dtype)
    sgl_kernel.decode_attention_cpu(
        q, pool.k_cache, pool.v_cache, out, None, None, None, None,
        pool.req_to_token, pool.req_pool_indices[: len(seq_lens)], torch.tensor(seq_lens).long(),
        scale, options.logit_cap, options.sliding_window, options.sinks, pool.k_scale, pool.v_scale,
    )  # fmt: skip
    return out


def extend(
    q: Tensor, pool: Pool, seq_lens: list[int], extend_lens: list[int], scale: float,
    options: Options, k: Tensor | None = None, v: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.full((*q.shape[:2], pool.v_cache.shape[2]), math.nan, dtype=q.dtype)
    lengths = torch.tensor(extend_lens)
    sgl_kernel.extend_attention_cpu(
        q, k, v, out, pool.k_cache, pool.v_cache, pool.req_to_token,
        pool.req_pool_indices[: len(seq_lens)], torch.tensor(seq_lens), lengths,
        lengths.cumsum(0) - lengths, max(extend_lens), scale, options.logit_cap,
        options.sliding_window, options.sinks, pool.k_scale, pool.v_scale,
    )  # fmt: skip
    return out


def options_for(heads: int) -> list[Options]:
    return [
        Options(),
        Options(logit_cap=5.0, sliding_window=1),
        Options(sliding_window=70, sinks=torch.randn(heads) * 3),
    ]


HEADS = ((1, 1), (9, 3), (8, 2), (20, 1))
DIMS = ((64, 64), (1, 1), (40, 24), (129, 65))


@pytest.mark.parametrize("cache_dtype", [F16, BF16, F32, E4M3])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("tier", TIERS)
def test_decode(tier: str, heads: int, kv_heads: int, cache_dtype: torch.dtype) -> None:
    lengths = [1, 67, 384]
    for (head_dim, v_head_dim), options in itertools.product(DIMS, options_for(heads)):
        pool = random_pool(kv_heads, head_dim, v_head_dim, cache_dtype, cache_dtype == E4M3)
        dtype = {F32: F32, BF16: BF16}.get(cache_dtype, F16)
        # A slice of a fused projection.
        q = torch.randn(3, heads + 2, head_dim).to(dtype)[:, 1:-1]
        scale = head_dim**-0.5
        with isa(tier):
            got = decode(q, pool, lengths, scale, options)
        for r, length in enumerate(lengths):
            expected, bound = reference(q[r : r + 1], pool, r, length, scale, options)
            case = f"{tier} {heads}/{kv_heads} {head_dim} {cache_dtype} {length} {options}"
            check_close(got[r : r + 1], expected, bound, case)


@pytest.mark.parametrize("cache_dtype", [F16, BF16, F32, E4M3])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("tier", TIERS)
def test_extend(tier: str, heads: int, kv_heads: int, cache_dtype: torch.dtype) -> None:
    lengths, new = [5, 131, 200], [5, 131, 13]
    head_dim, v_head_dim = DIMS[(heads + len(tier)) % len(DIMS)]
    for options in options_for(heads):
        pool = random_pool(kv_heads, head_dim, v_head_dim, cache_dtype, cache_dtype == E4M3)
        dtype = {F32: F32, BF16: BF16}.get(cache_dtype, F16)
        q = torch.randn(sum(new), heads, head_dim).to(dtype)
        scale = head_dim**-0.5
        with isa(tier):
            got = extend(q, pool, lengths, new, scale, options)
        for r, (length, part, out) in enumerate(
            zip(lengths, q.split(new), got.split(new), strict=True)
        ):
            case = f"{tier} {heads}/{kv_heads} {head_dim} {cache_dtype} {length} {options}"
            check_close(out, *reference(part, pool, r, length, scale, options), case)


@pytest.mark.parametrize("cache_dtype", [F16, E4M3])
@pytest.mark.parametrize("option", range(3))
@pytest.mark.parametrize("tier", TIERS)
def test_bits_do_not_depend_on_how_a_token_was_computed(
    tier: str, option: int, cache_dtype: torch.dtype
) -> None:
    """Prefill at once or in chunks, decode, alone or in a batch, one thread or many."""
    options = options_for(6)[option]
    pool = random_pool(2, 40, 40, cache_dtype, cache_dtype == E4M3)
    length, others = 200, torch.randn(2, 6, 40).half()
    q = torch.randn(length, 6, 40).half()
    scale = 40**-0.5
    with isa(tier), torch_threads(1):
        whole = extend(q, pool, [length], [length], scale, options)
    with isa(tier), torch_threads(3):
        assert torch.equal(extend(q, pool, [length], [length], scale, options), whole)
        for begin, end in ((0, 1), (1, 60), (60, 128), (128, 199), (199, 200)):
            chunk = extend(q[begin:end], pool, [end], [end - begin], scale, options)
            assert torch.equal(chunk, whole[begin:end]), f"chunk {begin}:{end}"
        for t in (0, 1, 62, 63, 64, 127, 150, 199):
            alone = decode(q[t : t + 1], pool, [t + 1], scale, options)
            batch = decode(torch.cat([q[t : t + 1], others]), pool, [t + 1, 300, 3], scale, options)
            assert torch.equal(alone[0], whole[t]), f"token {t} alone"
            assert torch.equal(batch[0], whole[t]), f"token {t} in a batch"


@pytest.mark.parametrize("tier", TIERS)
def test_new_tokens_beside_the_cache(tier: str) -> None:
    """k_extend and v_extend, as SGLang's front end passes them."""
    pool = random_pool(2, 64, 64, F16)
    new = [70, 3]
    q, k, v = (torch.randn(sum(new), heads, 64).half() for heads in (4, 2, 2))
    lengths = [100, 3]
    stored = Pool(pool.k_cache.clone(), pool.v_cache.clone(), req_to_token=pool.req_to_token)
    stored.req_to_token[0, :3] = torch.arange(590, 593)
    first = 0
    for r, (length, count) in enumerate(zip(lengths, new, strict=True)):
        slots = stored.slots(r, length)[length - count :]
        stored.k_cache[slots], stored.v_cache[slots] = (
            k[first : first + count],
            v[first : first + count],
        )
        first += count
    # The first request's prefix must not have been overwritten by the second one's tokens.
    prefix = stored.slots(0, 30)
    stored.k_cache[prefix], stored.v_cache[prefix] = pool.k_cache[prefix], pool.v_cache[prefix]
    with isa(tier):
        got = extend(q, pool, lengths, new, 0.125, Options(), k, v)
        expected = extend(q, stored, lengths, new, 0.125, Options())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tier", TIERS)
def test_decode_stores_key_and_value_first(tier: str) -> None:
    pool = random_pool(2, 16, 16, E4M3, True)
    q, k, v = (
        torch.randn(2, 4, 16).half(),
        torch.randn(2, 2, 16).half(),
        torch.randn(2, 2, 16).half(),
    )
    lengths, out = [70, 9], torch.empty(2, 4, 16).half()
    loc = torch.stack([pool.slots(r, n)[-1] for r, n in enumerate(lengths)])
    with isa(tier):
        sgl_kernel.decode_attention_cpu(
            q, pool.k_cache, pool.v_cache, out, k, v, loc, torch.empty(1), pool.req_to_token,
            pool.req_pool_indices[:2], torch.tensor(lengths), 0.25, 0.0, 0, None, 0.3, 1.7,
        )  # fmt: skip
    assert torch.equal(pool.k_cache[loc].float(), (k.float() / 0.3).to(E4M3).float())
    assert torch.equal(pool.v_cache[loc].float(), (v.float() / 1.7).to(E4M3).float())
    for r, length in enumerate(lengths):
        expected, bound = reference(q[r : r + 1], pool, r, length, 0.25, Options())
        check_close(out[r : r + 1], expected, bound, tier)


@pytest.mark.parametrize("heads", [16, 150])
@pytest.mark.parametrize("tier", TIERS)
def test_values_in_the_keys(tier: str, heads: int) -> None:
    """MLA: one head of keys, whose first elements are the values."""
    pool = random_pool(1, 72, 72, BF16)
    pool.v_cache = pool.k_cache[..., :64]
    q = torch.randn(2, heads, 72).bfloat16()
    lengths = [100, 65]
    with isa(tier):
        got = decode(q, pool, lengths, 0.1, Options())
        extended = extend(q, pool, lengths, [1, 1], 0.1, Options())
    assert torch.equal(got, extended)
    for r, length in enumerate(lengths):
        expected, bound = reference(q[r : r + 1], pool, r, length, 0.1, Options())
        check_close(got[r : r + 1], expected, bound, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_every_code_of_the_cache_is_exact(tier: str) -> None:
    """With one key a value passes through: every e4m3 code, subnormals and NaN included."""
    pool = random_pool(1, 4, 256, E4M3)
    slot = pool.slots(0, 1)
    pool.v_cache.view(torch.uint8)[slot, 0] = torch.arange(256, dtype=torch.uint8)
    with isa(tier):
        got = decode(torch.randn(1, 1, 4), pool, [1], 1.0, Options())
    expected = pool.v_cache[slot, 0].float()
    torch.testing.assert_close(got[:, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tier", TIERS)
def test_nan_and_infinity_reach_only_those_who_see_them(tier: str) -> None:
    pool = random_pool(1, 16, 16, F16)
    slots = pool.slots(0, 100)
    q = torch.randn(100, 3, 16).half()
    pool.v_cache[slots[40], 0, 5] = math.nan
    pool.v_cache[slots[70], 0, 6] = math.inf
    pool.k_cache[slots[90], 0, 0] = math.nan
    with isa(tier):
        got = extend(q, pool, [100], [100], 0.25, Options())
        windowed = extend(q, pool, [100], [100], 0.25, Options(sliding_window=10))
    token = torch.arange(100).view(100, 1, 1)
    element = torch.arange(16).view(1, 1, 16)
    expected = (token >= 90) | ((token >= 40) & (element == 5))
    assert torch.equal(got.isnan(), expected.expand_as(got))
    infinite = (token >= 70) & (token < 90) & (element == 6)
    assert torch.equal(got.isinf(), infinite.expand_as(got))
    expected = (token >= 90) | ((token >= 40) & (token < 50) & (element == 5))
    assert torch.equal(windowed.isnan(), expected.expand_as(got))


@pytest.mark.parametrize("tier", TIERS)
def test_scores_without_a_finite_one(tier: str) -> None:
    pool = random_pool(1, 4, 4, F32)
    pool.k_cache[:] = 0
    pool.k_cache[pool.slots(0, 70)[:65], 0, 0] = -math.inf
    q = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 4)
    with isa(tier):
        some = decode(q, pool, [70], 1.0, Options())
        none = decode(q, pool, [65], 1.0, Options())
        sink = decode(q, pool, [65], 1.0, Options(sinks=torch.zeros(1)))
    torch.testing.assert_close(some[0, 0], pool.v_cache[pool.slots(0, 70)[65:], 0].mean(0))
    assert none.isnan().all()
    assert torch.equal(sink, torch.zeros_like(sink))


@pytest.mark.parametrize("tier", TIERS)
def test_padding_gives_zeros_and_no_tokens_give_nothing(tier: str) -> None:
    pool = random_pool(2, 16, 16, F16)
    q = torch.randn(3, 4, 16).half()
    with isa(tier):
        got = decode(q, pool, [9, 0, 3], 0.25, Options(sinks=torch.zeros(4)))
        extended = extend(q, pool, [9, 0, 3], [1, 1, 1], 0.25, Options(sinks=torch.zeros(4)))
        empty = decode(q[:0], pool, [], 0.25, Options())
        skipped = extend(q[:2], pool, [9, 7, 0], [2, 0, 0], 0.25, Options())
    assert torch.equal(got, extended)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert got.isfinite().all() and skipped.isfinite().all()
    assert empty.shape == (0, 4, 16)


@pytest.mark.parametrize("cache_dtype", [F16, E4M3])
@pytest.mark.parametrize("extend_lens", [None, [1, 1, 1], [40, 1, 30], [0, 1, 2]])
@pytest.mark.parametrize("tier", TIERS)
def test_fused_op_gives_the_bits_of_its_parts(
    tier: str, extend_lens: list[int] | None, cache_dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = 6, 2, 32
    lens = extend_lens or [1, 1, 1]
    tokens = sum(lens)
    seq_lens = [100, 1, 64] if tokens < 20 else [100, 1, 30]
    pool = random_pool(kv_heads, dim, dim, cache_dtype, cache_dtype == E4M3)
    # No slot belongs to two requests.
    pool.req_to_token[pool.req_pool_indices] = (
        torch.randperm(SLOTS)[:480].view(3, 160).int().repeat(1, 4)[:, :CONTEXT]
    )
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).half()
    angles = torch.rand(128, dim) * 2 - 1
    weights = torch.rand(dim) + 0.5, torch.rand(dim) + 0.5
    positions = torch.cat([torch.arange(s - n, s) for s, n in zip(seq_lens, lens, strict=True)])
    slots = torch.cat(
        [pool.slots(r, s)[s - n :] for r, (s, n) in enumerate(zip(seq_lens, lens, strict=True))]
    )
    parts = Pool(
        pool.k_cache.clone(), pool.v_cache.clone(), pool.k_scale, pool.v_scale, pool.req_to_token
    )
    work = qkv.clone()
    options = Options(sliding_window=50, sinks=torch.randn(heads))
    scales = pool.k_scale, pool.v_scale
    q_scale = torch.rand(128) + 0.5
    with isa(tier):
        got = sgl_kernel.fused_qkv_attention_cpu(
            qkv, positions, angles, True, heads, kv_heads, *weights, 1e-6, pool.k_cache,
            pool.v_cache, slots, pool.req_to_token, pool.req_pool_indices, torch.tensor(seq_lens),
            None if extend_lens is None else torch.tensor(extend_lens), 0.2, 0.0, 50,
            options.sinks, *scales, q_scale,
        )  # fmt: skip
        sgl_kernel.fused_qk_norm_rope_store_cpu(
            work, positions, angles, True, heads, kv_heads, *weights, 1e-6, parts.k_cache,
            parts.v_cache, slots, *scales, q_scale,
        )  # fmt: skip
        q = work[:, : heads * dim].unflatten(1, (heads, dim))
        expected = extend(q, parts, seq_lens, lens, 0.2, options)
    assert torch.equal(got.view_as(expected), expected)
    assert torch.equal(pool.k_cache.view(torch.uint8), parts.k_cache.view(torch.uint8))


def decode_call(**changes: object) -> None:
    call: dict[str, object] = {
        "query": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(10, 2, 8),
        "v_cache": torch.zeros(10, 2, 8),
        "output": torch.zeros(2, 4, 8),
        "key": None,
        "value": None,
        "loc": None,
        "attn_logits": None,
        "req_to_token": torch.zeros(3, 20, dtype=torch.int32),
        "req_pool_indices": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([5, 6]),
        "sm_scale": 1.0,
        "logit_cap": 0.0,
    }
    sgl_kernel.decode_attention_cpu(**{**call, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"req_pool_indices": torch.tensor([0, 3])}, r"req_pool_indices: .*\[0, 3\).*got 3 at 1"),
        ({"req_pool_indices": torch.tensor([0, -1])}, r"req_pool_indices: .*got -1 at 1"),
        ({"req_pool_indices": torch.tensor([0])}, "req_pool_indices: expected size 2"),
        ({"seq_lens": torch.tensor([5, 21])}, r"seq_lens: expected indices in \[0, 21\).*got 21"),
        ({"seq_lens": torch.tensor([-1, 2])}, "seq_lens: .*got -1 at 0"),
        (
            {"req_to_token": torch.full((3, 20), 10)},
            r"req_to_token: .*\[0, 10\).*got 10 .*request 0",
        ),
        ({"req_to_token": torch.full((3, 20), -1)}, "req_to_token: .*got -1"),
        ({"req_to_token": torch.zeros(3, 20)}, "req_to_token: expected dtype"),
        (
            {"query": torch.zeros(2, 3, 8)},
            "query: expected heads that are a multiple of the cache's, 2",
        ),
        ({"query": torch.zeros(2, 4, 7)}, "query: expected size 8"),
        ({"output": torch.zeros(2, 4, 7)}, "output: expected size 8"),
        ({"output": torch.zeros(1, 4, 8).expand(2, 4, 8)}, "output: expected rows that do not"),
        ({"v_cache": torch.zeros(9, 2, 8)}, "v_cache: expected size 10"),
        ({"v_cache": torch.zeros(10, 1, 8)}, "v_cache: expected size 2"),
        ({"k_cache": torch.zeros(10, 2, 8, dtype=torch.int8)}, "k_cache: expected dtype"),
        ({"key": torch.zeros(2, 2, 8)}, "key, value, loc: expected all three or none"),
        ({"sinks": torch.zeros(3)}, "sinks: expected size 4"),
        ({"logit_cap": -1.0}, "logit_cap: expected a finite number above 0, or 0 for none"),
        ({"logit_cap": math.nan}, "logit_cap: expected a finite number above 0"),
        ({"k_scale": 0.0}, "k_scale: expected a finite number above 0"),
        ({"v_scale": math.nan}, "v_scale: expected a finite number above 0"),
        (
            {
                "key": torch.zeros(2, 2, 8),
                "value": torch.zeros(2, 2, 8),
                "loc": torch.tensor([0, 10]),
            },
            r"loc: expected indices in \[0, 10\)",
        ),
    ],
)
def test_decode_refuses(changes: dict[str, object], message: str) -> None:
    decode_call()
    with pytest.raises(RuntimeError, match=f"sgl_kernel::decode_attention_cpu: {message}"):
        decode_call(**changes)


@pytest.mark.parametrize(
    ("seq_lens", "extend_lens", "starts", "longest", "message"),
    [
        ([5, 6], [5, 7], [0, 5], 9, "extend_seq_lens: expected 0 to seq_lens, 6, got 7"),
        ([5, 6], [5, 6], [0, 5], 5, r"extend_seq_lens: .*got 6 at 1"),
        ([5, 6], [5, -1], [0, 5], 9, "extend_seq_lens: .*got -1 at 1"),
        (
            [5, 6],
            [5, 6],
            [0, 7],
            9,
            "extend_start_loc: expected 0 to T - extend_seq_lens, 5, got 7",
        ),
        ([5, 6], [5, 6], [0, -1], 9, "extend_start_loc: .*got -1 at 1"),
        ([5, 6], [5], [0, 5], 9, "extend_seq_lens: expected size 2"),
    ],
)
def test_extend_refuses(
    seq_lens: list[int], extend_lens: list[int], starts: list[int], longest: int, message: str
) -> None:
    cache, q = torch.zeros(10, 2, 8), torch.zeros(11, 4, 8)
    with pytest.raises(RuntimeError, match=f"sgl_kernel::extend_attention_cpu: {message}"):
        sgl_kernel.extend_attention_cpu(
            q, None, None, q.clone(), cache, cache, torch.zeros(3, 20, dtype=torch.int32),
            torch.tensor([0, 1]), torch.tensor(seq_lens), torch.tensor(extend_lens),
            torch.tensor(starts), longest, 1.0, 0.0,
        )  # fmt: skip


def test_fused_op_stores_nothing_when_it_refuses() -> None:
    caches = [torch.zeros(10, 1, 8) for _ in range(2)]
    qkv = torch.ones(2, 4 * 8)
    for seq_lens, extend_lens, message in (
        ([21, 1], None, "seq_lens: expected indices"),
        ([2, 1], [2, 1], "extend_seq_lens: expected lengths that sum to T of qkv, 2, got 3"),
    ):
        with pytest.raises(RuntimeError, match=f"sgl_kernel::fused_qkv_attention_cpu: {message}"):
            sgl_kernel.fused_qkv_attention_cpu(
                qkv, torch.tensor([1, 0]), torch.rand(4, 8), True, 2, 1, None, None, 0.0,
                caches[0], caches[1], torch.tensor([1, 2]), torch.zeros(3, 20, dtype=torch.int32),
                torch.tensor([0, 1]), torch.tensor(seq_lens),
                None if extend_lens is None else torch.tensor(extend_lens), 1.0,
            )  # fmt: skip
    assert torch.equal(qkv, torch.ones_like(qkv))
    assert not caches[0].any() and not caches[1].any()
