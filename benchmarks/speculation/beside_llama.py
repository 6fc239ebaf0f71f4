"""`python -m benchmarks.speculation.beside_llama`: quire's drafts beside llama.cpp's, same files.

    python -m benchmarks.speculation.beside_llama --model FILE.gguf --llama-server LLAMA_SERVER
    ... --draft-gguf SMALL.gguf

One GGUF file answers the same prompts in both engines, greedily, one stream on the same number of
threads. Each engine runs with drafts and without, in turns. Prints the tokens per second of
decoding, their ratio, and the share of answers that differ from the engine's own without drafts.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from benchmarks.speculation.workloads import make_tasks

REPOSITORY = Path(__file__).parents[2]
WORKLOADS = "rewrite,diff,agent,prose,code"
TIMEOUT_S = 300.0
MAX_MODEL_LEN = 4096

HEADER = "workload  engine                 tokens/s off   tokens/s on   ratio   differ"


class Run(NamedTuple):
    """The answers of an engine to all prompts of a workload."""

    #: Tokens per second of decoding, from the first token on.
    rate: float
    answers: list[list[int]]


class LlamaServer:
    """A running llama-server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers."""
        content = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, content, {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Answer the prompts, one after the other."""
        answers, seconds, num_tokens = [], 0.0, 0
        for prompt in prompts:
            body = {
                **{"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "seed": 1},
                **{"cache_prompt": True, "return_tokens": True},
            }
            self.ask("/completion", body | {"n_predict": 1})  # computes the prompt
            found = self.ask("/completion", body)
            answers.append(found["tokens"])
            seconds += found["timings"]["predicted_ms"] / 1e3
            num_tokens += found["timings"]["predicted_n"]
        return Run(num_tokens / seconds, answers)


@contextlib.contextmanager
def llama_server(args: argparse.Namespace, options: Sequence[str]) -> Iterator[LlamaServer]:
    """A server with these options, on a loopback port, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.llama_server, "-m", args.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(args.threads), "-c", str(MAX_MODEL_LEN), "-np", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = LlamaServer(f"http://127.0.0.1:{port}")
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                server.ask("/health")
                break
            assert process.poll() is None and time.monotonic() < deadline_s, "it does not start"
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


class Quire:
    """An engine of quire in this process."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        from quire import LLM  # after the number of threads is fixed

        self.llm = LLM(
            args.model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            num_threads=args.threads,
            disable_log_stats=True,
            **options,
        )

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Answer the prompts, one after the other."""
        from quire import SamplingParams  # after the number of threads is fixed

        answers, seconds, num_tokens = [], 0.0, 0
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        for prompt in prompts:
            first = SamplingParams(temperature=0, max_tokens=1)
            given = {"prompt_token_ids": prompt}
            self.llm.generate([given], first, use_tqdm=False)  # computes the prompt
            handle = self.llm.start(given, params)
            while not handle.output.token_ids:
                self.llm._requests.advance()
            began_s, before = time.perf_counter(), len(handle.output.token_ids)
            while self.llm.engine.has_work():
                self.llm._requests.advance()
            seconds += time.perf_counter() - began_s
            answers.append(list(handle.output.token_ids))
            num_tokens += len(answers[-1]) - before
            handle.close()
        return Run(num_tokens / seconds, answers)


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="a GGUF file")
    add("--llama-server", required=True, help="the program")
    add("--llama-drafts", default="ngram-simple,ngram-mod,ngram-map-k", help="its --spec-type")
    add("--draft-gguf", help="a small model in GGUF, which drafts for both engines instead")
    add("--workloads", default=WORKLOADS)
    add("--cases", type=int, default=3)
    add("--max-prompt", type=int, default=1600)
    add("--max-tokens", type=int, default=256)
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    quire = Quire(args, speculation="off"), Quire(args, **_quire_options(args))
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(llama_server(args, []))
        sides: dict[str, tuple[Any, Any]] = {"quire": quire}
        for mode, options in _llama_options(args).items():
            drafting = stack.enter_context(llama_server(args, options))
            sides[f"llama.cpp {mode}"] = plain, drafting
        print(HEADER)
        for name in args.workloads.split(","):
            prompts = _prompts(args, name, quire[0].llm)
            for engine, pair in sides.items():
                _compare(name, engine, pair, prompts, args)


def _quire_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine with drafts. Earlier answers don't help, since they are the same."""
    if args.draft_gguf:
        return {"speculation": "draft_model", "speculative_model": args.draft_gguf}
    return {"speculation": "auto", "speculation_history_size": 0}


def _llama_options(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a way to draft -> options of llama-server."""
    if args.draft_gguf:
        return {"draft-simple": ["--spec-type", "draft-simple", "-md", args.draft_gguf]}
    return {mode: ["--spec-type", mode] for mode in args.llama_drafts.split(",")}


def _compare(
    name: str, engine: str, pair: tuple[Any, Any], prompts: list[list[int]], args: Any
) -> None:
    runs: list[list[Run]] = [[], []]
    for repeat in range(args.repeats):
        for at in (0, 1) if repeat % 2 == 0 else (1, 0):
            runs[at].append(pair[at].run(prompts, args.max_tokens))
    off, on = (statistics.median(run.rate for run in each) for each in runs)
    answers = [each[0].answers for each in runs]
    differ = sum(a != b for a, b in zip(*answers, strict=True)) / len(prompts)
    print(f"{name:9} {engine:22} {off:12.1f} {on:13.1f} {on / off:7.2f} {differ:8.0%}", flush=True)


def _prompts(args: argparse.Namespace, name: str, llm: Any) -> list[list[int]]:
    found = []
    for task in make_tasks(name, REPOSITORY, args.cases):
        messages = [{"role": "user", "content": task.prompt}]
        found.append(list(llm._render(messages).prompt)[-args.max_prompt :])
    return found


if __name__ == "__main__":
    main()
