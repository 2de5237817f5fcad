"""The version of srt and the range of kernel versions it works with."""

__version__ = "0.1.0"

KERNEL_DISTRIBUTION = "sgl-kernel-cpu"
KERNEL_VERSIONS = ">=0.4.0,<0.5.0"
