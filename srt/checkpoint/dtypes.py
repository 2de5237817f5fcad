"""The dtypes that safetensors files hold, by the codes of their headers: the one list of them.

Torch's dtypes of these codes are in `srt.layers.dtypes`.
"""

from collections.abc import Mapping

# Dtype code -> (name, which is Torch's too, bytes an element).
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}

FP8_DTYPE = "F8_E4M3"
# What holds weights that are not quantized.
FLOAT_DTYPES = ("BF16", "F16", "F32")
# Of scales: F8_E8M0 is an exponent of two.
SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0")
# An exponent of two in a byte, where the configuration says so.
BYTE_DTYPE = "U8"


def join_names(codes: tuple[str, ...]) -> str:
    """The dtypes' names for a message: `bfloat16 or float16`."""
    return " or ".join(DTYPES[code][0] for code in codes)
