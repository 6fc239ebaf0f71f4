"""Open WebUI against `quire serve`, in a browser: models, a chat, stop, regenerate, both protocols.

    pip install open-webui
    npm install --prefix DIR playwright-core
    python -m benchmarks.clients.open_webui --open-webui open-webui --node-modules DIR/node_modules

Starts a server with the embedded model and, for OpenAI's and for Ollama's API in turn, Open WebUI
without a login. `open_webui.mjs` then drives a Chromium. The model never ends an answer, so that
there is one to stop. Prints a row for each case, and fails if
one fell short. `--chromium` names the browser; `--shots` keeps pictures of the page.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients.claude_code import MAX_MODEL_LEN, long_model
from benchmarks.clients.coding_agents import calls_of
from benchmarks.server.load_client import free_port
from benchmarks.server.serving import served

SCRIPT = Path(__file__).with_suffix(".mjs")
START_LIMIT_S = 180
RUN_LIMIT_S = 300
RARE_TOKEN_ID = 4095


def settings(protocol: str, url: str, folder: Path) -> dict[str, str]:
    """Open WebUI's environment: one protocol, no login, and no model of its own."""
    is_openai = protocol == "openai"
    return {
        "DATA_DIR": str(folder),
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
        "OFFLINE_MODE": "True",
        "ENABLE_OPENAI_API": str(is_openai),
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": str(not is_openai),
        "OLLAMA_BASE_URL": url,
        # Otherwise it loads an embedding model when it starts.
        "RAG_EMBEDDING_ENGINE": "openai",
        "ANONYMIZED_TELEMETRY": "False",
    }


@contextmanager
def running(program: Path, environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Open WebUI; yields its address. Ended afterwards."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    log = (folder / "open_webui.log").open("wb")
    process = subprocess.Popen(
        [str(program.absolute()), "serve", "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > end_s:
                text = (folder / "open_webui.log").read_text()
                raise RuntimeError(f"Open WebUI did not start: {text[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def endless_model(folder: Path) -> Path:
    """The embedded model with a long context, and with a rare end token."""
    long_model(folder)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | {"eos_token_id": RARE_TOKEN_ID}))
    return folder


def refused(log: Path) -> list[str]:
    """The calls of models that the server has not answered. Stopped ones count as answered."""
    return [f"{path}: {status}" for path, status in calls_of(log, 0) if status not in (200, 499)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--open-webui", type=Path, required=True, help="the program")
    parser.add_argument("--node-modules", type=Path, required=True, help="has playwright-core")
    parser.add_argument("--chromium", type=Path, default=Path("/usr/bin/chromium"))
    parser.add_argument("--shots", type=Path, help="folder for pictures of the page")
    args = parser.parse_args(argv)
    codes = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, log = str(endless_model(folder / "model")), folder / "serve.log"
        options = ["--model", model, "--served-model-name", "embedded", "--log-format", "json"]
        with served([*options, "--max-model-len", str(MAX_MODEL_LEN)], log) as server:
            for protocol in ("openai", "ollama"):
                data = folder / protocol
                data.mkdir()
                shots = args.shots or folder
                shots.mkdir(parents=True, exist_ok=True)
                environment = settings(protocol, f"http://{server.host}:{server.port}", data)
                with running(args.open_webui, environment, data) as url:
                    words = [url, protocol, str(args.chromium), str(shots.resolve())]
                    modules = str(args.node_modules.resolve() / "playwright-core" / "index.js")
                    done = subprocess.run(
                        ["node", str(SCRIPT), modules, *words], timeout=RUN_LIMIT_S, check=False
                    )
                    codes.append(done.returncode)
        for each in refused(log):
            codes.append(1)
            print(f"| Open WebUI | a call was refused | {each} |")
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
