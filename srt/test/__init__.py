"""Helpers shared by the registered tests; not needed at run time."""
