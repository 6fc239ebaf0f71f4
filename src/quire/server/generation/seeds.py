"""Seeds for the prompts of requests that name none.

Drawn per tenant: from one series for all, each tenant could learn from the answers to its own calls
how many the others have made. Made by `launch`, used by `http_generation`.
"""

import hashlib
import itertools
import secrets

_SEED_BYTES = 8


class Seeds:
    """Draws seeds of 64 bits. May be used by several threads.

    Invariant: with a seed of the server, the n-th seed of a tenant depends on that seed, the
    tenant's name and n, and on nothing else.
    """

    def __init__(self, seed: int | None = None) -> None:
        """seed: the server's own, from which the same seeds are made at every start; None: they are
        random."""
        self._seed = seed
        self._numbers: dict[str, itertools.count[int]] = {}

    def draw(self, tenant: str) -> int:
        """The tenant's next seed. tenant: its name; "" where there are no keys."""
        if self._seed is None:
            return secrets.randbits(8 * _SEED_BYTES)
        number = next(self._numbers.setdefault(tenant, itertools.count()))
        named = f"{self._seed}:{number}:{tenant}".encode()
        digest = hashlib.blake2b(named, digest_size=_SEED_BYTES, person=b"quire-seed")
        return int.from_bytes(digest.digest(), "little")
