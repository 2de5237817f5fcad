"""Dtypes of activations and weights that can be asked for; apart, so that the command line knows
them without loading Torch. float32 is for finding out what a rounding costs.
"""

from collections.abc import Mapping

DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32")

# To quantize a checkpoint while it is loaded -> the scheme of `srt.quantize` that does it.
QUANTIZATION_CHOICES: Mapping[str, str] = {
    "fp8": "per-tensor",
    "fp8-per-channel": "per-channel",
    "fp8-block": "block",
}
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
