"""Print the path of a streamed chat: the files that it passes, in the order of their first entry.

    .venv/bin/python tools/request_path.py             # files that hand on, with their first line
    .venv/bin/python tools/request_path.py --all       # and files that call no other file of ours
    .venv/bin/python tools/request_path.py --json
    .venv/bin/python tools/request_path.py --readme    # writes the list of the README anew

Starts `quire serve` with the embedded model, in which `tools/tracing/sitecustomize.py` notes every
call from one file of `src/quire` into another, in the front and in the engine. Two chats warm it
up; the third is what counts. A file hands on if, during that chat, it called another file of ours.
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
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quire"
README = ROOT / "README.md"
LIST = re.compile(r"<!-- the path -->\n.*?<!-- the path ends -->\n", flags=re.DOTALL)
QUESTION = "What does json.dumps do?"
NUM_WARM_UP = 2
PATIENCE_S = 60.0
COMPUTING = ("runtime/", "models/", "layers/", "attention/", "formats/", "kernels/", "sampling/")
LINK = "engine_client/process/link.py"
SERVE = ("serve", "--port", "0", "--num-threads", "1", "--max-num-seqs", "4", "--num-blocks", "256")


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function from a file. process: 0 is the front, 1 the engine. caller and
    callee: files; caller is None where none of ours called."""

    at_s: float
    process: int
    caller: str | None
    callee: str
    function: str


class Trace:
    """The calls of one chat, in order of time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = sorted(calls, key=lambda call: call.at_s)

    @property
    def files(self) -> list[str]:
        """All that ran, in the order of their first entry."""
        return list(dict.fromkeys(call.callee for call in self.calls))

    @property
    def stops(self) -> list[str]:
        """Those that called another file of ours."""
        handing = {call.caller for call in self.calls if call.caller != call.callee}
        return [name for name in self.files if name in handing]

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
    """What the front and the engine wrote, once both have."""
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
    """A stretch of the path. new: stops at their first entry. again: those of parts before, whose
    other functions are called here; both in their order."""

    title: str
    new: tuple[str, ...]
    again: tuple[str, ...]


def parts(trace: Trace) -> list[Part]:
    """The stops by where the request is. The engine computes from the first call into the runner
    until the last first call of a function that computes; meanwhile the next step is planned, which
    is left out. The way out begins where the front's link to the engine gets something."""
    front, engine = trace.of_process(0).calls, trace.of_process(1).calls
    arrived_s = engine[0].at_s
    began_s = next(call.at_s for call in engine if call.callee == "runtime/model_runner.py")
    later = [call for call in front if call.at_s >= arrived_s]
    back_s = next((call.at_s for call in later if call.callee == LINK), arrived_s)
    ended_s = max(call.at_s for call in engine if computes(call))
    stretches = {
        "In the front, on the way in": [call for call in front if call.at_s < back_s],
        "In the engine: a step is planned": [call for call in engine if call.at_s < began_s],
        "In the engine: it is computed": [
            call for call in engine if began_s <= call.at_s <= ended_s and computes(call)
        ],
        "In the engine: its results": [
            call for call in engine if call.at_s > began_s and not computes(call)
        ],
        "In the front, on the way out": [call for call in front if call.at_s >= back_s],
    }
    stops, seen = set(trace.stops), set[str]()
    found = []
    for title, calls in stretches.items():
        names = [name for name in Trace(calls).files if name in stops]
        new = tuple(name for name in names if name not in seen)
        again = tuple(name for name in names if name in seen)
        found.append(Part(title, new, again))
        seen.update(new)
    return found


def computes(call: Call) -> bool:
    return call.callee.startswith(COMPUTING)


def readme_list(trace: Trace) -> str:
    """The README's list: a stop a line, numbered through, with its module's first line."""
    lines, number = ["<!-- the path -->"], 0
    for part in parts(trace):
        lines += ["", f"**{part.title}**", ""]
        for name in part.new:
            number += 1
            lines.append(f"{number}. `{name}`: {first_line(name)}")
        if part.again:
            names = ", ".join(f"`{name}`" for name in part.again)
            lines += ["", textwrap.fill(f"Again: {names}.", 118, break_long_words=False)]
    return "\n".join([*lines, "", line_counts(trace), "", "<!-- the path ends -->", ""])


def line_counts(trace: Trace) -> str:
    """How much there is to read, rounded."""
    stops = sum(num_lines(SOURCE / name) for name in trace.stops)
    python = sum(num_lines(path) for path in SOURCE.rglob("*.py"))
    cpp = sum(num_lines(path) for path in SOURCE.rglob("*") if path.suffix in (".cpp", ".h"))
    return (
        f"These {len(trace.stops)} files have {round(stops, -2):,} lines, of the package's"
        f" {round(python, -3):,} of Python and {round(cpp, -3):,} of C++."
    )


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def first_line(name: str) -> str:
    """Of a module's docstring."""
    text = ast.get_docstring(ast.parse((SOURCE / name).read_text())) or ""
    return text.partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also files that call no other of ours")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readme", action="store_true", help="write the README's list anew")
    args = parser.parse_args()
    trace = trace_chat()
    if args.readme:
        README.write_text(LIST.sub(lambda _: readme_list(trace), README.read_text()))
    if args.json:
        print(json.dumps({"files": trace.files, "stops": trace.stops}, indent=1))
        return
    for name in trace.files if args.all else trace.stops:
        print(f"{name:45} {first_line(name)}")
    print(f"\n{len(trace.files)} files run, {len(trace.stops)} of them hand on")


if __name__ == "__main__":
    main()
