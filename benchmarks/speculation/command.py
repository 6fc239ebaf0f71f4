"""`python -m benchmarks.speculation`: an engine with drafts beside one without.

    python -m benchmarks.speculation --model llama-160m --quantization int8 --streams 1,4,8,16

Prints a line for each workload and number of streams.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speculation.workloads import WORKLOADS, make_tasks
from quire.bench.machine import NoiseMeter, processor

REPOSITORY = Path(__file__).parents[2]
MAX_PROMPT_TOKENS = 1600
BLOCK_SIZE = 16

HEADER = (
    "workload  streams   tokens/s off   tokens a step   drafts   accepted   ratio   of best   wall"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", help="a folder, a hub id, or a GGUF file; by default the embedded model")
    add("--quantization", default="none", choices=("none", "int8", "int4"))
    add("--dtype", default="auto")
    add("--streams", default="1,4,8,16", type=_numbers, help="numbers of requests at once")
    add("--workloads", default=",".join(WORKLOADS), help="some of " + ", ".join(WORKLOADS))
    add("--own-answers", action="store_true", help="the model answers, instead of known texts")
    add("--speculation", default="auto", help="proposers; see EngineOptions in docs/python.md")
    add("--num-draft-tokens", type=int, help="the most drafts of a stream in a step")
    add("--history", action="store_true", help="propose from earlier answers, which are the same")
    add("--max-tokens", type=int, default=256, help="of an answer, at most")
    add("--cases", type=int, default=3, help="tasks of a workload with one stream")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--repository", type=Path, default=REPOSITORY, help="where the texts come from")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table."""
    args = make_parser().parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from benchmarks.speculation.sides import compare  # with quire, when threads are fixed

    plain, drafting = (_open_side(args, has_drafts=each) for each in (False, True))
    print(f"{args.model or 'embedded model'}, {args.quantization}, {processor()}")
    print(HEADER)
    meter = NoiseMeter()
    for name in args.workloads.split(","):
        count = max(max(args.streams), args.cases)
        jobs = [_job(args, plain.llm, task) for task in make_tasks(name, args.repository, count)]
        for num_streams in args.streams:
            groups = [jobs[:num_streams]]
            if num_streams == 1:
                groups = [[job] for job in jobs[: args.cases]]
            found = compare(plain, drafting, groups, args.repeats)
            print(
                f"{name:8}  {num_streams:7}  {found.plain_rate:13.1f} {found.tokens_a_step:15.2f}"
                f" {found.drafts_a_step:8.2f} {found.acceptance:10.0%} {found.ratio:7.3f}"
                f" {found.best_ratio:9.3f} {found.wall_ratio:6.2f}",
                flush=True,
            )
    noise = meter.stop()
    print(f"cores of others: {noise.other_cores}, stolen: {noise.steal_cores}")


def _open_side(args: argparse.Namespace, *, has_drafts: bool) -> Any:
    from benchmarks.speculation.replay import force  # these bring torch
    from benchmarks.speculation.sides import Side
    from quire import LLM

    num_rows = max(args.streams)
    options: dict[str, Any] = {"speculation": "off"}
    if has_drafts:
        options = {"speculation": args.speculation}
        if args.num_draft_tokens is not None:
            options["num_draft_tokens"] = args.num_draft_tokens
        if not args.history:
            options["speculation_history_size"] = 0
    length = MAX_PROMPT_TOKENS + args.max_tokens
    llm = LLM(
        args.model,
        dtype=args.dtype,
        quantization=None if args.quantization == "none" else args.quantization,
        max_model_len=length,
        max_num_seqs=num_rows,
        block_size=BLOCK_SIZE,
        num_blocks=(num_rows + 2) * -(-length // BLOCK_SIZE),
        num_threads=args.threads,
        disable_log_stats=True,
        **options,
    )
    return Side(llm, None if args.own_answers else force(llm))


def _job(args: argparse.Namespace, llm: Any, task: Any) -> Any:
    """The task in the model's tokens. A prompt that is too long loses its beginning."""
    from benchmarks.speculation.sides import Job

    tokenizer = llm.get_tokenizer()
    if args.own_answers:
        messages = [{"role": "user", "content": task.prompt}]
        prompt = list(llm._render(messages).prompt)[-MAX_PROMPT_TOKENS:]
        return Job(prompt, None, args.max_tokens, task.schema)
    prompt = tokenizer.encode(task.prompt)[-MAX_PROMPT_TOKENS:]
    answer = tokenizer.encode(task.answer)[: args.max_tokens]
    return Job(prompt, answer, len(answer), task.schema)


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]
