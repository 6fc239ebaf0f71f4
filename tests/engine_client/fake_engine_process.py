"""An engine process without a model: counts up from the prompt's last token, one token a step.

Run in place of `quire.engine_process.engine_main`; tests also import FakeEngine. Options:
step_s (a step takes so long), predicted_s (so long is each step predicted to take),
hang_at_step (that step never ends; hang_mark is a file that appears when it has begun),
hang_s (building takes so long), num_progress (so often it tells how far the building is),
vocab_size, facts (more of what it says of itself),
fail and crash (the engine can't be built, for a reason of its own and for a bug),
max_builds with build_marks (a folder: after so many builds, no more succeed).
They may also come as JSON in the environment variable FAKE_ENGINE.
A request whose prompt starts with one of the tokens below brings on what its name says, where there
are more tokens with the output token whose number is the second.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from quire.core.adapters import AdapterRef
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.memory_report import BlockMap, MemoryReport, block_map, memory_report
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.engine.tier_work import TierWork
from quire.engine_process.engine_main import main
from quire.errors import CheckpointError, PromptTooLongError

COMMAND = (sys.executable, __file__)
REFUSE, RAISE, EXIT, HUGE, HANG, SEGFAULT, KILL_ADDING = range(900, 907)
HUGE_TOKENS = 60_000_000


class FakeAdapters:
    """Finds an adapter in every folder. One whose name is "kills" ends the process."""

    def find(self, name, path, *, anew=False):
        if name == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        found = Future()
        found.set_result(AdapterRef(name, path, "digest"))
        return found


@dataclass
class FakeStats:
    num_running: int
    num_held_blocks: int
    num_steps: int
    aborted: list


class FakeEngine:
    """Has what the loop uses of `engine.Engine`. Holds one block for each branch that runs."""

    def __init__(self, options):
        self.limits = ModelLimits(options.get("vocab_size", 4096), 512, end_token_ids=(0,))
        self.facts = {"kernels": "fake", "num_blocks": 12, **options.get("facts", {})}
        self.step_s = options.get("step_s", 0.0)
        self.predicted_s = options.get("predicted_s", 0.0)
        self.hang_at_step = options.get("hang_at_step")
        self.hang_mark = options.get("hang_mark")
        self.running = {}
        self.aborted = []
        self.num_steps = 0
        self.on_step = None
        self.on_idle = None
        self.adapters = FakeAdapters()
        groups = (KVGroup((0,), KVKind.FULL, 64),)
        self.memory = KVCacheManager(KVCacheConfig(groups, num_blocks=12))
        self.tier_work = TierWork(self.memory, time.monotonic)

    def add(self, request):
        if request.prompt_token_ids[0] == REFUSE:
            raise PromptTooLongError("the prompt is refused", "prompt")
        if request.prompt_token_ids[0] == KILL_ADDING:
            os.kill(os.getpid(), signal.SIGKILL)
        branches = request.resumed or [(branch, ()) for branch in range(request.n)]
        for branch, token_ids in branches:
            self.running[request.request_id, branch] = [request, len(token_ids)]

    def abort(self, request_id, branch_index=None):
        for key in list(self.running):
            if request_id in (None, key[0]) and branch_index in (None, key[1]):
                del self.running[key]
                self.aborted.append(list(key))

    def clear_prefixes(self):
        self.aborted.append("prefixes")

    def has_work(self, *, launches=True):
        return launches and bool(self.running)

    def stats(self):
        return FakeStats(len(self.running), len(self.running), self.num_steps, self.aborted)

    def memory_report(self) -> MemoryReport:
        return memory_report(self.memory, [])

    def block_map(self, first_block, max_num_blocks) -> BlockMap:
        return block_map(self.memory, [], first_block, max_num_blocks)

    def step(self, *, launches=True):
        if self.on_step is not None:
            self.on_step({request_id for request_id, _ in self.running}, self.predicted_s)
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.num_steps == self.hang_at_step:
            if self.hang_mark is not None:
                Path(self.hang_mark).touch()
            time.sleep(600)
        return [self._advance(key) for key in list(self.running)]

    def _advance(self, key):
        request, count = self.running[key]
        first, *rest = request.prompt_token_ids
        if count >= (rest[0] if rest else 0):
            if first == RAISE:
                raise RuntimeError("the step went wrong")
            if first == EXIT:
                os._exit(7)
            if first == HANG:
                time.sleep(600)
            if first == SEGFAULT:
                os.kill(os.getpid(), signal.SIGSEGV)
        self.running[key][1] = count + 1
        reason = FinishReason.LENGTH if count + 1 >= request.params.max_tokens else None
        if reason is not None:
            del self.running[key]
        tokens = [request.prompt_token_ids[-1] + 1 + count]
        if first == HUGE:
            tokens = tokens * HUGE_TOKENS
        return SequenceOutput(key[0], key[1], tokens, finish_reason=reason)


def build(options, on_progress):
    options = options | json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    for done in range(options.get("num_progress", 0)):
        on_progress("loading nothing", done + 1, options["num_progress"])
    time.sleep(options.get("hang_s", 0.0))
    if "fail" in options:
        raise CheckpointError(options["fail"])
    if "crash" in options:
        raise ZeroDivisionError(options["crash"])
    if "max_builds" in options:
        marks = Path(options["build_marks"])
        if len(list(marks.iterdir())) >= options["max_builds"]:
            raise CheckpointError("the model is not there any more")
        (marks / str(os.getpid())).touch()
    return FakeEngine(options)


if __name__ == "__main__":
    sys.exit(main(build=build))
