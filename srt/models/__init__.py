"""The decoder that the architectures share, and what each adds to it."""
