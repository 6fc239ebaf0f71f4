"""Seeds for the prompts of calls without a seed.

Each tenant has its own series of seeds. With one common series, a tenant could infer from its
answers how many calls other tenants have made. Made by `launch`, used by `http_generation`.
"""

import hashlib
import itertools
import secrets

_SEED_BYTES = 8


class Seeds:
    """Draws seeds of 64 bits. May be used by several threads.

    Invariant: if the server has a seed, the n-th seed of a tenant depends only on that seed, the
    tenant's name and n.
    """

    def __init__(self, seed: int | None = None) -> None:
        """With `seed`, the server's seed, the series are the same after every start; None draws
        random seeds."""
        self._seed = seed
        self._numbers: dict[str, itertools.count[int]] = {}

    def draw(self, tenant: str) -> int:
        """The next seed of the tenant with this name, which is "" for all callers of a server
        without keys."""
        if self._seed is None:
            return secrets.randbits(8 * _SEED_BYTES)
        number = next(self._numbers.setdefault(tenant, itertools.count()))
        named = f"{self._seed}:{number}:{tenant}".encode()
        digest = hashlib.blake2b(named, digest_size=_SEED_BYTES, person=b"quire-seed")
        return int.from_bytes(digest.digest(), "little")
