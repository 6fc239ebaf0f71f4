"""llama.cpp over long contexts, through its own llama-batched-bench; it computes the prompts.

    PYTHONPATH=src VENV/bin/python benchmarks/peers/llama_long_context.py --model FILE.gguf \\
        --batched-bench BUILD/bin/llama-batched-bench --out ...

A case is one process of it, with a KV cache of its own for each sequence (its faster setting). With
several sequences the prompt is computed once and its K and V are copied into each one's cache
(`-pps`): what a step reads is the same as with different prompts. One repetition is one process.
"""

import argparse
import json
import resource
import subprocess
from pathlib import Path

import long_context
from long_context import Case, CaseResult

from quire.bench.machine import NoiseMeter


def run_case(args: argparse.Namespace, case: Case) -> dict[str, float]:
    """Tokens per second of one process's decode steps, and its speed at prefill."""
    command = [
        *(args.batched_bench, "-m", args.model, "-t", str(args.threads), "-tb", str(args.threads)),
        *("-npp", str(case.context), "-ntg", str(args.steps), "-npl", str(case.num_seqs)),
        *("-c", str(case.num_seqs * (case.context + args.steps + 32))),
        *("-ctk", args.kv_type, "-ctv", args.kv_type, "--output-format", "jsonl"),
        *(["-pps"] if case.num_seqs > 1 else []),
    ]
    meter = NoiseMeter()
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    noise = meter.stop()
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    report = json.loads(lines[-1])
    return {
        "tok_s": float(report["speed_tg"]),
        "prefill_tok_s": float(report["speed_pp"]),
        "other_cpus": noise.other_cores or 0.0,
        "steal_cpus": noise.steal_cores or 0.0,
    }


def main(argv: list[str] | None = None) -> None:
    parser = long_context.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--batched-bench", required=True, help="the executable")
    parser.add_argument("--kv-type", default="bf16")
    args = parser.parse_args(argv)
    results: list[CaseResult] = []
    for case in args.cases:
        result = CaseResult(str(case), case.num_seqs, case.context)
        result.rows.append(run_case(args, case))
        result.tok_s = result.rows[0]["tok_s"]
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        result.rss_bytes = peak * 1024  # the most of any case so far: give the small ones first
        results.append(result)
        long_context.save(args, "llama.cpp", Path(args.batched_bench).name, results)


if __name__ == "__main__":
    main()
