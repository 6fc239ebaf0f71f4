"""Serves a load with a real engine, as a plan says that it would be.

By the clock on the wall; or, on a machine that others use, by the processor time of an engine with
one thread: what others take of the machine is then not counted, and pauses between arrivals are
passed over.
"""

import time
from collections import deque
from collections.abc import Sequence

from quire.core.request import Request
from quire.engine.engine import Engine
from quire.planning.load import LoadRequest
from quire.planning.measuring import usual_params
from quire.planning.virtual_run import RunOutcome

_SPIN_S = 0.0005
"""Sleeping is not this exact: the rest of a pause is waited for."""


def serve(engine: Engine, load: Sequence[LoadRequest], *, by_processor: bool = False) -> RunOutcome:
    """Serve all of it, with an empty prefix cache at the beginning. engine: without requests."""
    clock = time.process_time if by_processor else time.perf_counter
    engine.clear_prefixes()
    outcome, waiting = RunOutcome(), deque(enumerate(load))
    last_s: dict[str, float] = {}
    vocab = engine.limits.vocab_size
    prompts = [[token % vocab for token in each.prompt] for each in load]
    began_s = clock()
    while waiting or engine.has_work():
        now_s = clock() - began_s
        while waiting and waiting[0][1].at_s <= now_s:
            number, wanted = waiting.popleft()
            params = usual_params(wanted.num_output_tokens, engine.limits.defaults, number)
            engine.add(Request(str(number), prompts[number], params))
            outcome.num_prompt_tokens += len(wanted.prompt)
        if not engine.has_work() and by_processor:
            began_s -= waiting[0][1].at_s - now_s
            continue
        if not engine.has_work():
            time.sleep(max(0.0, waiting[0][1].at_s - now_s - _SPIN_S))
            continue
        outputs = engine.step()
        outcome.num_steps += 1
        now_s = clock() - began_s
        for output in outputs:
            name = output.request_id
            if name in last_s:
                outcome.itl_s.append(now_s - last_s[name])
            else:
                outcome.ttft_s.append(now_s - load[int(name)].at_s)
            last_s[name] = now_s
            outcome.num_output_tokens += len(output.token_ids)
    outcome.duration_s = clock() - began_s
    return outcome
