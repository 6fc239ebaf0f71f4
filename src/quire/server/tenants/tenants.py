"""Bounds of each tenant: generations open at once, and tokens per minute.

`http.guard` determines a call's tenant from its key. Called by `http_generation`, once per HTTP
call.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.errors import (
    ConfigurationError,
    InvalidRequestError,
    TenantBusyError,
    TokenRateError,
)

BUSY_RETRY_AFTER_S = 1.0
"""The Retry-After, in seconds, for a busy tenant: a guess, since it is unknown when one of its
generations will end."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant that a call belongs to."""

    #: Name of the tenant; "" on a server without keys, where all clients are one tenant.
    name: str
    #: False if no draft of the tenant's requests may come from its earlier answers, and no answer
    #: may be kept for drafts, whatever a request asks for. Tenants are compared by name alone.
    speculation_history: bool = field(default=True, compare=False)
    #: Names of the models that the tenant may use; None means all.
    models: frozenset[str] | None = field(default=None, compare=False)

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether the tenant may use a model with these names."""
        return self.models is None or not self.models.isdisjoint(names)


NO_TENANT = Tenant("")


@dataclass(slots=True)
class _Usage:
    """The number of one tenant's open generations, and the level of its token bucket.

    Invariant: `level`, the tokens left at time `level_s`, is at most a minute's tokens. It is
    negative after the tenant has used more tokens than it had.
    """

    num_open: int
    level: float
    level_s: float


@dataclass(slots=True, eq=False)
class Lease:
    """Counts one call's generations and tokens against the tenant's bounds. `TenantBook.open`
    begins the lease, `close` ends it."""

    _book: "TenantBook"
    _account: _Usage
    _num_generations: int
    _num_prompt_tokens: int
    _is_open: bool = field(default=True, init=False)

    def count(self, num_tokens: int) -> None:
        """Count generated tokens. Never raises: the tenant's level may become negative."""
        self._book._spend(self._account, num_tokens)

    def cancel(self) -> None:
        """Undo the call's counts, since the engine did not accept the call."""
        self._book._spend(self._account, -self._num_prompt_tokens)
        self.close()

    def close(self) -> None:
        """Stop counting the call's generations as open, once all of them have ended. May be called
        twice."""
        if self._is_open:
            self._is_open = False
            self._account.num_open -= self._num_generations


class TenantBook:
    """The accounts of all tenants.

    Each tenant has a token bucket, which holds a minute's tokens and is refilled evenly. It pays
    for a prompt's tokens, cached or not, when the call arrives, and for each generated token when
    the token arrives. A prompt longer than a minute's tokens needs a full bucket and makes the
    level negative. An aborted call pays for its prompt and for the tokens generated so far.

    Invariant: a tenant's num_open is the sum over its open leases. Every operation is O(1), and
    there is at most one account for each tenant that the operator has defined.
    """

    def __init__(
        self,
        max_requests: int | None = None,
        max_tokens_per_minute: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The bounds of each tenant; None means no bound. Raises ConfigurationError.

        `max_requests` bounds open generations (prompts times n), including waiting ones.
        `max_tokens_per_minute` bounds tokens of prompts and answers together. `clock` is in seconds
        and never runs backwards.
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
        """Begin a call with this many generations (prompts times n) and prompt tokens.

        Raises TenantBusyError, TokenRateError (both are OverloadedError), and InvalidRequestError
        if the call alone exceeds the tenant's bound. After an error nothing has changed.
        """
        account = self._account(tenant)
        self._check_room(tenant, account, num_generations)
        self._check_tokens(tenant, account, num_prompt_tokens)
        self._spend(account, num_prompt_tokens)
        account.num_open += num_generations
        return Lease(self, account, num_generations, num_prompt_tokens)

    def num_open(self) -> dict[str, int]:
        """Number of open generations of each tenant that has ever made a call, by name."""
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
        # If all clients are one tenant, the number would reveal the calls of other clients.
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
