"""Damaged and lying model folders: each is served or refused in a sentence, fast and small.

    python benchmarks/fuzz_checkpoint.py --cases 10000 --seed 0 --out fuzz_checkpoint.json

makes a model of two layers, changes what its files say (numbers beyond all bounds, other types,
names that are missing or there twice, offsets, shapes and lengths of the weights' header, bytes
that are cut, flipped or somebody else's), and loads and runs it in a process of its own. A case
fails if it raises anything but an error of quire, if the error is not one line, if the process is
killed, takes more than 2 s of processor time or grows by more than 200 MB, if what is served is not
finite, or if a change of fields that should not matter changes the tokens. Cases follow from the
seed and their number alone, so `--first N --cases 1` repeats one. Also used by the tests, with
fewer cases.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

MAX_CPU_S = 2.0
MAX_GROWTH_BYTES = 200 << 20
MAX_WALL_S = 60
"""A process that waits for ever takes no processor time; only that is found by this."""
MAX_MESSAGE_CHARACTERS = 1200

Files = dict[str, bytes | None]
"""File name -> content; None: a pipe that nobody writes to."""

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "any",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": [299],
    "transformers_version": "4.51.0",
    "use_cache": True,
    "initializer_range": 0.02,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
)
HARMLESS = ("model_type", "transformers_version", "use_cache", "initializer_range", "label2id")
"""Fields of config.json that change no token, whatever they say."""

EXTRA_FIELDS = (
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "label2id"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias"),
    *("quantization_config", "dtype", "pretraining_tp", "original_max_position_embeddings"),
    *("some_new_field", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("do_sample", "added_tokens_decoder", "extra_special_tokens", "bos_token", "chat_template"),
    *("factor", "short_factor", "long_factor", "mscale", "attention_factor", "truncate"),
)
"""Names that the reader may know, in a file that lacks them."""

HOSTILE = (
    *("null", "true", "false", "0", "-0.0", "1", "2", "3", "-1", "0.5", "1e-400", "1e-6", "7.0"),
    *("127", "255", "65536", "2147483647", "2147483648", "4294967295", "9007199254740993"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551615", "1000000000"),
    *("1e400", "-1e400", "1e308", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5000),
    *('""', '"x"', '"1"', r'"\ud800"', r'"\u0000"', r'"a\nb"', '"' + "y" * 5000 + '"', '"auto"'),
    *("[]", "{}", "[null]", "[[]]", "[1, 2]", "[-1]", '{"a": 1}', '[{"a": []}]', '["x", "x"]'),
    *("[0, 1]", "[1e400, 1]", "[" * 3000 + "]" * 3000, "[" * 100_000, '{"": {"": {"": 0}}}'),
)
FOREIGN = (
    b"",
    b"{}",
    b"null",
    b"\0" * 64,
    b"GGUF\x03\0\0\0" + b"\0" * 64,
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7612736\n",
    b"<!DOCTYPE html><html>not found</html>",
    b"\xff\xfe{\0}\0",
    b"PK\x03\x04" + b"\0" * 64,
    b"[" * 200_000,
)
DTYPES = ("F64", "F32", "F16", "BF16", "I32", "I8", "F8_E4M3", "BOOL", "F4", "NOPE", "")


class Raw(str):
    """JSON text that no Python value stands for: 1e400, a name that is there twice."""


def render(value: Any) -> bytes:
    """JSON of a value with `Raw` in it."""
    raws: list[str] = []

    def plain(one: Any) -> Any:
        if isinstance(one, Raw):
            raws.append(str(one))
            return f"@raw{len(raws) - 1}@"
        if isinstance(one, dict):
            return {name: plain(inner) for name, inner in one.items()}
        return [plain(inner) for inner in one] if isinstance(one, list) else one

    text = json.dumps(plain(value))
    for index, raw in enumerate(raws):
        text = text.replace(f'"@raw{index}@"', raw)
    return text.encode(errors="surrogatepass")


def make_files(family: str, rope: dict[str, Any] | None) -> Files:
    """A sound model folder of a few kilobytes."""
    config = CONFIG | {"architectures": [family]} | ({"rope_scaling": rope} if rope else {})
    if family == "MistralForCausalLM":
        config["sliding_window"] = 32
    shapes = _shapes(config, family)
    draw = np.random.default_rng(0)
    tensors = {name: draw.normal(0, 0.2, shape) for name, shape in shapes.items()}
    return {
        "config.json": render(config),
        "generation_config.json": render({"eos_token_id": [299], "temperature": 0.7}),
        "tokenizer.json": render(_tokenizer()),
        "tokenizer_config.json": render({"eos_token": "</s>", "chat_template": "{{ messages }}"}),
        "special_tokens_map.json": render({"eos_token": {"content": "</s>", "lstrip": False}}),
        "model.safetensors": _safetensors(tensors),
    }


def _shapes(config: dict[str, Any], family: str) -> dict[str, tuple[int, ...]]:
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (q, size),
        "self_attn.k_proj.weight": (kv, size),
        "self_attn.v_proj.weight": (kv, size),
        "self_attn.o_proj.weight": (size, q),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if family == "Qwen2ForCausalLM":
        layer |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
    if family == "Qwen3ForCausalLM":
        layer |= {f"self_attn.{p}_norm.weight": (head,) for p in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (300, size)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (size,), "lm_head.weight": (300, size)}


def _safetensors(tensors: dict[str, Any]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        content = tensor.astype(np.float32).tobytes()
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        data += content
    return with_header(render(header), data)


def with_header(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def _tokenizer() -> dict[str, Any]:
    """Bytes, a few merges and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a")]
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


@dataclass(slots=True)
class Case:
    """number: what it follows from, beside the seed. is_same: its tokens are those of the sound
    folder that it was made from."""

    number: int
    what: list[str]
    files: Files
    sound: str
    is_same: bool = False


class Mutator:
    """Draws cases."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        kinds: list[tuple[str, dict[str, Any] | None]] = [(family, None) for family in FAMILIES]
        kinds += [("LlamaForCausalLM", rope) for rope in ROPES]
        self.sound = {
            f"{family} {rope['rope_type'] if rope else 'default'}": make_files(family, rope)
            for family, rope in kinds
        }

    def draw(self, number: int) -> Case:
        """The same case for the same number, always."""
        rng = random.Random(f"{self._seed} {number}")
        sound = rng.choice(list(self.sound))
        case = Case(number, [sound], dict(self.sound[sound]), sound)
        change = rng.choices(
            (self._lie, self._harmless, self._header, self._bytes, self._folder),
            (50, 5, 25, 15, 5),
        )[0]
        change(case, rng)
        return case

    def _lie(self, case: Case, rng: random.Random) -> None:
        """In one of the JSON files, most often config.json."""
        names = [name for name in case.files if name.endswith(".json")]
        name = "config.json" if rng.random() < 0.6 else rng.choice(names)
        content = json.loads(case.files[name] or b"")
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            case.what.append(f"{name}: {mutate_json(content, rng)}")
        case.files[name] = render(content)

    def _harmless(self, case: Case, rng: random.Random) -> None:
        content = json.loads(case.files["config.json"] or b"")
        value = rng.choice([value for value in HOSTILE if len(value) < 2000])
        name = rng.choice(HARMLESS)
        content[name] = Raw(value)
        case.what.append(f"config.json: harmless {name} = {value:.60}")
        case.files["config.json"] = render(content)
        case.is_same = True

    def _header(self, case: Case, rng: random.Random) -> None:
        content = case.files["model.safetensors"] or b""
        size = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        what = mutate_header(header, rng) if rng.random() < 0.6 else mutate_json(header, rng)
        case.what.append(f"header: {what}")
        case.files["model.safetensors"] = with_header(render(header), data)
        if rng.random() < 0.1:
            other = rng.choice((0, 1, size - 1, size + 1, len(content), 1 << 40, (1 << 64) - 1))
            case.what.append(f"header's length {other}")
            case.files["model.safetensors"] = other.to_bytes(8, "little") + content[8:]

    def _bytes(self, case: Case, rng: random.Random) -> None:
        name = rng.choice(list(case.files))
        content = bytearray(case.files[name] or b"")
        # The weights themselves may hold any numbers: only what describes them is damaged.
        end = 8 + int.from_bytes(content[:8], "little") if name.endswith("tensors") else None
        kind = rng.choice(("flip", "cut", "insert", "foreign", "append"))
        at = rng.randrange(end or len(content))
        if kind == "flip":
            for _ in range(rng.choice((1, 2, 8))):
                content[rng.randrange(end or len(content))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = rng.randbytes(rng.choice((1, 4, 1000)))
        elif kind == "append":
            content += rng.randbytes(rng.choice((1, 8, 10_000)))
        else:
            content = bytearray(rng.choice(FOREIGN))
        case.what.append(f"{name}: {kind} at {at}")
        case.files[name] = bytes(content)

    def _folder(self, case: Case, rng: random.Random) -> None:
        name = rng.choice(list(case.files))
        kind = rng.choice(("remove", "pipe", "move", "index"))
        case.what.append(f"{kind} {name}")
        if kind == "remove":
            del case.files[name]
        elif kind == "pipe":
            case.files[name] = None
        elif kind == "move":
            case.files[rng.choice(("model.gguf", "pytorch_model.bin", "other"))] = case.files.pop(
                name
            )
        else:
            self._index(case, rng)

    def _index(self, case: Case, rng: random.Random) -> None:
        content = case.files.pop("model.safetensors") or b""
        size = int.from_bytes(content[:8], "little")
        names = [name for name in json.loads(content[8 : 8 + size]) if name != "__metadata__"]
        index: dict[str, Any] = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        case.files["a.safetensors"] = content
        case.what.append(f"index: {mutate_json(index, rng)}")
        case.files["model.safetensors.index.json"] = render(index)


Place = tuple[Any, Any]
"""A container and the key of one of its values."""


def _places(value: Any) -> Iterator[Place]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(entries):
        yield value, key
        if isinstance(inner, (dict, list)) and not isinstance(inner, Raw):
            yield from _places(inner)


def mutate_json(content: Any, rng: random.Random) -> str:
    """Change one value somewhere in `content`. Returns what was done."""
    places = list(_places(content))
    if not places:  # an earlier change took all
        return "nothing more"
    holder, key = rng.choice(places)
    kind = rng.choice(("set", "set", "scale", "delete", "twice", "swap", "add", "repeat"))
    value = holder[key]
    hostile = rng.choice(HOSTILE)
    if kind == "scale" and type(value) in (int, float):
        holder[key] = rng.choice(
            (value + 1, value - 1, value * 2, value // 2, value * 1000, -value)
        )
        return f"{key} = {holder[key]}"
    if kind == "delete":
        del holder[key]
        return f"without {key}"
    if kind == "twice" and isinstance(holder, dict):
        holder[key] = Raw(f"{hostile}, {json.dumps(key)}: {render(value).decode(errors='replace')}")
        return f"{key} twice, once {hostile:.60}"
    if kind == "swap":
        other, other_key = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):  # it went with the other one
            holder[key], other[other_key] = other[other_key], value
        if "Raw" in type(holder).__name__ or _is_cyclic(content):
            holder[key] = Raw(hostile)
        return f"{key} for {other_key}"
    if kind == "add" and isinstance(holder, dict):
        name = rng.choice(EXTRA_FIELDS)
        holder[name] = Raw(hostile)
        return f"{name} = {hostile:.60} beside {key}"
    if kind == "repeat" and isinstance(value, list) and len(value) < 100:
        holder[key] = value * 3000
        return f"{key} 3000 times"
    holder[key] = Raw(hostile)
    return f"{key} = {hostile:.60}"


def _is_cyclic(content: Any, above: tuple[int, ...] = ()) -> bool:
    if not isinstance(content, (dict, list)):
        return False
    inner = content.values() if isinstance(content, dict) else content
    return id(content) in above or any(_is_cyclic(one, (*above, id(content))) for one in inner)


def mutate_header(header: dict[str, Any], rng: random.Random) -> str:
    """Change one tensor's description. Returns what was done."""
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = rng.choice(("dtype", "shape", "offsets", "name", "many", "product", "scalar"))
    if kind == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == "shape":
        at = rng.randrange(len(entry["shape"]))
        entry["shape"][at] = Raw(rng.choice(HOSTILE))
    elif kind == "offsets":
        at = rng.randrange(2)
        step = rng.choice((-4, -1, 1, 4, 1 << 20, 1 << 62, -(1 << 30)))
        entry["data_offsets"][at] += step
    elif kind == "name":
        new = rng.choice(("", "x" * 5000, "model.layers.99.x", "\ud800", "a\nb", f"{name}x"))
        header[new] = header.pop(name)
    elif kind == "many":
        entries = {
            f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)
        }
        header.update(entries)
    elif kind == "product":
        entry["shape"] = rng.choice(([1 << 32, 1 << 32], [1 << 63, 2], [0, 1 << 62], [1] * 300))
    else:
        entry["shape"] = []
    return f"{kind} of {name:.60}: {str(header.get(name))[:100]}"


def extremes() -> list[Case]:
    """What is tried in every run: both ends of each field's bounds, and what is beyond them."""
    from quire.models.config_bounds import INTEGERS, NUMBERS

    cases: list[Case] = []
    sound = make_files("LlamaForCausalLM", None)

    def add(what: str, files: Files) -> None:
        cases.append(Case(-1 - len(cases), [what], sound | files, "LlamaForCausalLM default"))

    for name, bounds in (INTEGERS | NUMBERS).items():
        ends = (bounds.lowest, bounds.highest, bounds.lowest - 1, bounds.highest + 1)
        for value in (*map(repr, ends), "1e400", "1000000000", "9223372036854775808"):
            config = json.loads(sound["config.json"] or b"")
            for place in (config, *([] if name in config else ROPES)):
                place = place if place is config else config.setdefault("rope_scaling", dict(place))
                place[name] = Raw(value)
                add(f"{name} = {value}", {"config.json": render(config)})
    for count in (100_000, 1_000_000):
        entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        header = "{" + ",".join(f'"{index}":{entry}' for index in range(count)) + "}"
        add(f"{count} tensors", {"model.safetensors": with_header(header.encode(), b"")})
    padding = with_header(b" " * (1 << 27), b"")
    add("a header of 128 MiB", {"model.safetensors": padding})
    return cases


@dataclass(slots=True)
class Outcome:
    """kind: "served", "refused", or how it failed. text: tokens, the error, or the traceback."""

    kind: str
    text: str
    cpu_s: float = 0.0
    grown_bytes: int = 0

    @property
    def is_good(self) -> bool:
        return self.kind in ("served", "refused")


def serve(folder: Path, is_large: bool) -> list[int]:
    """Load the model and continue a text. is_large: with 64 rows and 64 MiB of KV cache, which a
    context of 131,072 tokens fits; the default would be a share of the machine's memory."""
    from quire import LLM, SamplingParams

    sizes: dict[str, Any] = {"kv_cache_memory": 1 << 20, "max_num_seqs": 4}
    if is_large:
        sizes = {"kv_cache_memory": 64 << 20}
    llm = LLM(str(folder), num_threads=1, **sizes)
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=6, logprobs=2, seed=1),  # the model's own options
    ]
    outputs = llm.generate(["abc ab"] * 2, wishes, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise AssertionError(f"the step failed: {output.error}")
        entries = output.outputs[0].logprobs or ()
        logprobs = [found.logprob for entry in entries for found in entry.values()]
        if not all(map(math.isfinite, logprobs)):
            raise AssertionError(f"not finite: {logprobs}")
    return list(outputs[0].outputs[0].token_ids)


def run_case(case: Case, folder: Path, job: Callable[[Path, bool], list[int]] = serve) -> Outcome:
    """In a process of its own, which is limited and measured. folder: where to write the files."""
    _write(case.files, folder)
    with tempfile.TemporaryFile() as answers:
        pid = os.fork()
        if pid == 0:
            _run_child(lambda: job(folder, case.number % 4 == 0), answers.fileno())
        _, status, usage = os.wait4(pid, 0)
        answers.seek(0)
        content = answers.read().decode(errors="replace")
    shutil.rmtree(folder)
    before, _, content = content.partition("\n")
    kind, _, text = content.partition("\n")
    grown_bytes = usage.ru_maxrss * 1024 - int(before)
    outcome = Outcome(kind, text.strip(), usage.ru_utime + usage.ru_stime, grown_bytes)
    return _judged(outcome, status)


def _judged(outcome: Outcome, status: int) -> Outcome:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        outcome.kind, outcome.text = "killed", f"{name} {outcome.kind} {outcome.text}"
    elif outcome.grown_bytes > MAX_GROWTH_BYTES:
        outcome.kind = f"grew ({outcome.kind})"
    elif outcome.cpu_s > MAX_CPU_S:
        outcome.kind = f"slow ({outcome.kind})"
    elif outcome.kind == "refused" and (
        len(outcome.text) > MAX_MESSAGE_CHARACTERS or not outcome.text.isprintable()
    ):
        outcome.kind = "unreadable"
    return outcome


def _run_child(job: Callable[[], list[int]], answers: int) -> None:
    """Never returns."""
    import traceback

    from quire.errors import QuireError

    # What is resident now is Python's and torch's; the pages of libraries that are read from now on
    # count as growth (some 50 MB).
    os.write(answers, b"%d\n" % _resident_bytes())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MAX_WALL_S)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(MAX_CPU_S) + 1, -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    try:
        text = f"served\n{job()}"
    except QuireError as error:
        text = f"refused\n{error}"
    except BaseException:  # whatever it is: for the report
        text = f"traceback\n{traceback.format_exc()}"
    os.write(answers, text.encode(errors="backslashreplace"))
    os._exit(0)


def _write(files: Files, folder: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@dataclass(slots=True)
class Fuzzed:
    """kinds: how many cases ended so. failures: what to repeat, and what came of it."""

    kinds: Counter[str] = field(default_factory=Counter)
    max_cpu_s: float = 0.0
    max_grown_bytes: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)


def fuzz(
    num_cases: int,
    seed: int = 0,
    first: int = 0,
    *,
    with_extremes: bool = True,
    job: Callable[[Path, bool], list[int]] = serve,
) -> Fuzzed:
    """Cases first .. first + num_cases - 1 of a seed, after the sound folders themselves."""
    fuzzed, mutator = Fuzzed(), Mutator(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-checkpoint-") as parent:
        folder = Path(parent) / "model"
        expected: dict[str, str] = {}
        for name, files in mutator.sound.items():
            outcome = run_case(Case(1, [name], files, name), folder, job)
            expected[name] = outcome.text
            _note(fuzzed, Case(1, [name], files, name), outcome, must_be_served=True)
        cases = (mutator.draw(number) for number in range(first, first + num_cases))
        for case in chain(extremes() if with_extremes else (), cases):
            outcome = run_case(case, folder, job)
            if case.is_same and outcome.kind == "served" and outcome.text != expected[case.sound]:
                outcome.kind = "other tokens"
            _note(fuzzed, case, outcome)
    return fuzzed


def _note(fuzzed: Fuzzed, case: Case, outcome: Outcome, must_be_served: bool = False) -> None:
    fuzzed.kinds[outcome.kind] += 1
    fuzzed.max_cpu_s = max(fuzzed.max_cpu_s, outcome.cpu_s)
    fuzzed.max_grown_bytes = max(fuzzed.max_grown_bytes, outcome.grown_bytes)
    if outcome.kind == "refused":
        fuzzed.messages[outcome.text] += 1
    if not outcome.is_good or (must_be_served and outcome.kind != "served"):
        fuzzed.failures.append({"number": case.number, "what": case.what} | asdict(outcome))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=int, default=10_000)
    add("--first", type=int, default=0, help="number of the first case")
    add("--seed", type=int, default=0)
    add("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    import quire.offline.llm  # noqa: F401 - once, and not in every process

    args = parse_args(argv)
    start_s = time.monotonic()
    fuzzed = fuzz(args.cases, args.seed, args.first, with_extremes=args.first == 0)
    for failure in fuzzed.failures:
        print(json.dumps(failure)[:3000])
    if args.out:
        found = {one.name: getattr(fuzzed, one.name) for one in fields(fuzzed)}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind, count in fuzzed.kinds.most_common():
        print(f"{count:6}  {kind}")
    print(
        f"{fuzzed.kinds.total()} cases in {time.monotonic() - start_s:.0f} s; at most"
        f" {fuzzed.max_cpu_s:.2f} s and {fuzzed.max_grown_bytes / 2**20:.0f} MiB each;"
        f" {len(fuzzed.messages)} different messages; {len(fuzzed.failures)} failures"
    )
    sys.exit(1 if fuzzed.failures else 0)


if __name__ == "__main__":
    main()
