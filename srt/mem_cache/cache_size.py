"""How many tokens the KV cache holds."""

from srt.errors import RequestError


def choose_cache_size(
    bytes_per_token: int,
    *,
    wanted: int,
    max_total_tokens: int | None,
    mem_fraction: float,
    available: int | None,
) -> int:
    """Tokens of the KV cache.

    Args:
        bytes_per_token: Memory of one token over all layers.
        wanted: Tokens that could be used at all; more are not taken.
        max_total_tokens: The user's choice, or None.
        mem_fraction: Share of `available` that the cache may take where the user has not chosen, in
            (0, 1].
        available: Bytes of memory that new allocations can get, cgroup limits considered; None
            where the system does not tell.

    Raises:
        RequestError: The user's choice does not fit into the memory, or not even one token does.
    """
    if max_total_tokens is not None:
        needed = max_total_tokens * bytes_per_token
        if available is not None and needed > available:
            raise RequestError(
                f"a KV cache of {max_total_tokens} tokens takes {needed} bytes "
                f"({bytes_per_token} a token); {available} are free, enough for "
                f"{available // bytes_per_token} tokens"
            )
        return max_total_tokens
    if available is None:
        return wanted
    fitting = int(available * mem_fraction) // bytes_per_token
    if fitting < 1:
        raise RequestError(
            f"no memory for a KV cache: {available} bytes are free, of which it may take "
            f"{mem_fraction:g}; a token takes {bytes_per_token}"
        )
    return min(wanted, fitting)
