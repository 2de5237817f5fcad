"""The projection from latents to keys and values of multi-head latent attention, in the form that
absorbed attention needs: one product for the queries and one for the attention's output, head by
head.
"""

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.layers.float32 import Float32LinearMethod
from srt.layers.linear import ColumnParallelLinear
from srt.layers.quantization.fp8_linear import Fp8LinearMethod
from srt.utils.tensor_parallel import TensorParallel


class HeadwiseLinear(nn.Module):
    """`y[h] = x[h] W[h]^T` for every head h, by `bmm_cpu`.

    The op takes one scale a head. Scales along N multiply its float32 result; scales along K
    multiply its input, divided by their largest, which stays with the weight.

    Attributes:
        weight: `[H, N, K]`, packed FP8 or bfloat16, or plain float32.
        scale: `[1]` or `[H]` float32, for an FP8 weight.
        input_scale: `[H, K]` float32, or None.
        output_scale: `[H, N]` float32, or None.
    """

    weight: nn.Parameter
    scale: nn.Parameter | None
    input_scale: nn.Parameter | None
    output_scale: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "scale", "input_scale", "output_scale"):
            self.register_parameter(name, None)

    def set_weight(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Takes a weight `[H, N, K]` and packs it; an FP8 one comes with its scales, `[H, 1, 1]`,
        `[H, N, 1]` or `[H, 1, K]` float32.
        """
        weight = weight.contiguous()
        if weight.dtype != torch.float32:
            weight = sgl_kernel.convert_weight_packed(weight)
        self.weight = _parameter(weight)
        if scale is None:
            return
        if scale.shape[1] > 1:
            self.scale = _parameter(torch.ones(1))
            self.output_scale = _parameter(scale.squeeze(2).contiguous())
        else:
            largest = scale.amax(dim=2, keepdim=True)
            self.scale = _parameter(largest.flatten())
            if scale.shape[2] > 1:
                self.input_scale = _parameter((scale / largest).squeeze(1).contiguous())

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[T, H, K]`, of any floating-point dtype, to `[T, H, N]` of `dtype`."""
        if self.weight.dtype == torch.float32:
            return torch.einsum("bhk,hnk->bhn", x, self.weight)
        if self.input_scale is not None:
            x = x * self.input_scale
        out_dtype = dtype if self.output_scale is None else torch.float32
        out = x.new_empty(x.shape[0], x.shape[1], self.weight.shape[1], dtype=out_dtype)
        sgl_kernel.bmm_cpu(
            out.transpose(0, 1), x.to(dtype).transpose(0, 1), self.weight, True, self.scale
        )
        return out if self.output_scale is None else (out * self.output_scale).to(dtype)


class LatentProjection(ColumnParallelLinear):
    """The checkpoint's `kv_b_proj`, held as two factors for each head of this rank.

    FP8 weights stay FP8 where the scales of a head's keys, and of its values, differ along rows or
    along columns of the weight only: per tensor, per channel, and blocks of which a head's part
    spans one row, as DeepSeek's own. Where they differ along both, the factors are held in
    bfloat16, rounded once.

    Args:
        latent: Size of a latent.
        num_heads: Heads of all ranks.
        head_sizes: Sizes of a head's key, without its rotary part, and of its value.
        tp: The ranks that hold the layer.
        quant_config: The checkpoint's format, or None.
        prefix: Full module name.

    Attributes:
        num_heads: H, the heads of this rank.
        w_kc: `[H, kv_lora_rank, qk_nope_head_dim]`, for queries.
        w_vc: `[H, v_head_dim, kv_lora_rank]`, for the attention's output.
    """

    def __init__(
        self,
        latent: int,
        num_heads: int,
        head_sizes: tuple[int, int],
        *,
        tp: TensorParallel,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        heads = tp.part(num_heads, "heads", prefix)
        super().__init__(
            latent, num_heads * sum(head_sizes), tp=tp, quant_config=quant_config, prefix=prefix
        )
        self.num_heads = heads
        self.head_sizes = head_sizes
        self.w_kc = HeadwiseLinear()
        self.w_vc = HeadwiseLinear()

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        weight, scale = self._unpack()
        scales: list[Tensor | None] = [None, None]
        if scale is not None:
            parts = [_simplify(part) for part in self._split(scale)]
            if any(part is None for part in parts):
                weight = (weight.to(torch.float32) * scale).to(torch.bfloat16)
            else:
                scales = list(parts)
        keys, values = self._split(weight)
        # Queries are multiplied by the keys' part from the other side.
        key_scale = None if scales[0] is None else scales[0].transpose(1, 2)
        self.w_kc.set_weight(keys.transpose(1, 2), key_scale)
        self.w_vc.set_weight(values, scales[1])
        for name in [name for name, _ in self.named_parameters(recurse=False)]:
            delattr(self, name)

    def _unpack(self) -> tuple[Tensor, Tensor | None]:
        """The weight `[N, K]` as it is stored, and its scales `[N, 1]` or `[N, K]` if it is FP8."""
        weight = self.get_parameter("weight").data
        if isinstance(self.quant_method, Float32LinearMethod):
            return weight, None
        # Bytes, because FP8 cannot be indexed.
        bits = weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.uint8)
        rows = sgl_kernel.unpack_rows(bits, torch.arange(self.output_size)).view(weight.dtype)
        if not isinstance(self.quant_method, Fp8LinearMethod):
            return rows, None
        return rows, self.quant_method.element_scales(self)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[N, C]` of keys and of values, `[H, size, C]` each."""
        heads = rows.view(self.num_heads, sum(self.head_sizes), rows.shape[1])
        keys, values = heads.split(self.head_sizes, dim=1)
        return keys, values

    def absorb(self, q_nope: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries `[T, H, qk_nope_head_dim]` to `[T, H, kv_lora_rank]`, against latents."""
        return self.w_kc(q_nope, dtype)

    def expand(self, latents: Tensor) -> Tensor:
        """Attention's output over latents `[T, H, kv_lora_rank]` to `[T, H, v_head_dim]`."""
        return self.w_vc(latents, latents.dtype)


def _parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def _simplify(scale: Tensor) -> Tensor | None:
    """Scales `[H, R, C]` without the dimensions that they do not depend on, `[H, R, 1]`,
    `[H, 1, C]` or `[H, 1, 1]`; None if they depend on both.
    """
    by_row = (scale == scale[:, :, :1]).all()
    by_column = (scale == scale[:, :1]).all()
    if not by_row and not by_column:
        return None
    scale = scale[:, :, :1] if by_row else scale
    return scale[:, :1] if by_column else scale
