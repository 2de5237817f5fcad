"""Dtypes of activations that can be asked for; apart, so that the command line knows them without
loading Torch.
"""

DTYPE_CHOICES = ("auto", "bfloat16", "float16")
