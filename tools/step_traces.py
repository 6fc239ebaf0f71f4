"""Digests of every plan and output of simulated worlds, to compare two versions of the core.

`python tools/step_traces.py > after.txt` prints a line for each seed. A refactoring that changes no
behaviour changes no line. Run the script before and after, each tree with its own copy:

    (cd ../before && PYTHONPATH=src python tools/step_traces.py) > before.txt
    PYTHONPATH=src python tools/step_traces.py | diff before.txt -

The worlds are those of `python -m quire.simulation --everything`: forks, beams, faults, all
policies and eviction orders. In two of three worlds, `SchedulerDriver` calls the scheduler instead
of the engine's loop, so that traces don't depend on that loop. A digest covers only values,
not the names of modules, classes and fields, so renaming changes no digest. The value of an
enumeration member is its text, or its position if it is not a text. Empty fields at the end of a
record and counts of 0 in a report are left out, so that unused fields can be removed.
"""

import argparse
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from quire.core.adapters import BASE_MODEL
from quire.core.request import Request, SequenceOutput
from quire.core.scheduling.running_set import constrained
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import make_sequences
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.simulation import simulator
from quire.simulation.checked_device import CheckedDevice
from quire.simulation.clients import Client
from quire.simulation.fakes.fake_runner import InjectedFailureError
from quire.simulation.worlds import draw_world

# Fields of a report that differ from run to run, that this script replaces, or that are 0 in these
# worlds and missing in versions without drafts.
NOT_COMPARED = ("steps_per_s", "digest", "num_drafts", "num_accepted_drafts")


def main() -> None:
    """Print the digest of each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--num-worlds", type=int, default=6, help="of each seed (6)")
    parser.add_argument("--num-steps", type=int, default=500, help="of each world (500)")
    parser.add_argument("--check-every", type=int, default=50, help="steps between checks (50)")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # the engine logs each injected failure
    for seed in range(args.first_seed, args.first_seed + args.num_seeds):
        digest = hashlib.blake2b(digest_size=16)
        watch(Scheduler, digest.update)
        for index in range(seed * args.num_worlds, (seed + 1) * args.num_worlds):
            world = draw_world(seed, index, args.num_steps, args.check_every)
            make = simulator.Simulator if index % 3 == 2 else SchedulerWorld
            report = simulator.run_simulator(make(world))
            counts = [
                getattr(report, field.name)
                for field in fields(report)
                if field.name not in NOT_COMPARED and getattr(report, field.name)
            ]
            digest.update(repr(plain(counts)).encode())
        print(f"{seed} {digest.hexdigest()}", flush=True)


class SchedulerDriver(Engine):
    """An engine on a device that is done with a step when it is launched.

    A step's time is observed at once, and clients may abort requests even if no step was planned.
    """

    def step(self, *, launches: bool = True) -> list[SequenceOutput]:
        """Plan and execute a step, and apply the oldest result unless its step may stay in
        flight."""
        device, scheduler = self._runner, self.scheduler
        assert isinstance(device, CheckedDevice)
        outputs: list[SequenceOutput] = []
        places: Sequence[int] = ()
        try:
            plan = self._execute(device) if scheduler.has_unfinished else None
            device.watcher.on_sampled()
            in_flight = scheduler.num_steps_in_flight
            if in_flight > self.overlap or (in_flight and plan is None):
                outputs = scheduler.apply(device.runner.result())
                places = scheduler.event_places
            elif plan is None:
                self.tier_work.wait()
        except InjectedFailureError as failure:
            device.runner.reset()
            outputs = scheduler.recover(str(failure))
            places = range(len(outputs))
        self._record_outputs(outputs, places, 0, self.clock())
        return outputs

    def _execute(self, device: CheckedDevice) -> StepPlan | None:
        scheduler, world = self.scheduler, device.watcher
        assert isinstance(world, SchedulerWorld)
        plan = scheduler.schedule(world.clock.now_s)
        if plan is None:
            return None
        seconds = world.on_plan(plan)
        world.clock.now_s += seconds
        masks = self.grammars.begin_masks(plan.step_id, constrained(scheduler.running_set))
        device.runner.execute(plan)
        device.runner.sample(masks.collect())
        scheduler.pacer.observe(plan.step_id, seconds)
        self.tier_work.observe(plan.step_id, seconds)
        return plan


class SchedulerWorld(simulator.Simulator):
    """A simulation with a `SchedulerDriver`, in which forks go on after crashes as they are."""

    def _start_engine(self) -> None:
        super()._start_engine()
        engine = self.engine
        self.engine = SchedulerDriver(
            self.scheduler,
            engine._runner,
            engine.limits,
            clock=self.clock,
            overlap=engine.overlap,
        )
        self.engine.grammars = engine.grammars

    def _resume(self, request: Request, clients: list[Client]) -> None:
        root = self.memory.prefixes.start_chain(request.cache_domain, BASE_MODEL)
        now_s, request_id = self.clock.now_s, request.request_id
        groups = make_sequences(request, self.config.max_model_len, root, now_s)
        made = {sequence.branch_index: sequence for group in groups for sequence in group}
        for client in clients:  # a beam search begins with one sequence
            client.sequence = made.get(client.branch_index, groups[0][0])
        for group in self.engine.grammars.begin(self.scheduler, groups, now_s):
            self.scheduler.add(group, now_s)
        self.engine._requests.setdefault(request_id, []).extend(made.values())
        self.engine._next_branch[request_id] = self.clients.next_branch_index(request_id)


def watch(scheduler: Any, take: Callable[[bytes], None]) -> None:
    """Have `take` called with what the three methods of the loop are given and return."""
    for name in ("schedule", "apply", "recover"):
        method = getattr(scheduler, name)
        setattr(scheduler, name, _watched(getattr(method, "watched", method), take))


def _watched(method: Any, take: Callable[[bytes], None]) -> Any:
    def call(self: Any, *arguments: Any) -> Any:
        found = method(self, *arguments)
        take(repr((plain(arguments), plain(found))).encode())
        return found

    call.watched = method  # type: ignore[attr-defined]
    return call


def plain(value: Any) -> Any:
    """The value as tuples, numbers and texts."""
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else list(type(value)).index(value)
    if is_dataclass(value):
        return _record([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, Mapping):
        return tuple((plain(key), plain(entry)) for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return _record(value) if hasattr(value, "_fields") else tuple(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(plain, value)))
    assert value is None or isinstance(value, (bool, int, float, str, bytes)), type(value)
    return value


def _record(values: Any) -> tuple[Any, ...]:
    found = [plain(value) for value in values]
    while found and found[-1] in (None, ()):
        found.pop()
    return tuple(found)


if __name__ == "__main__":
    main()
