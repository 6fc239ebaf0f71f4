"""How much each tenant may have open at once, and how many tokens a minute.

Pure but for the clock that it is given. Knows no HTTP and no keys: `http.guard` has found the
tenant. Called by `http_generation`, once per HTTP call.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.errors import (
    ConfigurationError,
    InvalidRequestError,
    TenantBusyError,
    TokenRateError,
)

BUSY_RETRY_AFTER_S = 1.0
"""When one of a tenant's generations ends is not known; by then one may have."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose call it is. name: "" where the server has no keys, so that all clients are one."""

    name: str


NO_TENANT = Tenant("")


@dataclass(slots=True)
class _Usage:
    """What one tenant has open, and the tokens that it may still use.

    Invariant: level, as of level_s, is at most a minute's tokens; it is below zero while more
    tokens have been generated than there were.
    """

    num_open: int
    level: float
    level_s: float


@dataclass(slots=True, eq=False)
class Lease:
    """A call's place among those of its tenant, from `TenantBook.open` until `close`."""

    _book: "TenantBook"
    _account: _Usage
    _num_generations: int
    _num_prompt_tokens: int
    _is_open: bool = field(default=True, init=False)

    def count(self, num_tokens: int) -> None:
        """So many tokens were generated. Never refuses: they are there, as a debt if need be."""
        self._book._spend(self._account, num_tokens)

    def take_back(self) -> None:
        """The call was not taken in: as if it had never come."""
        self._book._spend(self._account, -self._num_prompt_tokens)
        self.close()

    def close(self) -> None:
        """All of the call's generations have ended. May be called twice."""
        if self._is_open:
            self._is_open = False
            self._account.num_open -= self._num_generations


class TenantBook:
    """The accounts of all tenants.

    Tokens are a bucket that holds a minute's worth and is refilled evenly. A prompt is taken out of
    it when its call comes, cached or not; generated tokens as they come. A prompt that is longer
    than a minute's tokens waits for a full bucket and leaves a debt. What an aborted call has not
    generated was never taken; its prompt is not given back.

    Invariant: a tenant's num_open is the sum over its open leases. Every operation is O(1), and
    there are only as many accounts as the operator has made tenants.
    """

    def __init__(
        self,
        max_requests: int | None = None,
        max_tokens_per_minute: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The bounds of each tenant; None: no bound.

        max_requests: generations open at once, waiting ones included: prompts times n of each call.
        max_tokens_per_minute: of prompts and answers together.
        clock: seconds that never run backwards.
        Raises ConfigurationError.
        """
        bounds = {"requests": max_requests, "tokens_per_minute": max_tokens_per_minute}
        for name, bound in bounds.items():
            if bound is not None and bound < 1:
                raise ConfigurationError(
                    f"max_tenant_{name} is {bound}, but must be at least 1; leave it out for no "
                    "bound"
                )
        self._max_requests = max_requests
        self._max_tokens_per_minute = max_tokens_per_minute
        self._clock = clock
        self._accounts: dict[str, _Usage] = {}

    def open(self, tenant: Tenant, num_generations: int, num_prompt_tokens: int) -> Lease:
        """Begin a call with so many generations (prompts times n) and tokens in its prompts.

        Raises TenantBusyError, TokenRateError (both are OverloadedError), and InvalidRequestError
        where the call alone is more than the tenant may ever have open. Then nothing has changed.
        """
        account = self._account(tenant)
        self._check_room(tenant, account, num_generations)
        self._check_tokens(tenant, account, num_prompt_tokens)
        self._spend(account, num_prompt_tokens)
        account.num_open += num_generations
        return Lease(self, account, num_generations, num_prompt_tokens)

    def num_open(self) -> dict[str, int]:
        """Open generations by the tenant's name, of all that were ever seen."""
        return {name: account.num_open for name, account in self._accounts.items()}

    def _account(self, tenant: Tenant) -> _Usage:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = _Usage(0, float(self._max_tokens_per_minute or 0), self._clock())
            self._accounts[tenant.name] = account
        return account

    def _check_room(self, tenant: Tenant, account: _Usage, num_generations: int) -> None:
        bound = self._max_requests
        if bound is None or account.num_open + num_generations <= bound:
            return
        if num_generations > bound:
            raise InvalidRequestError(
                f"the call asks for {num_generations} generations (prompts times n), but "
                f"{_name(tenant)} may have {bound} open at once; ask for fewer",
                "n",
            )
        # Where all clients are one tenant, the number would say what other clients do.
        num_open = account.num_open if tenant.name else "too many"
        raise TenantBusyError(
            f"{_name(tenant)} has {num_open} generations open and asks for {num_generations} more, "
            f"but may have {bound} at once; retry when some have ended",
            BUSY_RETRY_AFTER_S,
        )

    def _check_tokens(self, tenant: Tenant, account: _Usage, num_tokens: int) -> None:
        bound = self._max_tokens_per_minute
        if bound is None:
            return
        self._refill(account, bound)
        missing = min(num_tokens, bound) - account.level
        if missing > 0:
            retry_after_s = missing * 60 / bound
            raise TokenRateError(
                f"{_name(tenant)} has used up its {bound} tokens per minute; the {num_tokens} of "
                f"this prompt can be taken in {math.ceil(retry_after_s)} seconds",
                retry_after_s,
            )

    def _spend(self, account: _Usage, num_tokens: int) -> None:
        bound = self._max_tokens_per_minute
        if bound is not None:
            self._refill(account, bound)
            account.level -= num_tokens

    def _refill(self, account: _Usage, bound: int) -> None:
        now_s = self._clock()
        account.level = min(bound, account.level + (now_s - account.level_s) * bound / 60)
        account.level_s = now_s


def _name(tenant: Tenant) -> str:
    return f"the tenant {tenant.name!r}" if tenant.name else "this server's one tenant"
