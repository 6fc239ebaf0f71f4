"""Real clients, installed in a temporary folder, against `quire serve` with the embedded model.

    python -m benchmarks.clients.all_clients
    python -m benchmarks.clients.all_clients --only javascript --folder CLIENTS

prints a row for each case of a client. `--folder` keeps what is installed for a further run.
Clients that can't be installed are skipped by name. The exit code is 1 if a case failed. It needs
psutil, and npm and Node.js for the clients in JavaScript.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server.serving import served

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = "javascript_clients.mjs"
SERVE_ARGUMENTS = ["--num-blocks", "2048"]
INSTALL_LIMIT_S = 900
RUN_LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Group:
    """Clients that are installed and run together.

    packages: as pip or npm take them. module: has the cases; "": they are in JavaScript.
    """

    packages: tuple[str, ...]
    module: str = ""

    def install(self, folder: Path) -> None:
        """Install each package by itself, so that one that can't be had leaves the others."""
        if self.module:
            venv.create(folder, with_pip=True)
            command = [_python(folder), "-m", "pip", "install", "-q"]
        elif shutil.which("npm") is None:
            print("npm is not installed, so no client in JavaScript is", file=sys.stderr)
            return
        else:
            folder.mkdir(parents=True, exist_ok=True)
            command = ["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix"]
            command.append(str(folder))
        for package in self.packages:
            print(f"installing {package}", file=sys.stderr)
            done = subprocess.run(
                [*command, package],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
            if done.returncode != 0:
                print(f"{package} can't be installed: {done.stderr[-500:]}", file=sys.stderr)

    def run(self, folder: Path, url: str) -> int:
        """Run the cases; returns the exit code of their process."""
        if self.module:
            command = [_python(folder), "-m", f"benchmarks.clients.{self.module}", "--url", url]
        elif shutil.which("node") is None:
            print("| clients in JavaScript | | skipped: Node.js is not installed |")
            return 0
        else:
            # Node.js looks for packages beside the script.
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / SCRIPT, folder)
            command = ["node", str(folder / SCRIPT), url]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_LIMIT_S, check=False
        )
        # Libraries print, too.
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith("| ")))
        return done.returncode


GROUPS = {
    "python": Group(
        (
            *("openai", "anthropic", "litellm", "langchain-openai", "openai-agents"),
            *("pydantic-ai-slim[openai]", "instructor", "mistralai", "huggingface_hub", "ollama"),
            *("dspy", "smolagents[openai]", "llama-index-llms-openai-like"),
        ),
        "python_clients",
    ),
    "frameworks": Group(("litellm", "haystack-ai", "openai", "agno", "llm"), "python_frameworks"),
    "evaluations": Group(("pydantic", "lm_eval[api]"), "evaluations"),
    "javascript": Group(
        (
            *("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"),
            *("@langchain/core", "@langchain/openai", "zod", "openai", "ollama"),
        )
    ),
}


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=GROUPS, help="run these clients only")
    parser.add_argument("--folder", type=Path, help="install there, and keep it")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = {name: group for name, group in GROUPS.items() if args.only in (None, name)}
        for name, group in groups.items():
            group.install(folder.resolve() / name)
        log = Path(tempfile.gettempdir()) / f"quire_clients_{os.getpid()}.log"
        batches = stack.enter_context(tempfile.TemporaryDirectory())
        arguments = [*SERVE_ARGUMENTS, "--batch-dir", batches]
        server = stack.enter_context(served(arguments, log))
        url = f"http://{server.host}:{server.port}"
        codes = [group.run(folder.resolve() / name, url) for name, group in groups.items()]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
