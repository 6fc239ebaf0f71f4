"""Draws damaged GGUF files: the same one for the same seed and number, always."""

import copy
import random
import struct
from collections.abc import Callable

from benchmarks.checkpoints.damage import FOREIGN, Case
from benchmarks.checkpoints.gguf_models import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    U64,
    Parts,
    Tensor,
    as_files,
    make_parts,
    string,
    value,
)

SOUND = (
    ("LlamaForCausalLM", "F32"),
    ("LlamaForCausalLM", "Q8_0"),
    ("LlamaForCausalLM", "Q4_0"),
    ("LlamaForCausalLM", "Q4_K"),
    ("LlamaForCausalLM", "Q6_K"),
    ("LlamaForCausalLM", "IQ4_XS"),
    ("Qwen2ForCausalLM", "F32"),
    ("Qwen3ForCausalLM", "Q8_0"),
)
COUNTS = (
    *(0, 1, 2, 3, 7, 31, 33, 127, 255, 256, 65535, 65536, 1000, 10**6, 10**9, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1),
)
KINDS = (*range(0, 45), 99, 2**31, 2**32 - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e-6, 0.5, 1.0, 1e30, 3e38, float("inf"), float("nan"))
TEXTS = (
    *(b"", b"x", b"\xff\xfe", b"\xed\xa0\x80", b"a\nb", b"y" * 5000, b"llama", b"gpt2", b"linear"),
    *(b"yarn", b"longrope", "naïve 仮".encode(), b"{{ raise }}", b"{% for x in", b"\0"),
)
NAMES = (
    *("general.alignment", "general.type", "general.architecture", "split.count", "split.no"),
    *("split.tensors.count", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count"),
    *("expert_count", "expert_used_count", "attention.sliding_window", "vocab_size", "some.new"),
    *("rope.scaling.original_context_length", "attention.causal", "nextn_predict_layers"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token"),
    *("tokenizer.chat_templates", "general.sampling.temp", "tokenizer.ggml.precompiled_charsmap"),
)
TENSOR_NAMES = (
    *(b"", b"x" * 5000, b"\xff", b"a\nb", b"blk.99.attn_q.weight", b"rope_freqs.weight"),
    *(b"blk.0.ffn_up_exps.weight", b"blk.0.attn_q.bias", b"blk.999999999.x", b"output.weight"),
    *(b"rope_factors_long.weight", b"rope_factors_short.weight", b"token_embd.weight"),
)


class GGUFMutator:
    """Draws cases, as `damage.Mutator` does of safetensors folders."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._parts = {f"{family} {kind}": make_parts(family, kind) for family, kind in SOUND}
        self.sound = {name: as_files(parts) for name, parts in self._parts.items()}

    def draw(self, number: int) -> Case:
        """The same case for the same number, always."""
        rng = random.Random(f"gguf {self._seed} {number}")
        sound = rng.choice(list(self.sound))
        case = Case(number, [sound], {}, sound)
        changes: tuple[Callable[[Case, Parts, random.Random], None], ...]
        changes = (self._fields, self._tensors, self._counts, self._bytes, self._files)
        parts = copy.deepcopy(self._parts[sound])
        rng.choices(changes, (35, 30, 10, 20, 5))[0](case, parts, rng)
        case.files = case.files or as_files(parts)
        return case

    def _fields(self, case: Case, parts: Parts, rng: random.Random) -> None:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            case.what.append(damage_field(parts, rng))

    def _tensors(self, case: Case, parts: Parts, rng: random.Random) -> None:
        for _ in range(rng.choice((1, 1, 1, 2))):
            case.what.append(damage_tensor(parts, rng))

    def _counts(self, case: Case, parts: Parts, rng: random.Random) -> None:
        which = rng.randrange(4)
        if which < 2:
            near = len(parts.tensors) if which == 0 else len(parts.fields)
            parts.counts[which] = rng.choice((*COUNTS, near - 1, near + 1))
        elif which == 2:
            parts.version = rng.choice((0, 1, 2, 4, 2**24, 3 << 24, 2**32 - 1))
        else:
            parts.magic = rng.choice((b"GGUf", b"FUGG", b"\0\0\0\0", b"PK\3\4", b"GGML"))
        case.what.append(f"counts {parts.counts}, version {parts.version}, {parts.magic!r}")

    def _bytes(self, case: Case, parts: Parts, rng: random.Random) -> None:
        """The weights themselves may hold any numbers: only what describes them is damaged."""
        whole, length = parts.render()
        content = bytearray(whole)
        at = rng.randrange(length)
        kind = rng.choice(("flip", "cut", "insert", "splice", "foreign", "append"))
        if kind == "flip":
            for _ in range(rng.choice((1, 2, 8))):
                content[rng.randrange(length)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[rng.choice((at, rng.randrange(len(content)))) :]
        elif kind == "insert":
            content[at:at] = rng.randbytes(rng.choice((1, 4, 8, 1000)))
        elif kind == "splice":
            start, size = rng.randrange(length), rng.choice((1, 8, 100))
            content[at : at + size] = content[start : start + size]
        elif kind == "append":
            content += rng.randbytes(rng.choice((1, 8, 10_000)))
        else:
            content = bytearray(rng.choice(FOREIGN))
        case.what.append(f"{kind} at {at}")
        case.files = {"model.gguf": bytes(content)}

    def _files(self, case: Case, parts: Parts, rng: random.Random) -> None:
        """Several files, or other names."""
        name = rng.choice(("model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "mmproj.gguf"))
        case.files = as_files(parts, name)
        if rng.random() < 0.7:
            other = Parts({}, [], b"")
            for part, number in ((parts, 0), (other, 1)):
                part.fields[b"split.no"] = value(rng.choice((number, number, number, 5)))
                part.fields[b"split.count"] = value(rng.choice((2, 2, 2, 3)))
            moved = parts.tensors.pop()
            offset = moved.offset
            other.data, moved.offset = parts.data[offset:], 0
            other.tensors.append(moved)
            case.files = as_files(parts, "model-00001-of-00002.gguf")
            case.files |= as_files(other, rng.choice(("model-00002-of-00002.gguf", "b.gguf")))
        case.what.append(f"files {list(case.files)}")


def damage_field(parts: Parts, rng: random.Random) -> str:
    """Change one field of metadata. Returns what was done."""
    name = rng.choice(list(parts.fields))
    kind = rng.choice(("set", "set", "type", "count", "cut", "delete", "twice", "rename", "add"))
    old = parts.fields[name]
    shown = name.decode(errors="replace")
    if kind == "delete":
        del parts.fields[name]
    elif kind == "twice":
        parts.twice.append(string(name) + old)
    elif kind == "rename":
        parts.fields[rng.choice(TEXTS)] = parts.fields.pop(name)
    elif kind == "type":
        parts.fields[name] = struct.pack("<I", rng.choice((*range(14), 99, 2**32 - 1))) + old[4:]
    elif kind == "cut":
        parts.fields[name] = old[: rng.randrange(len(old))]
    elif kind == "count" and old[:4] in (struct.pack("<I", each) for each in (ARRAY, STRING)):
        start = 8 if old[:4] == struct.pack("<I", ARRAY) else 4
        count = struct.pack("<Q", rng.choice(COUNTS))
        parts.fields[name] = old[:start] + count + old[start + 8 :]
    elif kind == "add":
        added = rng.choice(NAMES)
        if not added.startswith(("general.", "split.", "tokenizer.")):
            added = f"{shown.partition('.')[0]}.{added}"
        parts.fields[added.encode()] = hostile_value(rng)
        shown = added
    else:
        parts.fields[name] = hostile_value(rng)
    return f"{kind} of {shown:.60}"


def hostile_value(rng: random.Random) -> bytes:
    """The bytes of a random type and of a value of this type."""
    kind = rng.choice((U32, I32, F32, BOOL, STRING, ARRAY, U64, 12))
    if kind == STRING:
        return struct.pack("<I", kind) + string(rng.choice(TEXTS))
    if kind == ARRAY:
        inner = rng.choice((U32, BOOL, STRING, F32, ARRAY))
        count = rng.choice((0, 1, 2, 300, *COUNTS[-6:]))
        content = rng.randbytes(rng.choice((0, 8, 1200)))
        return struct.pack("<IIQ", kind, inner, count) + content
    if kind in (F32, 12):
        number = rng.choice(FLOATS)
        return struct.pack("<If" if kind == F32 else "<Id", kind, number)
    letter, limit = {U32: ("I", 32), I32: ("i", 31), U64: ("Q", 64), BOOL: ("B", 8)}[kind]
    count = rng.choice([each for each in COUNTS if each < 1 << limit])
    return struct.pack(f"<I{letter}", kind, count)


def damage_tensor(parts: Parts, rng: random.Random) -> str:
    """Change what is said of one tensor. Returns what was done."""
    tensor = rng.choice(parts.tensors)
    name = tensor.name.decode(errors="replace")
    kind = rng.choice(
        (
            "size",
            "size",
            "dims",
            "type",
            "type",
            "offset",
            "offset",
            "name",
            "delete",
            "twice",
            "many",
        )
    )
    if kind == "size":
        at = rng.randrange(len(tensor.dims))
        near = tensor.dims[at]
        tensor.dims[at] = rng.choice((*COUNTS, near - 1, near + 1, near * 2, near // 2))
        tensor.dims[at] %= 1 << 64
    elif kind == "dims":
        tensor.dims = rng.choice(
            (
                [],
                [1] * 5,
                [1] * 300,
                [2**32, 2**32],
                [2**63, 2, 2, 2],
                tensor.dims[::-1],
                [0, 2**62],
            )
        )
    elif kind == "type":
        tensor.kind = rng.choice(KINDS)
    elif kind == "offset":
        step = rng.choice((-32, -1, 1, 4, 32, 2**20, 2**62, 2**63))
        tensor.offset = rng.choice((*COUNTS, tensor.offset + step)) % (1 << 64)
    elif kind == "name":
        tensor.name = rng.choice((*TENSOR_NAMES, rng.choice(parts.tensors).name))
    elif kind == "delete" and len(parts.tensors) > 1:
        parts.tensors.remove(tensor)
    elif kind == "twice":
        parts.tensors.append(copy.copy(tensor))
    else:
        parts.tensors += [Tensor(b"t%d" % n, [1], 0, len(parts.data)) for n in range(3000)]
    return f"{kind} of {name:.60}"


def large_files() -> list[Case]:
    """Cases of every run: headers of many megabytes, which should take no more memory than they
    have bytes."""
    plain = make_parts("LlamaForCausalLM", "F32")
    cases: list[Case] = []

    def add(what: str, parts: Parts) -> None:
        case = Case(-1 - len(cases), [what], as_files(parts), "LlamaForCausalLM F32")
        cases.append(case)

    for count, text in (
        (1_000_000, b""),
        (5_000_000, b""),
        (1_000_000, b"ab"),
        (300_000, b"x" * 99),
    ):
        parts = copy.deepcopy(plain)
        entries = string(text) * count
        parts.fields[b"tokenizer.ggml.merges"] = struct.pack("<IIQ", ARRAY, STRING, count) + entries
        add(f"{count} strings of {len(text)} bytes", parts)
    parts = copy.deepcopy(plain)
    zeros = struct.pack("<IIQ", ARRAY, U32, 10_000_000) + bytes(40_000_000)
    parts.fields[b"x"] = zeros
    add("10,000,000 numbers", parts)
    parts = copy.deepcopy(plain)
    for index in range(40):
        long = "仮".encode() * (1 << 20)
        parts.fields[b"x%d" % index] = struct.pack("<I", STRING) + string(long)
    add("40 long strings", parts)
    for count in (131_000, 132_000):
        parts = copy.deepcopy(plain)
        parts.tensors += [Tensor(b"t%d" % n, [1], 0, ALIGNMENT * n) for n in range(count)]
        parts.data += bytes(ALIGNMENT * count)
        add(f"{count} tensors", parts)
    for count in (16_000, 17_000):
        parts = copy.deepcopy(plain)
        parts.fields |= {b"f%d" % n: value(n) for n in range(count)}
        add(f"{count} fields", parts)
    return cases
