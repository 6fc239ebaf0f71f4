"""Decides which models are in memory: loads them for calls, and unloads those used least recently.

A call enters its model, which loads it if necessary, and leaves at the end of its answer. The
models together keep within a budget of bytes. Calls for a model that does not fit wait in a queue:
the model that waited longest comes first. If models without calls take too little memory, models
with calls get no new calls after PATIENCE_S, so that their last answers end and they can be
unloaded. No answer is cut. Made by `launch`; `served_models` calls it. Imports no torch.
"""

import asyncio
import math
from collections.abc import Sequence

from quire.core.memory.memory_report import format_bytes
from quire.engine_client.fleet_sleep import WAIT_S, SleepMode
from quire.errors import InsufficientMemoryError, OverloadedError, QuireError
from quire.observability.log import get_logger
from quire.server.hosted_model import HostedModel, NoRoomError, Phase, Waiter
from quire.server.model_moves import ModelMoves
from quire.server.service import Service

PATIENCE_S = 2.0
"""Models in use get no new calls once a call has waited for memory, and all loaded models have been
in memory, for this many seconds. The delay bounds how often two models replace each other."""

REST_S = 30.0
"""Batches may unload a model only this many seconds after its latest live call. Otherwise each
pause between two live calls would cost the model a load."""

logger = get_logger(__name__)


class ModelRoom:
    """The memory of a server's models. Belongs to one event loop.

    Invariants: the bytes reserved for all models are at most the budget, unless a model has taken
    more than was expected. No model is unloaded while it has calls, unless the operator asks for
    it. `_queue` has each model with waiting calls that is not being loaded.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        budget_bytes: int,
        wait_s: float,
        max_waiting: int,
    ) -> None:
        """`wait_s` is the time for which a call waits for memory, `max_waiting` the number of calls
        that may wait."""
        self.budget_bytes = budget_bytes
        self._models = models
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        #: Models for which calls wait, the one that waited longest first.
        self._queue: list[HostedModel] = []
        self._moves = ModelMoves(self._on_loaded, self._advance)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for all models."""
        return sum(model.reserved_bytes for model in self._models)

    def try_enter(self, model: HostedModel, *, is_background: bool = False) -> bool:
        """Count a call if its model is in memory; returns whether it is."""
        if not model.takes_calls:
            return False
        model.begin_call(self._loop.time(), is_background=is_background)
        return True

    async def enter(self, model: HostedModel, *, is_background: bool = False) -> None:
        """Wait until the model is in memory, and count the call; `leave` ends it.

        Raises ModelLoadError, NoRoomError after the time limit, OverloadedError if too many calls
        wait. After an error or a cancellation the call is not counted.
        """
        if self.try_enter(model, is_background=is_background):
            return
        model.check_failure(self._loop.time())
        if model.needed_bytes is None:
            await self._moves.prepare(model)
        if self.try_enter(
            model, is_background=is_background
        ):  # another call has loaded it meanwhile
            return
        if sum(len(each.waiting) for each in self._models) >= self._max_waiting:
            raise OverloadedError("too many calls wait for their models to be loaded; retry later")
        admitted = self._loop.create_future()
        timer = self._loop.call_later(self._wait_s, self._expire, model, admitted)
        waiter = Waiter(admitted, self._loop.time(), is_background, timer)
        model.waiting.append(waiter)
        self._advance()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self.leave(model, is_background=is_background)
            raise
        finally:
            timer.cancel()
            if waiter in model.waiting:
                model.waiting.remove(waiter)
                self._advance()

    def leave(self, model: HostedModel, *, is_background: bool = False) -> None:
        """End a call that `enter` has counted."""
        model.num_calls -= 1
        model.note_use(self._loop.time(), is_background=is_background)
        if not model.num_calls and self._queue:
            self._advance()

    def load_pinned(self) -> None:
        """Begin to load the pinned models, as soon as there is room for them. Failures are logged,
        and tried again by calls."""
        for model in self._models:
            if model.is_pinned:
                self._moves.spawn(self._load_pinned(model))

    async def _load_pinned(self, model: HostedModel) -> None:
        while True:
            try:
                await self.enter(model)
            except (NoRoomError, OverloadedError) as error:  # calls came first
                logger.warning("the pinned model %s is not loaded yet: %s", model.name, error)
                await asyncio.sleep(NoRoomError.retry_after_s)
            except QuireError:
                return  # `ModelMoves.fail` has logged it, or the server ends
            else:
                self.leave(model)
                return

    def begin_unload(self, model: HostedModel) -> None:
        """Begin to unload a model that is in memory and has no calls; else do nothing."""
        if model.phase is Phase.LOADED and not model.num_calls:
            self._moves.begin_unload(model)

    async def unload(self, model: HostedModel, mode: SleepMode, wait_s: float = WAIT_S) -> None:
        """Unload a model if it is in memory, or wait for an unload under way. `mode` and `wait_s`
        are those of `FleetSleep.sleep`. Raises QuireError if the model has open calls and can't be
        unloaded."""
        if model.phase is Phase.UNLOADING:
            await self._moves.wait_unloaded(model)
        if model.phase is Phase.LOADED:
            try:
                await self._moves.unload(model, mode, wait_s)
            finally:
                self._advance()

    def on_failed(self, model: HostedModel, service: Service, error: QuireError) -> None:
        """Discard a loaded model whose engines have failed for good. For a model that is being
        loaded or unloaded do nothing, since the load or unload raises the error."""
        if model.service is service and model.phase is Phase.LOADED and not self._is_closed:
            self._moves.begin_discard(model, service, error)

    async def close(self) -> None:
        """End the loads and unloads under way, and all engines."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._moves.close()
        services = [(each.loader, each.service) for each in self._models if each.service]
        await asyncio.gather(*[loader.discard(service) for loader, service in services if loader])

    # ---- the queue --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the loads and unloads that are possible now, and admit calls of loaded models."""
        if self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for model in self._models:
            model.is_closing = False
            if model.waiting and model.phase is not Phase.LOADING and model not in self._queue:
                self._queue.append(model)
        self._unload_idle(self.reserved_bytes - self._leaving_bytes - self.budget_bytes)
        # Serve the queue in order. A model for which only batches wait does not hold up the models
        # after it.
        for model in list(self._queue):
            needs_room = model.waiting and model.phase is not Phase.LOADED
            if not needs_room or (model.phase is Phase.UNLOADED and self._make_room(model)):
                self._queue.remove(model)
            elif model.has_live_calls:
                break
        for model in self._models:
            if model.takes_calls:
                self._admit(model)
            elif model.waiting and model.phase is Phase.LOADED and model not in self._queue:
                self._queue.append(model)

    @property
    def _leaving_bytes(self) -> int:
        return sum(each.reserved_bytes for each in self._models if each.phase is Phase.UNLOADING)

    def _make_room(self, model: HostedModel) -> bool:
        """Begin to load the model if it fits, or to unload others. Returns True if the model need
        not wait any longer."""
        needed = model.needed_bytes
        assert needed is not None, "`enter` has prepared it"
        pinned = sum(each.reserved_bytes for each in self._models if each.is_pinned)
        if needed > self.budget_bytes - pinned:
            beside = f", {format_bytes(pinned)} of which pinned models have" if pinned else ""
            self._moves.fail(
                model,
                InsufficientMemoryError(
                    f"it takes {format_bytes(needed)}, but models_memory is"
                    f" {format_bytes(self.budget_bytes)}{beside}"
                ),
            )
            return True
        missing = needed - (self.budget_bytes - self.reserved_bytes)
        if missing <= 0:
            self._moves.begin_load(model, needed)
            return True
        missing -= self._leaving_bytes
        if not model.has_live_calls:
            before_s = self._loop.time() - REST_S
            if missing > 0 and not self._unload_idle(missing, before_s):
                used_s = [each.last_live_s for each in self._by_use()]
                if later_s := [each for each in used_s if each > before_s]:
                    self._ask_again(min(later_s) - before_s)
            return False
        if missing <= 0 or self._unload_idle(missing):
            return False
        # Only models in use can free the memory: after a while, stop giving them calls.
        candidates = self._by_use()
        since_s = max([model.waiting[0].since_s, *(each.loaded_at_s for each in candidates)])
        if (left_s := since_s + PATIENCE_S - self._loop.time()) > 0:
            self._ask_again(left_s)
            return False
        missing -= sum(each.reserved_bytes for each in candidates if not each.num_calls)
        for victim in candidates:
            if victim.num_calls and missing > 0:
                victim.is_closing = True
                missing -= victim.reserved_bytes
        return False

    def _by_use(self) -> list[HostedModel]:
        """The models that may be unloaded, the one used least recently first."""
        loaded = [
            each for each in self._models if each.phase is Phase.LOADED and not each.is_pinned
        ]
        return sorted(loaded, key=lambda each: each.last_use_s)

    def _unload_idle(self, missing: int, before_s: float = math.inf) -> bool:
        """Begin to unload models without calls, and without a live call since `before_s`. Returns
        False, and unloads none, if all of them take less than `missing` bytes."""
        idle = [
            each for each in self._by_use() if not each.num_calls and each.last_live_s <= before_s
        ]
        if missing > sum(each.reserved_bytes for each in idle):
            return False
        for victim in idle:
            if missing <= 0:
                break
            missing -= victim.reserved_bytes
            self._moves.begin_unload(victim)
        return True

    def _on_loaded(self, model: HostedModel) -> None:
        """Begin the calls for which a model was loaded, before the next model of the queue finds it
        without calls."""
        self._admit(model)
        self._advance()

    def _admit(self, model: HostedModel) -> None:
        """Let the model's waiting calls begin."""
        while model.waiting:
            waiter = model.waiting.popleft()
            if not waiter.admitted.done():
                model.begin_call(self._loop.time(), is_background=waiter.is_background)
                waiter.admitted.set_result(None)

    def _expire(self, model: HostedModel, admitted: "asyncio.Future[None]") -> None:
        """Refuse a call whose time is over, unless its model is being loaded."""
        if not admitted.done() and model.phase is not Phase.LOADING:
            admitted.set_exception(
                NoRoomError(
                    f"the model {model.name!r:.80} is not in memory, and others were in use for"
                    f" {self._wait_s:g} s; retry later"
                )
            )

    def _ask_again(self, after_s: float) -> None:
        if self._timer is not None:
            after_s = min(after_s, self._timer.when() - self._loop.time())
            self._timer.cancel()
        self._timer = self._loop.call_later(after_s, self._advance)
