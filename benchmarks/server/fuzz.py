"""schemathesis over the served OpenAPI document, and damaged bodies: none is answered with 5xx.

    python -m benchmarks.server.fuzz --cases 5000 --damaged 20000 --out fuzz.json

starts `quire serve` (the embedded model, short contexts) and sends bodies that fit the document and
bodies that do not, drawn by Hypothesis from a seed. Every answer must have a status and a content
type that the document knows for that path, and a body of that shape; none may be the server's
fault. The damaged bodies, from `mutations`, go to every route of the application that takes one,
and to the paths of stored responses; none may hold up other calls for longer than --limit-ms, three
times in a row. Afterwards the engine must hold no block. Also used by the tests of the server, with
fewer cases. Needs schemathesis.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis.errors import FlakyStrategyDefinition, Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.server.mutations import damaged, fault_of, routes
from benchmarks.server.serving import served
from benchmarks.server.stalls import Watchers

LOG = Path(tempfile.gettempdir()) / "quire_fuzz.log"
SERVE_ARGUMENTS = ["--num-blocks", "512", "--max-num-seqs", "16", "--max-model-len", "512"]
SERVE_ARGUMENTS += ["--response-store-bytes", "1MiB"]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
POOLING = ("/v1/embeddings", "/score", "/rerank")
WEIGHT = 8
"""How many more cases such a path gets than one that only tells something."""

SHORTEST = 2
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
REQUIRED = ("prompt", "messages", "input", "query", "documents", "text_1", "text_2")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")


@dataclass(slots=True)
class Fuzzed:
    """The counts of calls and answers. failures: one text for each operation that failed."""

    num_cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def shorten(body: Any) -> Any:
    """The request, but for a short answer of the server's model, since only the reading of other
    fields is tested."""
    if not isinstance(body, dict):
        return body
    short = {name: value for name, value in body.items() if name != "model"}
    for name in LENGTHS:
        if type(short.get(name)) is int and short[name] > SHORTEST:
            short[name] = SHORTEST
    if not any(name in short for name in LENGTHS[:3]):
        short["max_output_tokens" if "input" in short else "max_tokens"] = SHORTEST
    return short


def of_any_model(body: Any) -> Any:
    """The request without a model's name, since a random name is hardly ever that of the model."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if name != "model"}


def thin(body: Any, choose: random.Random) -> Any:
    """The request with few of its optional fields. With all fields, the error would always be about
    two fields that contradict each other."""
    if not isinstance(body, dict):
        return body
    rest = [name for name in body if name not in REQUIRED]
    kept = {*REQUIRED, *choose.sample(rest, min(len(rest), choose.randrange(4)))}
    return {name: value for name, value in body.items() if name in kept}


def fuzz(url: str, num_cases: int, seed: int = 0) -> Fuzzed:
    """Try at least num_cases cases, over all operations of the server's document. Operations that
    generate are tried most often. An operation that failed is not tried again."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    heavy = (*GENERATING, *POOLING)
    weights = [WEIGHT if one.path in heavy else 1 for one in operations]
    fuzzed, failed = Fuzzed(), set[str]()
    while fuzzed.num_cases < num_cases and len(failed) < len(operations):
        num_left = num_cases - fuzzed.num_cases
        for operation, weight in zip(operations, weights, strict=True):
            if operation.label in failed:
                continue
            share = max(1, round(num_left * weight / sum(weights) / len(MODES)))
            for mode in MODES:
                try:
                    _try(operation, mode, share, seed, fuzzed)
                except Unsatisfiable:
                    pass  # an operation without parameters has no request that does not fit
                except FlakyStrategyDefinition:
                    pass  # schemathesis drew other data at a repetition; all answers were judged
                except (Exception, BaseExceptionGroup) as error:  # whatever it is: for the report
                    failed.add(operation.label)
                    name = f"{operation.label} ({mode.value})"
                    fuzzed.failures.append(f"{name}: {type(error).__name__}: {error}")
        seed += 1
    return fuzzed


def _try(operation: Any, mode: GenerationMode, count: int, seed: int, fuzzed: Fuzzed) -> None:
    choose = random.Random(seed)

    @with_seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if operation.path in (*GENERATING, *POOLING):
            body = thin(case.body, choose) if mode is GenerationMode.POSITIVE else case.body
            case.body = shorten(body) if operation.path in GENERATING else of_any_model(body)
        response = case.call(timeout=60)
        fuzzed.num_cases += 1
        fuzzed.statuses[f"{operation.path} {response.status_code}"] += 1
        case.validate_response(response, checks=CHECKS)

    send()


# ---- damaged bodies -----------------------------------------------------------------------------

PATHS = ("/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/responses/{}/cancel")
NAMES = ("resp_1", "%00", "..%2f", "a" * 3000, "%ff", "é", "?stream=true", "?after=x&limit=0")

Send = Callable[[], httpx.Response]


def damaged_calls(client: httpx.Client, seed: int) -> Iterator[tuple[str, bytes, Send]]:
    """(the path, the body, what sends it), route by route, without an end."""
    choose = random.Random(seed)
    for path in itertools.cycle(routes()):
        body = json.dumps(damaged(path, choose)).encode()
        yield path, body, _sends(client, "POST", path, body)
        if choose.random() < 0.1:
            method = choose.choice(("GET", "DELETE", "POST"))
            name = choose.choice(PATHS).format(choose.choice(NAMES))
            yield f"{method} {name:.60}", b"", _sends(client, method, name, b"{}")


def _sends(client: httpx.Client, method: str, path: str, body: bytes) -> Send:
    head = {"Content-Type": "application/json"}
    return lambda: client.request(method, path, content=body, headers=head)


def fuzz_damaged(url: str, num_cases: int, seed: int, limit_s: float, fuzzed: Fuzzed) -> None:
    """Adds to what was sent and answered, and to the failures."""
    host, _, port = url.removeprefix("http://").partition(":")
    watchers = Watchers((host, int(port)), reads_streams=False)
    watchers.start()
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, body, send in itertools.islice(damaged_calls(client, seed), num_cases):
            try:
                fault = _fault_or_stall(send, watchers, limit_s, path, fuzzed)
            except (httpx.HTTPError, ValueError) as error:
                fault = f"{type(error).__name__}: {error}"
            fuzzed.num_cases += 1
            if fault is not None:
                fuzzed.failures.append(f"{path}: {fault}\n    {body[:2000]!r}")
    watchers.end()


def _fault_or_stall(
    send: Send, watchers: Watchers, limit_s: float, path: str, fuzzed: Fuzzed
) -> str | None:
    for _ in range(3):  # what another process did to this machine does not come three times
        watchers.clear()
        answer = send()
        longest_s = watchers.probe.longest_s()
        fuzzed.statuses[f"{path} {answer.status_code}"] += 1
        if longest_s <= limit_s:
            return fault_of(answer)
    return f"others waited for {longest_s * 1e3:.0f} ms"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=int, default=5000, help="of schemathesis (%(default)s)")
    add("--damaged", type=int, default=5000, help="damaged bodies (%(default)s)")
    add("--limit-ms", type=float, default=100.0, help="for others to wait (%(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path)
    add("--log", type=Path, default=LOG, help="the server's error output (%(default)s)")
    add("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with served([*SERVE_ARGUMENTS, *args.serve_arguments], args.log) as server:
        url = f"http://{server.host}:{server.port}"
        fuzzed = fuzz(url, args.cases, args.seed)
        fuzz_damaged(url, args.damaged, args.seed, args.limit_ms / 1e3, fuzzed)
        after = server.wait_until_quiet()
    found = {
        "num_cases": fuzzed.num_cases,
        "statuses": dict(sorted(fuzzed.statuses.items())),
        "failures": fuzzed.failures,
        "num_held_blocks_after": after["num_held_blocks"],
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, count in found["statuses"].items():
        print(f"{count:6}  {name}")
    print(f"{fuzzed.num_cases} cases; blocks held afterwards: {after['num_held_blocks']}")
    for failure in fuzzed.failures:
        print(f"\n{failure}")
    sys.exit(1 if fuzzed.failures or after["num_held_blocks"] else 0)


if __name__ == "__main__":
    main()
