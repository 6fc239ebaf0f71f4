"""Draws damaged model folders: the same one for the same seed and number, always."""

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoints.sound_models import (
    FAMILIES,
    ROPES,
    Files,
    Raw,
    make_files,
    render,
    with_header,
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
    """Cases of every run: values at both ends of each field's bounds, and beyond the bounds."""
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
