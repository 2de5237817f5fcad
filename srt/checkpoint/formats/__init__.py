"""Quantization formats: one module reads the configuration of each."""
