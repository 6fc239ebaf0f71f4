"""Many LoRA adapters on one model: what it costs that they don't all lie in slots.

    python -m benchmarks.adapters [--adapters 1000] [--slots 32] [--requests 400] [--rounds 3]

Two crowds on the embedded model, in turns in one process: of as many adapters as there are slots,
and of all, of which most lie on disk. Each request has an adapter drawn by Zipf's law, the same
prompt length and the same number of tokens; all come at once. Beside them a crowd without adapters.
Prints tokens per second, the ratio, and how often adapters were loaded and read.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import quire
from quire import LLM, LoRARequest, SamplingParams

MODEL = Path(quire.__file__).parent / "embedded_model"
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
LIMIT = 2.0
"""The ratio that is aimed at: see docs/adapters.md."""


def save_adapters(root: Path, count: int, rank: int) -> list[LoRARequest]:
    """Adapters on q and v of all layers of the embedded model, each of other numbers."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    sizes = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(sizes)}
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer, (name, heads) in itertools.product(
            range(config["num_hidden_layers"]), sizes.items()
        ):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (rank, hidden), "lora_B": (heads * width, rank)}
            for part, shape in shapes.items():
                tensors[f"{path}.{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
        folder = root / f"adapter-{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "adapter_model.safetensors")
        found.append(LoRARequest(folder.name, number + 1, str(folder)))
    return found


class Crowd:
    """One engine, and the requests that it is asked. name: in the table."""

    def __init__(self, name: str, adapters: Sequence[LoRARequest], options: argparse.Namespace):
        slots = {"max_loras": options.slots, "max_lora_rank": options.rank}
        slots |= {"enable_lora": True, "max_cpu_loras": options.host or 2 * options.slots}
        self.name = name
        self._llm = LLM(
            max_num_seqs=options.sequences,
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
            enable_prefix_caching=False,
            kernels=options.kernels,
            **(slots if adapters else {}),
        )
        rng = random.Random(7)
        weights = [1 / rank**options.exponent for rank in range(1, len(adapters) + 1)]
        count = options.requests
        self._named = rng.choices(adapters, weights, k=count) if adapters else [None] * count
        self._prompts = [
            {"prompt_token_ids": [rng.randrange(3, 4000) for _ in range(PROMPT_TOKENS)]}
            for _ in range(count)
        ]
        self.num_named = len({each.lora_name for each in self._named if each is not None})

    def run(self) -> float:
        """Tokens per second of all requests."""
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        began_s = time.perf_counter()
        outputs = self._llm.generate(self._prompts, params, False, self._named)
        elapsed_s = time.perf_counter() - began_s
        assert all(output.error is None for output in outputs)
        return len(outputs) * OUTPUT_TOKENS / elapsed_s

    def counts(self) -> tuple[int, int]:
        """Loads into slots and readings from disk, so far."""
        found = self._llm.engine.stats().adapters
        return found.get("num_loads", 0), found.get("num_reads", 0)


def main() -> None:
    """Measure and print."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as root:
        print(f"saving {options.adapters} adapters of rank {options.rank}", flush=True)
        adapters = save_adapters(Path(root), options.adapters, options.rank)
        crowds = [
            Crowd("no adapters", [], options),
            Crowd("all resident", adapters[: options.slots], options),
            Crowd("all registered", adapters, options),
        ]
        for crowd in crowds:
            crowd.run()  # each adapter is found; the first steps warm up
        rates: dict[str, list[float]] = {crowd.name: [] for crowd in crowds}
        before = {crowd.name: crowd.counts() for crowd in crowds}
        for _, crowd in itertools.product(range(options.rounds), crowds):
            rates[crowd.name].append(crowd.run())
        for crowd in crowds:
            loads, reads = (
                (now - then) / options.rounds
                for now, then in zip(crowd.counts(), before[crowd.name], strict=True)
            )
            low, high = min(rates[crowd.name]), max(rates[crowd.name])
            print(
                f"{crowd.name:15} {statistics.median(rates[crowd.name]):8.0f} tokens/s"
                f" ({low:.0f} to {high:.0f}), {crowd.num_named} adapters named,"
                f" {loads:.0f} loads and {reads:.0f} readings a round"
            )
        ratios = [
            resident / registered
            for resident, registered in zip(
                rates["all resident"], rates["all registered"], strict=True
            )
        ]
        print(f"all registered is {statistics.median(ratios):.2f}x slower; at most {LIMIT}x wanted")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = {"adapters": 1000, "slots": 32, "requests": 400, "rounds": 3, "rank": 8}
    numbers |= {"sequences": 32, "host": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--kernels", default="auto", help="see `quire serve --help`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
