"""Measures the processor time of HTTP and text per output token, beside that of the engine.

    python -m benchmarks.server.http_cost --model FOLDER --batch 32 --out http_cost.json

starts `quire serve` and sends it --batch requests at once, each answered with exactly --tokens
tokens, in several forms (streamed completions, chat, with log-probabilities, whole). The figures
are CPU times of the two processes, not the clock's, so the client that shares the cores adds
nothing to them. "share" is the API server's part of both; "could carry" is what one API server
could pass on if it had a core for itself. The parts are timed alone, in this process: what they
leave is the event loop, HTTP and the sockets. With --profile (and py-spy installed) the API server
is also sampled while it streams.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.tables import number, table
from benchmarks.server.crowd import ask, request_bytes, stream_body
from benchmarks.server.serving import Server, ServingError, cpu_s, served
from quire.bench.machine import NoiseMeter
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, SamplingParams
from quire.engine_client.messages import Outputs, decode_to_server
from quire.engine_client.outputs import RequestAssembler
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.ipc import encode
from quire.server.http.streaming import event
from quire.server.routes.openai.completions import Completion, CompletionChoice
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

LIMIT_S = 600.0
LOG = Path(tempfile.gettempdir()) / "quire_http_cost.log"
PROMPT = "def read_lines(path, encoding):\n    with open(path) as file:\n        return"
MESSAGES = [{"role": "user", "content": "What does os.path.join do, and when does it fail?"}]
CALLS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG_TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 10_000}},
    "required": ["text"],
    "additionalProperties": False,
}
"""No answer of the length that is measured comes to its end."""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": LONG_TEXT}}
    for name in ("write_file", "send_mail", "run_command")
]
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": LONG_TEXT}}
WAITING = ("EpollSelector.select", "ThreadedChildWatcher")
"""Where the API server is when it has nothing to do: no part of its profile."""

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions, streamed": (CALLS, {"prompt": PROMPT}),
    "chat, streamed": (CHATS, {"messages": MESSAGES, "prompt": None}),
    "chat, streamed, tools": (CHATS, {"messages": MESSAGES, "prompt": None, "tools": TOOLS}),
    "chat, streamed, a forced call": (
        CHATS,
        {"messages": MESSAGES, "prompt": None, "tools": TOOLS, "tool_choice": "required"},
    ),
    "chat, streamed, a JSON schema": (
        CHATS,
        {"messages": MESSAGES, "prompt": None, "response_format": JSON_ANSWER},
    ),
    "completions, streamed, logprobs 5": (CALLS, {"prompt": PROMPT, "logprobs": 5}),
    "completions, streamed, a stop string": (CALLS, {"prompt": PROMPT, "stop": ["\x00never"]}),
    "completions, whole": (
        CALLS,
        {"prompt": PROMPT, "stream": False, "stream_options": None},
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One form of request, all of a batch at once. CPU times are per output token."""

    form: str
    num_tokens: int
    seconds: float
    api_server_us: float
    engine_us: float
    other_cores: float

    @property
    def share(self) -> float:
        return self.api_server_us / (self.api_server_us + self.engine_us)

    @property
    def could_carry(self) -> float:
        return 1e6 / self.api_server_us


def measure(server: Server, form: str, batch: int, num_tokens: int) -> Cost:
    """One batch, from its first byte to its last."""
    path, more = FORMS[form]
    requests = [
        request_bytes(path, stream_body(index, num_tokens, **more)) for index in range(batch)
    ]
    is_stream = more.get("stream", True)

    async def everybody() -> None:
        answers = await asyncio.gather(
            *(
                ask(server.host, server.port, request, num_tokens, LIMIT_S, is_stream=is_stream)
                for request in requests
            )
        )
        for answer in answers:
            if answer is None or answer.problem is not None or answer.status != 200:
                raise ServingError("stuck" if answer is None else f"{answer.problem}")

    api_server, engine = server.api_server, server.engine
    meter, start_s, before = NoiseMeter(), time.perf_counter(), (cpu_s(api_server), cpu_s(engine))
    asyncio.run(everybody())
    server.wait_until_quiet()
    used = cpu_s(api_server) - before[0], cpu_s(engine) - before[1]
    seconds = time.perf_counter() - start_s
    others = max(0.0, (meter.stop().other_cores or 0.0) - sum(used) / seconds)
    count = batch * num_tokens
    return Cost(form, count, seconds, used[0] / count * 1e6, used[1] / count * 1e6, others)


def time_us(action: Callable[[], object], num_per_call: int, num_calls: int = 300) -> float:
    """The best of five rounds, per one of num_per_call."""
    best = float("inf")
    for _ in range(5):
        start_s = time.process_time()
        for _ in range(num_calls):
            action()
        best = min(best, time.process_time() - start_s)
    return best / num_calls / num_per_call * 1e6


def parts_us(tokenizer: Tokenizer, batch: int) -> dict[str, float]:
    """The work of the API server for one output token of a streamed completion, by parts."""
    text = (PROMPT + " file.read().splitlines()\n\n") * 8
    ids = tokenizer.encode(text, add_special_tokens=False)
    outputs = [SequenceOutput(f"cmpl-{index:032x}-0", 0, (5,)) for index in range(batch)]
    body = encode(Outputs(outputs))[4:]
    request = Request("r", ids[:8], DecodingParams(max_tokens=len(ids)))

    def assemble() -> None:
        assembler = RequestAssembler(request, SamplingParams(), tokenizer, None, deltas_only=True)
        for token_id in ids:
            assembler.push(SequenceOutput("r", 0, (token_id,)))
            assembler.pop_delta(0)

    def write() -> bytes:
        choice = CompletionChoice(0, " file")
        return event(Completion("cmpl-" + "0" * 32, 1_700_000_000, "a-model", [choice]))

    return {
        "message from the engine": time_us(lambda: decode_to_server(body), batch),
        "text": time_us(assemble, len(ids), 30),
        "JSON": time_us(write, 1, 3000),
        "(tokenization, per prompt token)": time_us(lambda: tokenizer.encode(text), len(ids), 100),
    }


def profile(server: Server, seconds: int) -> list[tuple[str, float]]:
    """Where the API server spends its time by the innermost Python function, as shares."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks.txt"
        words = ["--pid", str(server.api_server.pid), "--duration", str(seconds), "--rate", "250"]
        command = ["py-spy", "record", *words, "--format", "raw", "--output", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=seconds + 60)
        lines = path.read_text().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        name = stack.rpartition(";")[2]
        if not name.startswith(WAITING):
            found[name] += int(count)
    whole = sum(found.values()) or 1
    return [(name, count / whole) for name, count in found.most_common(25)]


def profiled(server: Server, batch: int) -> list[tuple[str, float]]:
    """While a batch streams in another process."""
    words = ["--clients", str(batch), "--address", f"{server.host}:{server.port}"]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.server.http_cost", *words]) as clients:
        time.sleep(3.0)  # they have all begun
        try:
            return profile(server, 10)
        finally:
            clients.terminate()


def report(costs: Sequence[Cost], parts: dict[str, float], batch: int) -> str:
    header = [
        "form",
        "tok/s",
        "API server us/token",
        "engine us/token",
        "share",
        "could carry, tok/s",
    ]
    rows = [
        [
            cost.form + (" (loud)" if cost.other_cores > 0.2 else ""),
            number(cost.num_tokens / cost.seconds),
            number(cost.api_server_us),
            number(cost.engine_us),
            f"{cost.share:.1%}",
            number(cost.could_carry),
        ]
        for cost in costs
    ]
    left = costs[0].api_server_us - sum(
        us for name, us in parts.items() if not name.startswith("(")
    )
    named = parts | {"event loop, HTTP, sockets": left}
    listed = [[name, f"{us:.1f}"] for name, us in named.items()]
    return (
        f"{table(header, rows)}\n\nThe API server's work for one token of {costs[0].form!r} at"
        f" a batch of {batch}:\n\n{table(['part', 'us'], listed)}"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="a folder; default: the embedded model")
    add("--batch", type=int, default=32)
    add("--tokens", type=int, default=256, help="of each answer")
    add("--rounds", type=int, default=2, help="the first of several only warms up")
    add("--forms", type=lambda text: text.split(";"), default=list(FORMS))
    add("--profile", action="store_true")
    add("--out", type=Path)
    add("--log", type=Path, default=LOG, help="the server's error output (%(default)s)")
    add("--clients", type=int, help=argparse.SUPPRESS)  # for --profile: only stream
    add("--address", help=argparse.SUPPRESS)
    add("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def only_stream(args: argparse.Namespace) -> None:
    host, _, port = args.address.rpartition(":")

    async def one(index: int) -> None:
        while True:
            request = request_bytes(CALLS, stream_body(index, 256))
            await ask(host, int(port), request, 256, LIMIT_S)

    async def everybody() -> None:
        await asyncio.gather(*(one(index) for index in range(args.clients)))

    asyncio.run(everybody())


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.clients:
        return only_stream(args)
    if args.profile and shutil.which("py-spy") is None:
        sys.exit("http_cost.py: error: --profile needs py-spy (pip install py-spy)")
    named = [str(args.model)] if args.model else []
    arguments = [*named, "--max-num-seqs", str(args.batch), *args.serve_arguments]
    folder = args.model or EMBEDDED_MODEL
    parts = parts_us(Tokenizer.from_folder(folder, remembers_words=False), args.batch)
    if not ChatTemplate.from_folder(folder).exists:
        args.forms = [form for form in args.forms if not form.startswith("chat")]
    rounds, hot = [], []
    try:
        with served(arguments, args.log) as server:
            for index in range(args.rounds):
                costs = [measure(server, form, args.batch, args.tokens) for form in args.forms]
                rounds.append(costs)
                print(f"round {index}: done", file=sys.stderr)
            if args.profile:
                hot = profiled(server, args.batch)
    except ServingError as error:
        sys.exit(f"http_cost.py: error: {error}")
    counted = rounds[1:] or rounds
    best = [min(same, key=lambda cost: cost.api_server_us) for same in zip(*counted, strict=True)]
    print(report(best, parts, args.batch))
    for name, share in hot:
        print(f"{share:6.1%}  {name}")
    if args.out:
        listed = [asdict(cost) for costs in rounds for cost in costs]
        found = {"costs": listed, "parts_us": parts, "profile": hot}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
