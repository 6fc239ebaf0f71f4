"""Bounds the bytes of request bodies that a server and each tenant hold at once.

A body counts from its first byte until its call has been answered, since the server keeps the body
until then. Parsing it takes memory of up to eight times its length, so `ParseTurns` bounds how many
long bodies are parsed at once. If there is no room, uploads that have stalled are aborted to make
room for others. Called by `guard` and by `routes.endpoint`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.errors import TenantBusyError, UploadsFullError
from quire.server.http.json_body import LONG_BODY_BYTES

FREE_BYTES = LONG_BODY_BYTES
"""This many bytes of each body are not counted, so that short bodies are never refused because of
long ones. The limit of connections bounds the sum of the uncounted bytes."""

PROGRESS_BYTES = 64 << 10
SLOW_S = 4.0
"""An upload that sends less than PROGRESS_BYTES in this time, in seconds, may be aborted to make
room for another. This rate is below `guard.MIN_BYTES_PER_S`."""

_RETRY_AFTER_S = 1.0

VERY_LONG_BYTES = 1 << 20
LONG_AT_ONCE = 8
VERY_LONG_AT_ONCE = 2
"""Maximum numbers of long bodies that are parsed at once: LONG_AT_ONCE bodies below
VERY_LONG_BYTES, and VERY_LONG_AT_ONCE longer bodies."""


class Upload:
    """The upload of one body, which counts in the budget from `BodyBudget.open` until `close`."""

    def __init__(self, budget: "BodyBudget", tenant: str, now_s: float) -> None:
        self.tenant = tenant
        #: Time at which the latest section of PROGRESS_BYTES was complete, by the budget's clock.
        self.progress_s = now_s
        #: Called if the upload is aborted to make room for another; None if the body is complete.
        self.on_cut: Callable[[], None] | None = None
        self.num_counted = 0
        self._budget = budget
        self._num_bytes = 0
        self._num_at_progress = 0

    @property
    def num_since_progress(self) -> int:
        """Number of bytes that have arrived since `progress_s`."""
        return self._num_bytes - self._num_at_progress

    def expect(self, num_bytes: int) -> None:
        """Check that there is room for a body of this announced length. Raises the errors of
        `count_bytes`."""
        self._budget.make_room(self, max(0, num_bytes - FREE_BYTES))

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises TenantBusyError and UploadsFullError if there is no
        room for them."""
        self._num_bytes += num_bytes
        if self.num_since_progress >= PROGRESS_BYTES:
            self._num_at_progress = self._num_bytes
            self._budget.record_progress(self)
        more = max(0, self._num_bytes - FREE_BYTES) - self.num_counted
        if more > 0:
            self._budget.make_room(self, more)
            self._budget.count(self, more)

    def end(self) -> None:
        """Mark the body as complete, after which it can't be aborted."""
        self.on_cut = None
        self._budget.record_whole(self)

    def close(self) -> None:
        """Release the body's room once its call has been answered. May be called twice."""
        self.end()
        self._budget.count(self, -self.num_counted)


class BodyBudget:
    """The bytes of the bodies of all open calls.

    Invariant: `num_bytes` is the sum of `num_counted` over all open uploads, and `_of_tenant` has
    this sum for each tenant; `_coming` has the incomplete uploads, ordered by `progress_s`.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_tenant_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes` bounds the bodies of all calls, `max_tenant_bytes` the bodies of one tenant's
        calls if the server has keys; None means no bound. `clock` is in seconds."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._clock = clock
        self._of_tenant: Counter[str] = Counter()
        self._coming: dict[Upload, None] = {}

    def open(self, tenant: str) -> Upload:
        """Begin the upload of a tenant's body. `tenant` is "" if the server has no keys."""
        upload = Upload(self, tenant, self._clock())
        self._coming[upload] = None
        return upload

    def make_room(self, upload: Upload, more: int) -> None:
        """Abort stalled uploads until there is room for `more` bytes of `upload`. Raises
        TenantBusyError, UploadsFullError."""
        tenant, bound = upload.tenant, self._max_tenant_bytes
        if tenant and bound is not None:
            while self._of_tenant[tenant] + more > bound:
                if not self._cut_slow(upload, tenant):
                    raise TenantBusyError(
                        f"the tenant {tenant!r} may have {bound} bytes of long bodies under way at"
                        " once, and has no room for this one; retry when some calls have ended",
                        _RETRY_AFTER_S,
                    )
        while self._max_bytes is not None and self.num_bytes + more > self._max_bytes:
            if not self._cut_slow(upload, None):
                raise UploadsFullError(
                    "the server has as many bytes of long bodies under way as it takes at once;"
                    " retry when some calls have ended, or send a shorter body"
                )

    def count(self, upload: Upload, more: int) -> None:
        """Add to the counted bytes of an upload; a negative number subtracts."""
        upload.num_counted += more
        self.num_bytes += more
        self._of_tenant[upload.tenant] += more
        if not self._of_tenant[upload.tenant]:
            del self._of_tenant[upload.tenant]

    def record_progress(self, upload: Upload) -> None:
        """Record that the upload has made progress now."""
        upload.progress_s = self._clock()
        self.record_whole(upload)
        self._coming[upload] = None

    def record_whole(self, upload: Upload) -> None:
        """Record that the upload is complete."""
        self._coming.pop(upload, None)

    def _cut_slow(self, other: Upload, tenant: str | None) -> bool:
        """Abort the upload that has stalled for the longest time; returns False if none has.
        `other` is never aborted. With `tenant`, only this tenant's uploads may be."""
        last_s = self._clock() - SLOW_S
        for upload in self._coming:
            if upload.progress_s > last_s:
                return False
            cut, is_meant = upload.on_cut, tenant in (None, upload.tenant)
            if cut is not None and is_meant and upload.num_counted and upload is not other:
                upload.close()
                cut()
                return True
        return False


class ParseTurns:
    """Bounds how many long bodies are parsed at once. Bodies that wait are raw bytes, which take
    less memory than parsed JSON."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._very_long = asyncio.Semaphore(VERY_LONG_AT_ONCE)

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a body of this length may be parsed. Short bodies never wait."""
        if num_bytes <= LONG_BODY_BYTES:
            yield
            return
        async with self._very_long if num_bytes > VERY_LONG_BYTES else self._long:
            yield
