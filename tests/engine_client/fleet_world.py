"""A fleet's dispatcher on a clock of its own, and engines that count instead of computing."""

import signal
from collections import deque
from dataclasses import replace
from typing import Any

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.engine_client.engine_slot import EngineSlot
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.messages import AbortRequest, AddRequest, Outputs, decode_to_engine
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death

LIMITS = ModelLimits(vocab_size=1000, max_model_len=1000)


class LeastOpen:
    """A placement: the accepting replica with the fewest requests, by name among equals."""

    def __init__(self) -> None:
        self.accepts: dict[str, bool] = {}
        self.placed: dict[str, str] = {}
        self.forgotten: list[str] = []  # whose caches were emptied
        self.slowness: dict[str, float] = {}

    def forget_prefixes(self, replica: str) -> None:
        self.forgotten.append(replica)

    def set_slowness(self, replica: str, measured: float) -> None:
        self.slowness[replica] = measured

    def add(self, replica: str, limits: Any, facts: Any) -> None:
        assert replica not in self.accepts
        self.accepts[replica] = True

    def remove(self, replica: str) -> None:
        del self.accepts[replica]
        self.placed = {each: at for each, at in self.placed.items() if at != replica}

    def set_accepting(self, replica: str, accepts: bool) -> None:
        self.accepts[replica] = accepts

    def place(self, request: Request) -> str | None:
        assert request.request_id not in self.placed, "it is placed already"
        names = [name for name, accepts in self.accepts.items() if accepts]
        if not names:
            return None
        counts = list(self.placed.values())
        name = min(sorted(names), key=counts.count)
        self.placed[request.request_id] = name
        return name

    def load_of(self, replica: str) -> dict[str, float]:
        return {}

    def on_first_token(self, request_id: str) -> None:
        pass

    def on_end(self, request_id: str) -> None:
        self.placed.pop(request_id, None)


class GivenSlots:
    """Places that a test made."""

    def __init__(self, *slots: Any) -> None:
        self.slots = list(slots)
        #: Slots for the next engines, before copies of the last slot.
        self.next: list[Any] = []
        self.returned: list[str] = []
        self.is_closed = False

    def initial(self) -> list[Any]:
        return self.slots

    def allocate(self, name: str) -> Any:
        return self.next.pop(0) if self.next else replace(self.slots[-1], name=name)

    def release(self, name: str) -> None:
        self.returned.append(name)

    def close(self) -> None:
        self.is_closed = True


async def add_engine(fleet: EngineFleet, slot: EngineSlot) -> None:
    """Scale a fleet up by one engine, which gets this slot. Its slots are `GivenSlots`."""
    slots: Any = fleet.engines.slots
    slots.next.append(slot)
    await fleet.engines.scale(len(fleet.engines.all) + 1)


class EngineOnAWire:
    """What a process would know: the requests that were sent and not ended, and their tokens."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, int], list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.sent: list[Any] = []

    def send(self, frame: bytes) -> None:
        message = decode_to_engine(frame[4:])
        self.sent.append(message)
        if isinstance(message, AddRequest):
            request = message.request
            branches = request.resumed or [(index, ()) for index in range(request.n)]
            for index, token_ids in branches:
                assert (request.request_id, index) not in self.running, "it was sent twice"
                self.running[request.request_id, index] = list(token_ids)
            self.max_tokens[request.request_id] = request.params.max_tokens
            self.prompts[request.request_id] = list(request.prompt_token_ids)
        elif isinstance(message, AbortRequest):
            for key in list(self.running):
                if key[0] == message.request_id and message.branch_index in (None, key[1]):
                    del self.running[key]

    def call_between_steps(self, call: Any) -> None:
        call()

    def step(self) -> Outputs:
        """One token for each branch: a pure function of prompt, branch and position."""
        outputs = []
        for (request_id, branch), token_ids in list(self.running.items()):
            token = token_of(self.prompts[request_id], branch, len(token_ids))
            token_ids.append(token)
            is_last = len(token_ids) == self.max_tokens[request_id]
            outputs.append(
                SequenceOutput(
                    request_id,
                    branch,
                    (token,),
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            )
            if is_last:
                del self.running[request_id, branch]
        return Outputs(outputs)


def token_of(prompt: list[int], branch: int, position: int) -> int:
    """The token that a branch has at a position, wherever it is computed."""
    return (sum(prompt) * 31 + branch * 7 + position * 13) % 997


class Reader:
    """A sink that keeps tokens by branch, and the end."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: deque[Any] = deque()

    def on_output(self, output: SequenceOutput) -> None:
        assert not self.ends, "an output after the end"
        self.tokens.setdefault((output.request_id, output.branch_index), []).extend(
            output.token_ids
        )

    def on_end(self, error: Any) -> None:
        assert not self.ends, "two ends"
        self.ends.append(error)


class FleetWorld:
    """Replicas a, b, ... that are stepped, killed and lost by hand."""

    def __init__(self, *names: str, max_num_open: int = 1000) -> None:
        self.now_s = 0.0
        self.placement = LeastOpen()
        self.dispatcher = FleetDispatcher(max_num_open, lambda: self.now_s, self.placement)
        self.engines: dict[str, EngineOnAWire] = {}
        for name in names:
            self.ready(name)

    def ready(self, name: str) -> EngineOnAWire:
        self.engines[name] = engine = EngineOnAWire()
        self.dispatcher.on_ready(name, engine, LIMITS, {})
        return engine

    def open(self, *names: str, max_tokens: int = 5, n: int = 1) -> Reader:
        reader = Reader()
        requests = [
            Request(name, [ord(letter) for letter in name], DecodingParams(max_tokens), n=n)
            for name in names
        ]
        self.dispatcher.open(requests, reader)
        return reader

    def step(self, *names: str) -> None:
        for name in names or list(self.engines):
            engine = self.engines[name]
            self.dispatcher.on_message(name, engine, engine.step())

    def die(self, name: str, death: Death | None = None) -> frozenset[Death]:
        """A crash in a step of all that the replica knows of, unless it is said otherwise."""
        del self.engines[name]
        return self.dispatcher.on_death(name, death or crash())

    def num_in(self, name: str) -> int:
        replica = self.dispatcher.replicas.get(name)
        return 0 if replica is None else replica.num_branches

    def where(self, request_id: str) -> str | None:
        return self.dispatcher.replicas.name_for(request_id)


def costs(token_s: float) -> list[float]:
    """A cost model in which each token takes so long."""
    samples = [StepSample(StepLoad(num_chunk_tokens=n), n * token_s) for n in (1, 1024)]
    return list(StepCostModel.fit(samples).coefficients)


def crash() -> Death:
    return Death(Activity(Doing.COMPUTING, None), -int(signal.SIGSEGV))


def kill() -> Death:
    """From outside, where the system counts what it kills for lack of memory."""
    return Death(Activity(Doing.COMPUTING, None), -int(signal.SIGKILL), num_oom_kills=0)


def lost() -> Death:
    return Death(Activity(Doing.IDLE), None, is_lost=True)


def expected(name: str, max_tokens: int = 5, n: int = 1) -> dict[tuple[str, int], list[int]]:
    """What comes of a request that runs alone."""
    prompt = [ord(letter) for letter in name]
    return {
        (name, branch): [token_of(prompt, branch, position) for position in range(max_tokens)]
        for branch in range(n)
    }
