"""A runner that only remembers its calls, and a worker's process with one.

Run in place of `quire.engine_process.worker_main`; brings no torch. Options, by name:
calls (a file, to which the calls are written, a line each), fail (building raises a CheckpointError
with that text), bug (building raises another), die_joining (the process ends without a word),
fail_at, die_at and hang_at (executing that step raises, ends the process, or takes a minute).
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from quire.core.step import StepPlan, StepResult
from quire.errors import CheckpointError
from quire.runtime.worker import serve_calls

COMMAND = (sys.executable, __file__)


class RecordingRunner:
    """Satisfies `core.step.Runner`; a step samples its id in row 0."""

    def __init__(self, options=None):
        self.options = options or {}
        self.calls = []
        self._step_ids = []

    def execute(self, plan: StepPlan):
        if plan.step_id == self.options.get("fail_at"):
            raise RuntimeError(f"step {plan.step_id} can't be computed")
        if plan.step_id == self.options.get("die_at"):
            os._exit(9)
        self._note(f"execute {plan}")
        if plan.step_id == self.options.get("hang_at"):
            time.sleep(60)
        self._step_ids.append(plan.step_id)

    def sample(self, masks=None):
        self._note(f"sample {masks}")

    def result(self):
        self._note("result")
        return StepResult(self._step_ids.pop(0), (0,), ((7,),))

    def reset(self):
        self._note("reset")

    def _note(self, call):
        self.calls.append(call)
        if "calls" in self.options:
            with Path(self.options["calls"]).open("a") as file:
                file.write(call + "\n")


def build(join, tell_joining):
    options = join.options
    if "die_joining" in options:
        os._exit(3)
    tell_joining()
    if "fail" in options:
        raise CheckpointError(options["fail"])
    if "bug" in options:
        raise ZeroDivisionError(options["bug"])
    if "calls" in options:
        who = [join.rank, join.size, Path(join.rendezvous).name]
        Path(options["calls"]).write_text(json.dumps(who) + "\n")
    return RecordingRunner(options)


def main():
    sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    return serve_calls(sock, build)


if __name__ == "__main__":
    sys.exit(main())
