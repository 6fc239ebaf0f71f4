"""llama.cpp's llama-server with continuous batching, over HTTP on the loopback; see `driver.py`.

    PYTHONPATH=src python benchmarks/peers/llama_server.py --model FILE.gguf \\
        --server BUILD/bin/llama-server --workload requests.json --out result.json --label bf16

It has --max-batch slots, each with a KV cache of its own (--kv-unified: one for all, in which every
slot attends over the cells of all; slower). The workload asks for whole answers, which costs it
less than streams.
"""

import argparse
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import driver

START_LIMIT_S = 300.0
TOKENS_PER_SLOT = 2304
TOKENS_PER_UNIFIED_SLOT = 1600


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the server's."""
    parser = driver.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", required=True, help="the executable")
    parser.add_argument("--kv-unified", action="store_true", help="one KV cache for all slots")
    parser.add_argument("--ubatch", type=int, default=512)
    return parser


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    """How llama-server is started."""
    per_slot = TOKENS_PER_UNIFIED_SLOT if args.kv_unified else TOKENS_PER_SLOT
    return [
        *(args.server, "-m", args.model, "--host", "127.0.0.1", "--port", str(port)),
        *("-t", str(args.threads), "-tb", str(args.threads), "-np", str(args.max_batch)),
        *("-c", str(max(4096, per_slot * args.max_batch)), "-b", "2048"),
        *("-ub", str(args.ubatch), *(["--kv-unified"] if args.kv_unified else [])),
    ]


class LlamaServer:
    """A server process. Invariant: no request is under way between two calls."""

    name = "llama.cpp"

    def __init__(self, args: argparse.Namespace) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port: int = sock.getsockname()[1]
        asked = subprocess.run([args.server, "--version"], capture_output=True, text=True)
        self.version = " ".join((asked.stdout + asked.stderr).split()[:4])
        self._kv = "unified" if args.kv_unified else "split"
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            server_command(args, self._port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.child_pid = self._process.pid
        try:
            self._wait_until_healthy(started_s + START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self._load_s = time.perf_counter() - started_s

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> driver.Latency:
        """See `driver.Engine`."""
        started_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
        with self._answer(prompt, num_new_tokens, is_streamed=True) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                first_s = first_s or time.perf_counter() - started_s
                event = json.loads(line[6:])
                if event.get("stop"):
                    num_tokens = event["tokens_predicted"]
        assert num_tokens == num_new_tokens, (num_tokens, num_new_tokens)
        return driver.Latency(first_s, time.perf_counter() - started_s)

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """See `driver.Engine`."""

        def ask(prompt: list[int], num_new_tokens: int) -> int:
            with self._answer(prompt, num_new_tokens, is_streamed=False) as answer:
                return int(json.load(answer)["tokens_predicted"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(ask, prompts, output_lens))
        assert found == output_lens, (found, output_lens)
        return sum(found)

    def details(self) -> dict[str, Any]:
        """See `driver.Engine`."""
        return {"load_s": round(self._load_s, 2), "kv": self._kv}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(30)

    def _answer(
        self, prompt: list[int], num_new_tokens: int, *, is_streamed: bool
    ) -> http.client.HTTPResponse:
        body = {
            "prompt": prompt,
            "n_predict": num_new_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "stream": is_streamed,
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"llama-server answers {answer.status}: {answer.read()[:500]!r}")
        return answer

    def _wait_until_healthy(self, until_s: float) -> None:
        while time.perf_counter() < until_s and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(0.1)
        raise RuntimeError(f"llama-server did not start: {self._process.args!r}")


def main(argv: list[str] | None = None) -> None:
    args = driver.parse_args(make_parser(), argv)
    driver.hold_threads(args.threads)
    server = LlamaServer(args)
    try:
        driver.Measurement(args, server, child_pid=server.child_pid).run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
