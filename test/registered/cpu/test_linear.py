"""Linear layers against float64 over the dequantised weight: scales, shards, bias, shapes and
dtypes.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.tensor_meta import TensorMeta
from srt.errors import CheckpointError
from srt.layers.dtypes import dtype_code
from srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from srt.layers.parameter import ModelParameter
from srt.test.ci_register import register_cpu_ci
from srt.utils.tensor_parallel import TensorParallel

register_cpu_ci(est_time=4, suite="per-commit")

E4M3 = torch.float8_e4m3fn


def load(layer: LinearBase, name: str, tensor: Tensor, shard: str | None = None) -> None:
    """What the loader does with one tensor."""
    parameter = layer.get_parameter(name)
    assert isinstance(parameter, ModelParameter)
    shape = tuple(tensor.shape)
    meta = TensorMeta(
        f"layer.{name}", dtype_code(tensor.dtype), shape, Path("f.safetensors"), tensor.nbytes
    )
    parameter.check(meta, shard)
    parameter.load(tensor, meta, shard)


def make_weight(n: int, k: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator).to(E4M3)


def make_input(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(99)).to(dtype)


def assert_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`out` is `x weight^T + bias` up to one rounding to its dtype and float32 sums."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = x.double().abs() @ weight.double().abs().T
    tolerance = torch.finfo(out.dtype).eps * expected.abs() + 2e-6 * bound
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_per_tensor_scale(shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
    layer = ReplicatedLinear(96, 47, quant_config=Fp8Config())
    weight = make_weight(47, 96, 0)
    scale = torch.full(shape, 0.0371).to(scale_dtype)
    load(layer, "weight", weight)
    load(layer, "weight_scale", scale)
    layer.process_weights_after_loading()
    assert layer.get_parameter("weight_scale").numel() == 1
    x = make_input(5, 96)
    assert_product(layer(x), x, weight.float() * scale.float())


@pytest.mark.parametrize("shape", [(47,), (47, 1)])
def test_per_channel_scale(shape: tuple[int, ...]) -> None:
    layer = ReplicatedLinear(96, 47, quant_config=Fp8Config())
    weight = make_weight(47, 96, 0)
    scale = torch.linspace(0.01, 3, 47)
    load(layer, "weight", weight)
    load(layer, "weight_scale", scale.reshape(shape))
    layer.process_weights_after_loading()
    x = make_input(5, 96)
    assert_product(layer(x), x, weight.float() * scale[:, None])


@pytest.mark.parametrize(
    ("scales", "kept"),
    [((0.5, 0.5, 0.5), 1), ((0.5, 0.001, 40.0), 160)],
    ids=["equal scales", "own scales"],
)
def test_merged_shards_keep_their_scales(scales: Sequence[float], kept: int) -> None:
    layer = QKVParallelLinear(96, 32, 3, 1, tp=TensorParallel(), quant_config=Fp8Config())
    weights = [make_weight(n, 96, n + i) for i, n in enumerate((96, 32, 32))]
    for shard, weight, scale in zip(("q_proj", "k_proj", "v_proj"), weights, scales, strict=True):
        load(layer, "weight", weight, shard)
        load(layer, "weight_scale", torch.tensor(scale), shard)
    layer.process_weights_after_loading()
    assert layer.get_parameter("weight_scale").numel() == kept
    x = make_input(3, 96)
    expected = torch.cat([w.float() * s for w, s in zip(weights, scales, strict=True)])
    assert_product(layer(x), x, expected)


def test_prefused_tensor_with_one_scale() -> None:
    layer = MergedColumnParallelLinear(
        64, {"gate_proj": 40, "up_proj": 40}, tp=TensorParallel(), quant_config=Fp8Config()
    )
    weight = make_weight(80, 64, 1)
    load(layer, "weight", weight)
    load(layer, "weight_scale", torch.tensor([0.25]))
    layer.process_weights_after_loading()
    x = make_input(2, 64)
    assert_product(layer(x), x, weight.float() * 0.25)


@pytest.mark.parametrize("quant", [None, Fp8Config()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("lead", [(), (0,), (3,), (2, 3)])
def test_leading_sizes_bias_and_output_dtype(
    quant: Fp8Config | None,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    lead: tuple[int, ...],
) -> None:
    layer = ReplicatedLinear(31, 33, bias=bias_dtype is not None, quant_config=quant)
    weight = make_weight(33, 31, 2) if quant else make_weight(33, 31, 2).to(torch.bfloat16)
    load(layer, "weight", weight)
    if quant:
        load(layer, "weight_scale", torch.tensor(2.0))
    bias = None if bias_dtype is None else torch.linspace(-3, 3, 33).to(bias_dtype)
    if bias is not None:
        load(layer, "bias", bias)
    layer.process_weights_after_loading()
    x = make_input(*lead, 31)
    out = layer(x, out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert_product(out, x, weight.float() * (2 if quant else 1), bias)


def test_float16_activations() -> None:
    layer = ReplicatedLinear(64, 64, quant_config=Fp8Config())
    weight = make_weight(64, 64, 3)
    load(layer, "weight", weight)
    load(layer, "weight_scale", torch.tensor(1.0))
    layer.process_weights_after_loading()
    x = make_input(4, 64, dtype=torch.float16)
    out = layer(x)
    assert out.dtype == torch.float16
    assert_product(out, x, weight.float())


@pytest.mark.parametrize("quant", [None, Fp8Config()], ids=["bf16", "fp8"])
def test_the_packed_weight_takes_the_place_of_the_original(quant: Fp8Config | None) -> None:
    layer = ReplicatedLinear(64, 64, quant_config=quant)
    weight = make_weight(64, 64, 3) if quant else make_weight(64, 64, 3).to(torch.bfloat16)
    load(layer, "weight", weight)
    if quant:
        load(layer, "weight_scale", torch.tensor(1.0))
    layer.process_weights_after_loading()
    assert not isinstance(layer.weight, ModelParameter)
    assert sum(p.nbytes for p in layer.parameters()) == weight.nbytes + (4 if quant else 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
@pytest.mark.parametrize("per_channel", [False, True])
def test_bad_scales_are_refused(value: float, per_channel: bool) -> None:
    layer = ReplicatedLinear(16, 8, quant_config=Fp8Config())
    scale = torch.tensor(value)
    if per_channel:
        scale = torch.ones(8)
        scale[5] = value
    with pytest.raises(CheckpointError, match=r"positive finite.*layer\.weight_scale") as info:
        load(layer, "weight_scale", scale)
    assert f"index {[5] if per_channel else []}" in str(info.value)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_a_weight_is_refused_with_its_row(code: int) -> None:
    layer = ReplicatedLinear(16, 8, quant_config=Fp8Config())
    weight = torch.full((8, 16), 0x7E, dtype=torch.uint8)
    weight[1] = 0xFE
    weight[6, 3] = weight[7, 0] = code
    with pytest.raises(CheckpointError, match=r"layer\.weight.*NaN in row 6"):
        load(layer, "weight", weight.view(E4M3))


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("weight", torch.zeros(8, 15).to(E4M3), r"expected: \[8, 16\]; found: \[8, 15\]"),
        ("weight", torch.zeros(8, 16), "expected: float8_e4m3fn; found: float32"),
        ("weight_scale", torch.ones(7), r"one element, \[8\], \[8, 1\]; found: \[7\]"),
        ("weight_scale", torch.ones(2, 4), r"found: \[2, 4\]"),
        ("weight_scale", torch.ones(8, dtype=torch.int32), "found: int32"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(name: str, tensor: Tensor, named: str) -> None:
    layer = ReplicatedLinear(16, 8, quant_config=Fp8Config())
    with pytest.raises(CheckpointError, match=named) as info:
        load(layer, name, tensor)
    assert info.value.tensor == f"layer.{name}"
    assert info.value.file == Path("f.safetensors")
