"""Random numbers that are a function of a seed and of where they are used.

There is no generator whose state a failed, repeated or speculative pass could leave behind: the
number for a request's n-th token is the same however often, and in whatever order, it is asked for.
"""

import hashlib
import secrets
import struct

SEED_LIMIT = 2**64
"""Seeds are integers from 0 to below this; each gives numbers of its own."""


def random_seed() -> int:
    """A seed from the operating system's randomness, also after a fork another one each time."""
    return secrets.randbits(64)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53: BLAKE2b of seed, position and a zero, each as 64
    bits, little-endian.

    Args:
        seed: From 0 to below `SEED_LIMIT`.
        position: Index of the token among those that the request generates.
    """
    block = struct.pack("<QQQ", seed, position, 0)
    digest = hashlib.blake2b(block, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)
