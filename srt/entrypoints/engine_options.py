"""What an engine is given besides requests, checked before anything is loaded: numbers are numbers,
texts are texts, and paths are such that a file can have them.
"""

import os
from typing import Any

from srt.errors import RequestError
from srt.mem_cache.cache_size import check_mem_fraction
from srt.sampling.checks import describe, is_integer
from srt.utils.threads import MAX_THREADS

# The cache's table has a row for each, of the context's length.
_MAX_RUNNING_REQUESTS = 65_536

# The largest value, or None. Those in _OPTIONAL may be left out.
_INTEGERS = {
    "max_running_requests": _MAX_RUNNING_REQUESTS,
    "chunked_prefill_size": None,
    "context_length": None,
    "max_total_tokens": None,
    "num_threads": MAX_THREADS,
    "compiled_batch_sizes": _MAX_RUNNING_REQUESTS,
}
_TEXTS = ("dtype", "kv_cache_dtype", "quantization", "revision")
_PATHS = ("model_path", "packed_cache")
_OPTIONAL = frozenset(
    {"context_length", "max_total_tokens", "num_threads", "quantization", "revision"}
    | {"packed_cache", "compiled_batch_sizes"}
)


def check_engine_options(**options: Any) -> None:
    """Raises RequestError unless the options of :class:`srt.Engine` have the right types, and its
    numbers the right ranges as far as these do not depend on the model.
    """
    for name, value in options.items():
        if value is None and name in _OPTIONAL:
            continue
        if name == "compiled_batch_sizes":
            if not isinstance(value, (list, tuple, range)):
                raise _refuse(name, "a list of integers >= 1", value)
            for size in value:
                _check_integer(name, size)
        elif name in _INTEGERS:
            _check_integer(name, value)
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise _refuse(name, "a text", value)
        elif name in _PATHS:
            _check_path(name, value)
        else:
            assert name == "mem_fraction", f"{name} is not in the tables above"
            check_mem_fraction(value)


def _check_integer(name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise _refuse(name, "an integer >= 1", value)
    largest = _INTEGERS[name]
    if largest is not None and value > largest:
        raise _refuse(name, f"at most {largest}", value)


def _check_path(name: str, value: object) -> None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise _refuse(name, "a path", value)


def _refuse(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name}: expected {expected}, found {describe(value)}")
