"""Dtypes of activations that can be asked for; apart, so that the command line knows them without
loading Torch. float32 is for finding out what a rounding costs.
"""

DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32")
