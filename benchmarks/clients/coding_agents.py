r"""Coding agents against `quire serve`, in their defaults: one turn that is to edit a file.

    pip install aider-chat
    npm install --prefix DIR opencode-ai @continuedev/cli cline
    python -m benchmarks.clients.coding_agents --aider aider \
        --opencode DIR/node_modules/.bin/opencode --cn DIR/node_modules/.bin/cn \
        --cline DIR/node_modules/.bin/cline

The embedded model can't edit, so a turn counts if the agent's calls were all answered with 200 and
the agent ended by itself without an error; it parses the streams. The model has a longer context,
since the prompts of agents alone have more tokens than its own. Cline bounds no answer, and the
embedded model seldom ends its own, so try Cline with `--model smollm2`. Prints a row for each
agent, and fails if one fell short.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clients.claude_code import MAX_MODEL_LEN, long_model
from benchmarks.server.serving import served

MODEL = "embedded"
TASK = "Rename the function hello to hi."
SOURCE = "def hello():\n    return 'hello'\n"
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Turn:
    """How an agent is asked for one turn."""

    #: Arguments after the program's name.
    arguments: list[str]
    #: Further environment.
    environment: dict[str, str] = field(default_factory=dict)
    #: Files in the project's folder, by name.
    files: dict[str, str] = field(default_factory=dict)


def aider(url: str) -> Turn:
    """aider over OpenAI's API."""
    return Turn(
        [
            *("--model", f"openai/{MODEL}", "--message", TASK, "--yes-always"),
            *("--no-check-update", "--analytics-disable", "hello.py"),
        ],
        {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
    )


def aider_ollama(url: str) -> Turn:
    """aider over Ollama's API."""
    arguments = aider(url).arguments
    arguments[1] = f"ollama_chat/{MODEL}"
    return Turn(arguments, {"OLLAMA_API_BASE": url})


def opencode(url: str) -> Turn:
    """OpenCode with a provider of its own configuration."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "quire",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": MAX_MODEL_LEN, "output": 256}}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"quire": provider},
        "model": f"quire/{MODEL}",
        "small_model": f"quire/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
    }
    files = {"opencode.json": json.dumps(config, indent=2)}
    return Turn(["run", TASK], {}, files)


def continue_cli(url: str) -> Turn:
    """Continue's command line."""
    config = f"""name: quire
version: 1.0.0
schema: v1
models:
  - name: quire
    provider: openai
    model: {MODEL}
    apiBase: {url}/v1
    apiKey: none
    defaultCompletionOptions:
      contextLength: {MAX_MODEL_LEN}
      maxTokens: 256
    roles: [chat, edit]
"""
    return Turn(["--config", "config.yaml", "--auto", "-p", TASK], {}, {"config.yaml": config})


def cline(url: str) -> Turn:
    """Cline's command line, with the settings that `cline auth` writes."""
    settings = {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": MODEL,
        "baseUrl": f"{url}/v1",
    }
    providers = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {
            "openai-compatible": {
                "settings": settings,
                "updatedAt": "2026-11-30T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    files = {"cline/settings/providers.json": json.dumps(providers)}
    return Turn(["--data-dir", "cline", "--retries", "1", TASK], {}, files)


AGENTS: dict[str, tuple[str, Callable[[str], Turn]]] = {
    "aider": ("aider", aider),
    "aider, Ollama's API": ("aider", aider_ollama),
    "OpenCode": ("opencode", opencode),
    "Continue": ("cn", continue_cli),
    "Cline": ("cline", cline),
}
"""By the name in the table: the option that names the program, and its turn."""


def ask(program: Path, turn: Turn, folder: Path) -> subprocess.CompletedProcess[str]:
    """One turn in a project of its own, with nothing of this user's settings."""
    home, project = folder / "home", folder / "project"
    home.mkdir(parents=True)
    project.mkdir()
    for name, text in {"hello.py": SOURCE, **turn.files}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    for words in (("init", "-q"), ("config", "user.email", "a@b.c"), ("config", "user.name", "a")):
        subprocess.run(["git", *words], cwd=project, check=True)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    return subprocess.run(
        [str(program.resolve()), *turn.arguments],
        cwd=project,
        env=environment | turn.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def calls_of(log: Path, start: int) -> Iterator[tuple[str, int]]:
    """The paths and statuses of the calls that the server has logged from a place of its log on."""
    for line in log.read_text().splitlines()[start:]:
        found = json.loads(line) if line.startswith("{") else {}
        if "status" in found and "path" in found:
            yield found["path"], int(found["status"])


def try_agent(name: str, program: Path, turn: Turn, folder: Path, log: Path) -> bool:
    """Print the agent's row. Returns whether the turn counts."""
    start = len(log.read_text().splitlines())
    try:
        done = ask(program, turn, folder)
    except subprocess.TimeoutExpired:
        print(f"| {name} | did not end in {LIMIT_S} s |", flush=True)
        return False
    calls = list(calls_of(log, start))
    wrong = [f"{path}: {status}" for path, status in calls if status != 200]
    if done.returncode:
        wrong.append(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
    if not calls:
        wrong.append(f"it made no call: {(done.stdout + done.stderr)[-300:]}")
    paths = ", ".join(f"{calls.count((path, 200))} x {path}" for path in sorted(dict(calls)))
    print(f"| {name} | {'; '.join(wrong) or f'works: {paths}'} |".replace("\n", " "), flush=True)
    return not wrong


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option in dict.fromkeys(option for option, _ in AGENTS.values()):
        parser.add_argument(f"--{option}", type=Path, help="the program; left out: not tried")
    parser.add_argument("--model", help="a folder or hub id in place of the embedded model")
    programs = vars(parser.parse_args(argv))
    model = programs.pop("model")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "serve.log"
        options = ["--model", model or str(long_model(folder / "model"))]
        options += ["--served-model-name", MODEL, "--log-format", "json"]
        if model is None:
            options += ["--max-model-len", str(MAX_MODEL_LEN)]
        with served(options, log) as server:
            url = f"http://{server.host}:{server.port}"
            good = [
                try_agent(agent, programs[option], make(url), folder / f"run_{at}", log)
                for at, (agent, (option, make)) in enumerate(AGENTS.items())
                if programs[option] is not None
            ]
    sys.exit(0 if good and all(good) else 1)


if __name__ == "__main__":
    main()
