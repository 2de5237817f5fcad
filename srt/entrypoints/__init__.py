"""The engine: requests in, text out."""
