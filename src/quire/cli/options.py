"""The flags that several commands share: the model, the sampling, the engine.

Each stands under the name that the engine, or SamplingParams, has for it; those that were not given
are not handed on, so that the defaults stay where they belong. Only light imports. Called by
`parser` and `serve`.
"""

import argparse
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from quire.attention.registry import backend_names
from quire.formats.registry import weight_format_names

ENGINE_OPTIONS = (
    "tokenizer",
    "revision",
    "device",
    "dtype",
    "max_model_len",
    "block_size",
    "kv_cache_memory",
    "num_blocks",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "num_lookahead_blocks",
    "eviction",
    "max_itl_ratio",
    "quantization",
    "kernels",
    "attention_backend",
    "num_threads",
    "tensor_parallel_size",
    "batch_invariant",
    "async_scheduling",
    "enforce_eager",
    "max_logprobs",
    "allow_special_tokens",
)
"""Handed to the engine under these names, where given; the defaults are the engine's own."""

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
"""Handed to SamplingParams under these names; None there means the model's default."""

SERVED_MAX_ITL_RATIO = 2.8

MODEL_HELP = "folder or hub id of a model in Hugging Face format (the embedded model)"


class Once(argparse.Action):
    """Stores a value that may be given as a flag or by its place, but not as both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before not in (None, values):
            parser.error(f"the {self.dest} is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)


def add_model_by_place(parser: argparse.ArgumentParser) -> None:
    """MODEL without a flag, for a command that has --model with the action Once as well."""
    parser.add_argument(
        "model",
        nargs="?",
        action=Once,
        metavar="MODEL",
        help=MODEL_HELP,
        default=argparse.SUPPRESS,  # so that its absence leaves alone what --model has set
    )


def token_count(text: str) -> int:
    """A number that may end in k, m or g (thousands), or in K, M or G (powers of 1024), as in vLLM:
    4k is 4000, 4K is 4096, 1.5k is 1500."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number; it may end in k or K, as 4k")
    base = 1000 if found[2].islower() else 1024
    count = Fraction(found[1]) * base ** " kmg".index(found[2].lower() or " ")
    if count.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {float(count):g}, no whole number")
    return int(count)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the engine, `model` included, by the engine's own names."""
    names = ("model", *ENGINE_OPTIONS)
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the sampling, by SamplingParams' names."""
    return {name: getattr(args, name) for name in SAMPLING_OPTIONS}


def add_debug(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group(
        "sampling", "An option that is left out has the model's own default."
    )
    limit = "as many as fit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        default=max_tokens,
        help=f"tokens to generate at most ({limit})",
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the likeliest token"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample among the likeliest tokens with sum P"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="sample among the K likeliest tokens; 0: all"
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample among tokens at least P times as likely as the likeliest",
    )
    group.add_argument(
        "--seed", type=int, help="seed of the random numbers: makes sampling reproducible"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The engine's options, in groups."""
    _add_model_options(parser)
    _add_memory_options(parser)
    _add_scheduling_options(parser)
    _add_computation_options(parser)


def _any_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _add_computation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("computation")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    group.add_argument(
        "--kernels",
        metavar="NAME",
        help="avx512_bf16, avx512, avx2, portable; triton on a GPU; or torch (auto)",
    )
    group.add_argument(
        "--attention-backend",
        metavar="NAME",
        help=f"{_any_of(backend_names())} (the best for the kernels)",
    )
    group.add_argument(
        "--num-threads", type=int, metavar="N", help="computing threads (one per processor)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="processes that share every layer, each on its own GPU (1)",
    )
    group.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="make answers on a GPU independent of what else runs, to the bit; slower. CPU"
        " kernels always do (no)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the previous one runs (yes on a GPU, no on a CPU)",
    )
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="don't use CUDA graphs: less memory, slower decoding (no)",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder or hub id of the tokenizer (the model's)"
    )
    group.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of the hub id (main)"
    )
    group.add_argument(
        "--dtype", help="number format: auto, float32, bfloat16, float16; also half, float (auto)"
    )
    group.add_argument(
        "--quantization",
        metavar="NAME",
        help=f"round weights to {' or '.join(weight_format_names())} while loading (none)",
    )
    group.add_argument(
        "--max-model-len",
        type=token_count,
        metavar="N",
        help="tokens of one sequence, such as 4k (the model's limit, or what fits)",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        metavar="N",
        help="highest logprobs that a request may ask for (20)",
    )
    group.add_argument(
        "--allow-special-tokens",
        action=argparse.BooleanOptionalAction,
        help="let special tokens that are written out in chat messages take effect (no)",
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--kv-cache-memory", metavar="SIZE", help="size of the KV cache, such as 2GiB"
    )
    group.add_argument(
        "--num-blocks", type=int, metavar="N", help="number of KV blocks, instead of a size"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="X",
        help="share of the GPU's memory (on a CPU: of the machine's) for weights and KV cache"
        " together, instead of a size",
    )
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block (16)")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV blocks of equal prefixes (yes)",
    )
    group.add_argument(
        "--eviction", metavar="NAME", help="eviction order: hit_density (default) or lru"
    )
    group.add_argument(
        "--num-lookahead-blocks",
        type=int,
        metavar="N",
        help="KV blocks reserved ahead per sequence (1)",
    )


def _add_scheduling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="sequences per step at most (64)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=token_count,
        metavar="N",
        help="tokens per step at most (2048)",
    )
    group.add_argument(
        "--scheduling-policy",
        metavar="NAME",
        help="fcfs, priority, fair, longest_prefix or deadline (fcfs)",
    )
    group.add_argument(
        "--max-itl-ratio",
        type=float,
        metavar="X",
        help="prompts may make a step of running sequences X times as long; 0: no limit"
        f" (0; serve: {SERVED_MAX_ITL_RATIO})",
    )
