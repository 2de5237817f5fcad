"""Turns 16 and 32-bit checkpoints into FP8 ones: `srt quantize`."""
