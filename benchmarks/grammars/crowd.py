"""The throughput that many JSON answers lose against free ones, in one process by turns.

    python -m benchmarks.grammars.crowd MODEL [--num-rows 48] [--num-tokens 48] [--rounds 5]

All rows decode at once and as many tokens each, so that nothing but the masks differs: the schema
is of an array that no answer completes. Prints the tokens per second of each round and the loss.
"""

import argparse
import statistics
import time

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "score": {"type": "number"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "score", "ok"],
        "additionalProperties": False,
    },
}


def tokens_per_s(llm: LLM, params: SamplingParams, num_rows: int) -> float:
    """The rate of requests with different prompts. Every answer has max_tokens tokens."""
    prompts = [{"prompt_token_ids": [5, 7 + row]} for row in range(num_rows)]
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - began_s
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == num_rows * (params.max_tokens or 0), "an answer ended before the others"
    return num_tokens / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-rows", type=int, default=48)
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        max_model_len=1024,
        max_num_seqs=arguments.num_rows,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    common = {"max_tokens": arguments.num_tokens, "temperature": 1.0, "seed": 1}
    free = SamplingParams(ignore_eos=True, **common)
    json = SamplingParams(ignore_eos=True, structured_outputs=wanted, **common)
    for params in (free, json):
        tokens_per_s(llm, params, arguments.num_rows)
    rates: dict[str, list[float]] = {"free": [], "JSON": []}
    for _ in range(arguments.rounds):
        for name, params in (("free", free), ("JSON", json)):
            rates[name].append(tokens_per_s(llm, params, arguments.num_rows))
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.1f} tokens/s  {[f'{r:.1f}' for r in found]}")
    pairs = zip(rates["free"], rates["JSON"], strict=True)
    losses = [1 - constrained / unconstrained for unconstrained, constrained in pairs]
    print(f"loss: {statistics.median(losses):.1%}  {[f'{loss:.1%}' for loss in losses]}")


if __name__ == "__main__":
    main()
