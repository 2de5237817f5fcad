"""Dtypes of activations and of the KV cache that can be asked for; apart, so that the command line
knows them without loading Torch. float32 is for finding out what a rounding costs.
"""

from collections.abc import Mapping

# Every spelling that is understood, transformers', vLLM's and SGLang's among them -> ours.
ACTIVATION_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
}
KV_CACHE_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    "fp8_e4m3": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
}
