"""Code that the sections of `gpu.py` share: result rows, clocks, engines, random models.

A section is a function of a `Bench`. It asks the bench for the device, for engines and for times,
and gives it rows; it knows neither the other sections nor the report.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.floors import PRECISIONS, Floors, ModelShape, Roofline
from quire.assembly.build import build_engine
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import StepFailedError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One result. value: None for a check that has no number. ok: None where nothing is asked for.

    goal: what the value is held against, in words. note: what one must know to read it.
    """

    section: str
    name: str
    value: float | None
    unit: str = ""
    ok: bool | None = None
    goal: str = ""
    note: str = ""


@dataclass(slots=True)
class Bench:
    """One section's view of the machine.

    small: a miniature on the CPU, where times mean nothing. folder: for models and for what one
    section leaves to the next. out: each row goes there at once, as a line of JSON.
    """

    section: str
    folder: Path
    out: Path
    small: bool = False
    deadline_s: float = float("inf")
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of measurements. Sections with checks choose their own."""
        return torch.float32 if self.small else torch.bfloat16

    @property
    def left_s(self) -> float:
        """Until the section has to end."""
        return self.deadline_s - time.monotonic()

    # ---- results ----------------------------------------------------------------------------

    def add(self, name: str, value: float | None, unit: str = "", **more: Any) -> None:
        """See `Row`."""
        self.add_row(Row(self.section, name, None if value is None else float(value), unit, **more))

    def add_row(self, row: Row) -> None:
        """Add a row that was made elsewhere."""
        self.rows.append(row)
        with open(self.out, "a") as lines:
            lines.write(json.dumps(asdict(row)) + "\n")
        shown = "" if row.value is None else f" {row.value:.4g} {row.unit}"
        verdict = {True: " ok", False: " NOT OK", None: ""}[row.ok]
        print(f"{self.section}: {row.name}:{shown}{verdict} {row.note}".rstrip(), flush=True)

    def at_least(
        self, name: str, value: float, goal: float, unit: str = "", note: str = ""
    ) -> None:
        """A value with a lower bound, which a miniature is not held to."""
        ok = None if self.small else value >= goal
        self.add(name, value, unit, ok=ok, goal=f">= {goal:g}", note=note)

    def at_most(
        self, name: str, value: float, goal: float, unit: str = "", note: str = "", *, is_time: bool
    ) -> None:
        """A value with an upper bound; a miniature's times are not held to it. NaN is beyond it."""
        ok = None if self.small and is_time else value <= goal
        self.add(name, value, unit, ok=ok, goal=f"<= {goal:g}", note=note)

    def check(self, name: str, ok: bool, note: str = "") -> None:
        """Something that is right or wrong."""
        self.add(name, None, ok=bool(ok), note=note)

    # ---- times ------------------------------------------------------------------------------

    def sync(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def time_s(self, call: Callable[[], object], *, reps: int = 20, warmups: int = 3) -> float:
        """Seconds of one call on the device, the median."""
        if self.small:
            began_s = time.perf_counter()
            call()
            return time.perf_counter() - began_s
        for _ in range(warmups):
            call()
        marks = [_event() for _ in range(reps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        took_ms = [first.elapsed_time(last) for first, last in pairwise(marks)]
        return statistics.median(took_ms) / 1e3

    def time_graph_s(self, call: Callable[[], object], *, reps: int = 20) -> float:
        """Like `time_s`, without the cost of launches: the call is captured once and replayed."""
        if self.small:
            return self.time_s(call)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.time_s(graph.replay, reps=reps)

    # ---- what the machine gives -------------------------------------------------------------

    def roofline(self) -> Roofline:
        """Copy bandwidth, reads and writes counted, and the rate of bf16 products: measured once
        for all sections."""
        path = self.folder / "rates.json"
        if not path.exists():
            path.write_text(json.dumps(self._measure_rates()))
        rates = json.loads(path.read_text())
        return Roofline(rates["copy_bytes_s"], {"bf16": rates["ops_s"], "fp32": rates["ops_s"]})

    def _measure_rates(self) -> dict[str, float]:
        return {"copy_bytes_s": self._copy_rate(), "ops_s": self._product_rate()}

    def _copy_rate(self) -> float:
        num_bytes = 2**20 if self.small else 4 * GIB
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.time_s(lambda: target.copy_(source))

    def _product_rate(self) -> float:
        size = 64 if self.small else 8192
        # Random numbers: zeros are multiplied faster, with less power.
        a, b = (torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        return 2 * size**3 / self.time_s(lambda: a @ b, warmups=10)

    # ---- engines ----------------------------------------------------------------------------

    def engine(self, model: Path, **options: Any) -> Engine:
        """quire on this device. On the CPU Triton's interpreter runs the kernels."""
        given: dict[str, Any] = {
            "model": str(model),
            "device": self.device.type,
            "kernels": "triton",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
        }
        if self.small:
            given |= {"async_scheduling": True, "block_size": 8}
        if not self.small:
            gc.collect()  # an engine before this one, if its last user has let go of it
            torch.cuda.empty_cache()
        return build_engine(given | options)

    def floors(self, model: Path) -> Floors:
        """The least times of a model's work on this device."""
        precision = PRECISIONS["fp32" if self.small else "bf16"]
        return Floors(ModelShape.from_folder(model), precision, self.roofline())


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


# ---- a load -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and their times."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are all there at once: prompts, and how many tokens each is to get."""

    prompts: Sequence[Sequence[int]]
    num_tokens: Sequence[int]
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_tokens)


def drive(engine: Engine, load: Load) -> tuple[list[Answer], float]:
    """The answers, in order, and the seconds that they took. End tokens end nothing."""
    answers = {str(index): Answer() for index in range(len(load.prompts))}
    began_s = time.perf_counter()
    for index, (prompt, count) in enumerate(zip(load.prompts, load.num_tokens, strict=True)):
        params = DecodingParams(max_tokens=count, seed=index, **load.params)
        engine.add(Request(str(index), list(prompt), params))
    while engine.has_work():
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.logprobs += [entry.logprob for entry in output.logprobs or ()]
            answer.times_s += [now_s] * len(output.token_ids)
    duration_s = time.perf_counter() - began_s
    lengths = [len(answer.token_ids) for answer in answers.values()]
    assert lengths == list(load.num_tokens), "answers are not as long as was asked for"
    return list(answers.values()), duration_s


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids; no two prompts begin alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


# ---- models of random weights -------------------------------------------------------------------

QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
MINIATURE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 512,
}
_COMMON: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "bos_token_id": None}
_COMMON |= {"eos_token_id": None, "pad_token_id": None}

# Weights are cut from one stretch of this number of random numbers, at different places. For speed
# this is as good as fresh numbers, and 8 billion weights are made in seconds.
_NUM_RANDOM = 2**24 + 3


def make_model(bench: Bench, name: str, config: Mapping[str, Any], *, std: float = 0.02) -> Path:
    """A folder in Hugging Face's format with random weights of the bench's dtype; made once."""
    folder = bench.folder / name
    if (folder / "done").exists():
        return folder
    config = {**_COMMON, **config, **(MINIATURE if bench.small else {})}
    config["dtype"] = str(bench.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    _write_weights(folder, config, bench.dtype, std)
    (folder / "done").touch()
    return folder


def _write_weights(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, std: float) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(len(folder.name))
    count = min(_NUM_RANDOM, 2**18 + 3 if config["hidden_size"] < 64 else _NUM_RANDOM)
    source = (torch.randn(count, generator=generator) * std).to(dtype)
    files: dict[str, str] = {}
    for index, shapes in enumerate(_weight_shapes(config)):
        tensors = {
            name: _cut(source, shape, 7919 * (len(files) + place))
            for place, (name, shape) in enumerate(shapes.items())
        }
        file = f"model-{index:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index_file = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))


def _cut(source: torch.Tensor, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """Norms are ones with a little noise."""
    values = torch.empty(shape, dtype=source.dtype)
    flat, filled = values.view(-1), 0
    while filled < len(flat):
        begin = (offset + filled) % len(source)
        piece = source[begin : begin + len(flat) - filled]
        flat[filled : filled + len(piece)] = piece
        filled += len(piece)
    return values + 1 if len(shape) == 1 else values


def _weight_shapes(config: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, file by file: one file a layer, one for the rest."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    vocab = (config["vocab_size"], hidden)
    rest: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab}
    rest["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        rest["lm_head.weight"] = vocab
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    return [
        {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        for index in range(config["num_hidden_layers"])
    ] + [rest]
