"""How many bytes of request bodies a server and each of its tenants hold at once.

A body is under way from its first byte until its call has been answered: so long the server holds
it, and up to eight times its length besides while it is parsed. Where there is no room, an upload
that has stopped gives its own to others. Pure but for the clock that it is given, except
`ParseTurns`, which bounds how many long bodies are parsed at once. Called by `guard` and by
`routes.endpoint`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.errors import TenantBusyError, UploadsFullError
from quire.server.http.json_body import LONG_BODY_BYTES

FREE_BYTES = LONG_BODY_BYTES
"""Of each body, which count for nothing: short calls are never refused for others' long ones. The
number of connections bounds them."""

PROGRESS_BYTES = 64 << 10
SLOW_S = 4.0
"""An upload that has not brought so many bytes in so many seconds may lose its place to another: it
is slower than `guard.MIN_BYTES_PER_S`."""

_RETRY_AFTER_S = 1.0

VERY_LONG_BYTES = 1 << 20
LONG_AT_ONCE = 8
VERY_LONG_AT_ONCE = 2
"""Bodies that are parsed at once, below and above VERY_LONG_BYTES."""


class Upload:
    """One body's share of the budget, from `BodyBudget.open` until `close`.

    progress_s: when it last had brought PROGRESS_BYTES more. on_cut: called if its room is given
    to another body, with which it has ended; None: it has come whole.
    """

    def __init__(self, budget: "BodyBudget", tenant: str, now_s: float) -> None:
        self.tenant = tenant
        self.progress_s = now_s
        self.on_cut: Callable[[], None] | None = None
        self.num_counted = 0
        self._budget = budget
        self._num_bytes = 0
        self._num_at_progress = 0

    @property
    def num_since_progress(self) -> int:
        """Bytes that have come since `progress_s`."""
        return self._num_bytes - self._num_at_progress

    def expect(self, num_bytes: int) -> None:
        """Check that a body of an announced length has room now. Raises as `take`."""
        self._budget.make_room(self, max(0, num_bytes - FREE_BYTES))

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come.

        Raises TenantBusyError and UploadsFullError where there is no room for them.
        """
        self._num_bytes += num_bytes
        if self.num_since_progress >= PROGRESS_BYTES:
            self._num_at_progress = self._num_bytes
            self._budget.note_progress(self)
        more = max(0, self._num_bytes - FREE_BYTES) - self.num_counted
        if more > 0:
            self._budget.make_room(self, more)
            self._budget.count(self, more)

    def end(self) -> None:
        """It has come whole: it can't be cut any more."""
        self.on_cut = None
        self._budget.note_whole(self)

    def close(self) -> None:
        """Its call has been answered. May be called twice."""
        self.end()
        self._budget.count(self, -self.num_counted)


class BodyBudget:
    """The bytes of all bodies under way.

    Invariant: `num_bytes` is the sum of `num_counted` over all open uploads, and `_of_tenant` has
    it by tenant; `_coming` has the uploads that are not whole, by the time of their progress.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_tenant_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes: of all bodies; max_tenant_bytes: of one tenant's, where the server has keys;
        None: no bound. clock: in seconds."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._clock = clock
        self._of_tenant: Counter[str] = Counter()
        self._coming: dict[Upload, None] = {}

    def open(self, tenant: str) -> Upload:
        """Begin a body. tenant: its name; "" where the server has no keys."""
        upload = Upload(self, tenant, self._clock())
        self._coming[upload] = None
        return upload

    def make_room(self, upload: Upload, more: int) -> None:
        """Cut uploads that have stopped until there is room for `more` bytes of `upload`.

        Raises TenantBusyError, UploadsFullError.
        """
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
        """Add to the bytes of an upload that are under way; negative: subtract."""
        upload.num_counted += more
        self.num_bytes += more
        self._of_tenant[upload.tenant] += more
        if not self._of_tenant[upload.tenant]:
            del self._of_tenant[upload.tenant]

    def note_progress(self, upload: Upload) -> None:
        """It comes fast enough, as of now."""
        upload.progress_s = self._clock()
        self.note_whole(upload)
        self._coming[upload] = None

    def note_whole(self, upload: Upload) -> None:
        """It comes no more."""
        self._coming.pop(upload, None)

    def _cut_slow(self, other: Upload, tenant: str | None) -> bool:
        """End the upload that has stopped longest, for `other`; False: all come fast enough.

        tenant: whose; None: anybody's.
        """
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
    """Lets few long bodies be parsed at once: the others wait as they came, which takes less
    memory."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._very_long = asyncio.Semaphore(VERY_LONG_AT_ONCE)

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a body of this length may be parsed; a short one waits for nothing."""
        if num_bytes <= LONG_BODY_BYTES:
            yield
            return
        async with self._very_long if num_bytes > VERY_LONG_BYTES else self._long:
            yield
