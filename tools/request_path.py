"""Print the path of a streamed chat: the files that it passes, in the order of their first entry.

    .venv/bin/python tools/request_path.py             # files that hand on, with their first line
    .venv/bin/python tools/request_path.py --all       # and files that call no other file of ours
    .venv/bin/python tools/request_path.py --json
    .venv/bin/python tools/request_path.py --document  # writes the picture of docs/request-path.md

Starts `quire serve` with the embedded model, in which `tools/tracing/sitecustomize.py` notes every
call from one file of `src/quire` into another, in the API server and in the engine. Two chats warm
it up; the third is what counts. A file hands on if, during that chat, it called another file of
ours.
"""

import argparse
import ast
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quire"
DOCUMENT = ROOT / "docs" / "request-path.md"
PICTURE = re.compile(r"<!-- the picture -->\n.*?<!-- the picture ends -->\n", flags=re.DOTALL)
QUESTION = "What does json.dumps do?"
NUM_WARM_UP = 2
PATIENCE_S = 60.0
COMPUTING = ("runtime/", "models/", "layers/", "attention/", "formats/", "kernels/", "sampling/")
LINK = "engine_client/process/link.py"
SERVE = ("serve", "--port", "0", "--num-threads", "1", "--max-num-seqs", "4", "--num-blocks", "256")


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function from a file."""

    at_s: float
    #: 0 for the API server, 1 for the engine.
    process: int
    #: The calling file; None if it is not a file of quire.
    caller: str | None
    #: The file of the function.
    callee: str
    function: str


class Trace:
    """The calls of one chat, in order of time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = sorted(calls, key=lambda call: call.at_s)

    @property
    def files(self) -> list[str]:
        """The files that ran, in the order of their first entry."""
        return list(dict.fromkeys(call.callee for call in self.calls))

    @property
    def stops(self) -> list[str]:
        """The files that called another file of ours."""
        handing = {call.caller for call in self.calls if call.caller != call.callee}
        return [name for name in self.files if name in handing]

    @property
    def way_in(self) -> list[str]:
        """The stops that a prompt passes in the API server until it is sent to the engine."""
        stops = set(self.stops)
        found = [name for name in self.of_process(0).files if name in stops]
        return found[: found.index(LINK) + 1]

    @property
    def num_package_changes(self) -> int:
        """How many stops on the way in lie in another package than the stop before."""
        packages = [name.partition("/")[0] for name in self.way_in]
        return sum(left != right for left, right in pairwise(packages))

    def of_process(self, process: int) -> "Trace":
        return Trace([call for call in self.calls if call.process == process])


def trace_chat() -> Trace:
    """Serve, warm up, ask once more and read what was noted."""
    with tempfile.TemporaryDirectory(prefix="quire-trace-") as name, served(Path(name)) as port:
        folder = Path(name)
        for _ in range(NUM_WARM_UP):
            ask(port)
        time.sleep(0.2)  # what the last answer left to be done is over
        switch = folder / "on"
        switch.touch()
        time.sleep(0.1)
        ask(port)
        time.sleep(0.2)
        switch.unlink()
        return Trace(list(read_notes(folder)))


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server whose processes note their calls in `folder`."""
    paths = [str(ROOT / "tools" / "tracing"), str(ROOT / "src")]
    environment = os.environ | {
        "HOUSE_TRACE": str(folder),
        "HOUSE_SOURCE": f"{SOURCE}/",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    log = folder / "server.log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "quire", *SERVE]
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"http://[^ ]*:(\d+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield int(found[1])
    finally:
        server.terminate()
        server.wait()


def ask(port: int) -> None:
    """A streamed chat, read to its end; again while the server is still starting."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 20,
        "seed": 0,
    }
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            if answer.status == 200 and "[DONE]" in text:
                return
            problem = f"{answer.status}: {text[:500]}"
        except ConnectionError as error:
            problem = str(error)
        if time.monotonic() > until_s:
            raise RuntimeError(f"the chat was not answered: {problem}")
        time.sleep(0.05)


def read_notes(folder: Path) -> Iterator[Call]:
    """Yield the calls that the API server and the engine noted, once both have written them."""
    until_s = time.monotonic() + PATIENCE_S
    while len(paths := list(folder.glob("*.json"))) < 2:
        if time.monotonic() > until_s:
            raise RuntimeError(f"of two processes only {len(paths)} wrote their notes")
        time.sleep(0.02)
    notes = [entries for path in paths if (entries := json.loads(path.read_text()))]
    for process, entries in enumerate(sorted(notes, key=lambda entries: min(entries)[0])):
        for entry in entries:
            yield Call(entry[0], process, *entry[1:])


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the path."""

    title: str
    #: Files that run in this stretch, in the order of their first entry there.
    files: tuple[str, ...]


#: The files that the picture names: those in which a reader would set a breakpoint, by stretch.
PICTURED = {
    "API server, way in": (
        "server/http/guard.py",
        "server/routes/openai/chat.py",
        "server/generation/answer.py",
        "text/chat_template.py",
        "engine_client/inputs.py",
        "engine_client/process/link.py",
    ),
    "Engine process, a step is planned": (
        "engine_process/engine_loop.py",
        "engine/engine.py",
        "core/scheduling/scheduler.py",
        "core/scheduling/admission.py",
        "core/memory/kv_cache_manager.py",
    ),
    "Engine process, the step is computed": (
        "runtime/model_runner.py",
        "runtime/batch.py",
        "runtime/forward.py",
        "kernels/cpu/program.py",
        "sampling/host/sampler.py",
    ),
    "Engine process, its results": ("core/scheduling/step_results.py",),
    "API server, way out": (
        "engine_client/outputs.py",
        "text/detokenizer.py",
        "server/http/streaming.py",
    ),
}


def parts(trace: Trace) -> list[Part]:
    """The files of each stretch.

    The engine computes from the first call into the runner until the last first call of a function
    that computes; meanwhile the next step is planned, which is left out. The way out begins when
    the API server's link to the engine receives a message.
    """
    server_calls, engine = trace.of_process(0).calls, trace.of_process(1).calls
    arrived_s = engine[0].at_s
    began_s = next(call.at_s for call in engine if call.callee == "runtime/model_runner.py")
    later = [call for call in server_calls if call.at_s >= arrived_s]
    back_s = next((call.at_s for call in later if call.callee == LINK), arrived_s)
    ended_s = max(call.at_s for call in engine if computes(call))
    stretches = (
        [call for call in server_calls if call.at_s < back_s],
        [call for call in engine if call.at_s < began_s],
        [call for call in engine if began_s <= call.at_s <= ended_s and computes(call)],
        [call for call in engine if call.at_s > began_s and not computes(call)],
        [call for call in server_calls if call.at_s >= back_s],
    )
    return [
        Part(title, tuple(Trace(calls).files))
        for title, calls in zip(PICTURED, stretches, strict=True)
    ]


def computes(call: Call) -> bool:
    return call.callee.startswith(COMPUTING)


def picture(trace: Trace) -> str:
    """The path as a Mermaid flowchart: a box for each file of PICTURED, in the traced order."""
    lines = ["<!-- the picture -->", "```mermaid", "flowchart TB"]
    number = 0
    for index, part in enumerate(parts(trace)):
        lines.append(f'    subgraph part{index}["{part.title}"]')
        for name in part.files:
            if name in PICTURED[part.title]:
                arrow = f"stop{number - 1} --> " if number else ""
                lines.append(f'        {arrow}stop{number}["{name}<br/>{first_line(name)}"]')
                number += 1
        lines.append("    end")
    return "\n".join([*lines, "```", "", line_counts(trace), "<!-- the picture ends -->", ""])


def line_counts(trace: Trace) -> str:
    """How many files and lines the whole path has, rounded."""
    stops = sum(num_lines(SOURCE / name) for name in trace.stops)
    return (
        f"{len(trace.stops)} files call another file on this path;"
        f" they have {round(stops, -3):,} lines."
    )


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def first_line(name: str) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse((SOURCE / name).read_text())) or ""
    return text.partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also files that call no other of ours")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--document", action="store_true", help="write docs/request-path.md anew")
    args = parser.parse_args()
    trace = trace_chat()
    if args.document:
        DOCUMENT.write_text(PICTURE.sub(lambda _: picture(trace), DOCUMENT.read_text()))
    if args.json:
        print(json.dumps({"files": trace.files, "stops": trace.stops}, indent=1))
        return
    for name in trace.files if args.all else trace.stops:
        print(f"{name:45} {first_line(name)}")
    print(f"\n{len(trace.files)} files run, {len(trace.stops)} of them hand on")
    print(f"on its way in a prompt changes package {trace.num_package_changes} times")


if __name__ == "__main__":
    main()
