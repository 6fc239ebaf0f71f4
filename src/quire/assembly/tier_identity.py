"""Collects what determines the bytes of cached pages: the fingerprint of the disk tier.

What is in it, by the part of the fingerprint:

    weights    the content of all tensors that fill the model, as they are stored
    model      its config as it was understood, and the positions' frequencies under max_model_len
    pages      block size, groups and windows, where each layer lies and in which format; of
               how many ranks which
    numerics   the number formats, and whatever computes: kernels, backends, libraries, device
    code       the sources of what computes, those of others' classes and what they use too

What is left out changes no byte, by the laws of docs/determinism.md: numbers of threads, sizes of
steps, of batches and of the pool, policies, graphs, seeds and sampling; nor is anything here of the
tokenizer, the chat template or a model's name, since pages are found by token ids. The tenant and
the salt are in the records' names. Too much in it costs a cold cache, too little wrong tokens: so
the sources count as a whole, where a release may have changed a comment only. Called by
`rank_build`.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import xxhash

from quire.assembly.device_setup import DeviceSetup, device_name
from quire.errors import ConfigurationError
from quire.formats.weight_format import LinearMethod
from quire.layers.linear import Linear
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout
from quire.tiers.fingerprint import Fingerprint
from quire.version import __version__

PACKAGE = Path(__file__).parent.parent
COMPUTING_FOLDERS = (
    *("attention", "distributed", "formats", "kernels", "layers", "models", "recurrence"),
    "runtime",
)
"""Of the package: what K, V and states come from."""

NO_KV_FIELDS = frozenset(
    {
        "dtype",  # what the checkpoint's numbers are is in `weights`, what computes in `numerics`
        "tie_word_embeddings",  # the rest is about what comes behind the last layer
        "num_labels",
        "logits_scale",
        "vocab_size",
        "left_out",
        "max_position_embeddings",  # its effect is in the frequencies, or in a tensor's shape
    }
)
"""Of a model's config: those that change no byte of a page by themselves."""

_OURS = ("quire", "torch")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_BYTES = 64 << 20
"""Of each file. In a GGUF file the tokenizer stands before the weights."""


class PageIdentity:
    """Of the pages of one rank, while it is built.

    weights: is given what is loaded.
    """

    def __init__(self) -> None:
        self.weights = WeightsDigest()
        self._max_model_len = 0
        self._classes: set[type] = set()

    def saw(self, model: TextModel, max_model_len: int) -> None:
        """The model is loaded, for sequences of this length."""
        self._max_model_len = max_model_len
        modules = list(model.modules())
        methods = [module.method for module in modules if isinstance(module, Linear)]
        self._classes = {type(each) for each in (*modules, *methods)}
        if model.recurrence is not None:
            self._classes.add(type(model.recurrence))

    def fingerprint(
        self,
        options: EngineOptions,
        setup: DeviceSetup,
        config: ModelConfig,
        layout: KVCacheLayout,
        *,
        rank: int,
        num_ranks: int,
        is_native: bool,
    ) -> Fingerprint:
        """After `saw`. rank: of num_ranks; each has other heads in its pages. is_native: as
        `ModelRunner` says. Raises ConfigurationError for parts that can't be told from others."""
        backend = setup.new_backend()
        attention = {"backend": _name(type(backend))}
        if backend.package is not None:
            attention[backend.package] = importlib.metadata.version(backend.package)
        numerics: dict[str, Any] = {
            "dtype": str(setup.dtype),
            "kv_dtype": str(setup.kv_dtype),
            "quantization": options.quantization,
            "linears": sorted({_name(each) for each in self._classes if _multiplies(each)}),
            "attention": attention,
            "kernels": setup.name,
            **_device(setup, is_native),
        }
        seen = self._classes | {type(backend), type(config)}
        positions = config.position_key(self._max_model_len)
        return Fingerprint(
            weights=self.weights.digest().hex(),
            model=_config(config) | {"positions": _short_digest(positions)},
            pages=_pages(options.block_size, layout) | {"ranks": num_ranks, "rank": rank},
            numerics=numerics,
            code={
                "quire": _package_digest(PACKAGE, *COMPUTING_FOLDERS),
                **_sources_of_others(seen),
            },
            label=options.model or "the embedded model",
        )


def _config(config: ModelConfig) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(config, type(config).__name__)
    return {name: value for name, value in plain.items() if name not in NO_KV_FIELDS}


def _pages(block_size: int, layout: KVCacheLayout) -> dict[str, Any]:
    groups = [
        {
            "kind": group.kind.value,
            "layers": list(group.layers),
            "window": group.window,
            "state_blocks": group.num_state_blocks,
        }
        for group in layout.groups
    ]
    layers = [
        [*place, str(form.dtype), form.bytes_per_layer]
        for place, form in zip(layout.layer_places, layout.formats, strict=True)
    ]
    states = [
        [place.group, place.first_unit, place.units_per_page] for place in layout.state_places
    ]
    return {
        "block_size": block_size,
        "bytes_per_block": layout.bytes_per_block,
        "groups": groups,
        "layers": layers,
        "states": states,
    }


def _device(setup: DeviceSetup, is_native: bool) -> dict[str, Any]:
    """What computes beside our own sources. torch always makes the tables of the rotation."""
    facts: dict[str, Any] = {
        "program": "native" if is_native else "modules",
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }
    if setup.kernels is not None:
        facts["library"] = _file_digest(setup.kernels.library.path)
    if is_native:
        return facts
    facts["matmul_precision"] = torch.get_float32_matmul_precision()
    facts["products"] = _products_digest(setup.device, setup.dtype)
    if setup.is_triton:
        facts["batch_invariant"] = setup.batch_invariant
        facts["triton"] = importlib.metadata.version("triton")
    if setup.device.type == "cuda":
        facts["device"] = device_name(setup.device)
        facts["cuda"] = torch.version.cuda
    else:
        facts["device"] = _processor()
    return facts


def _products_digest(device: torch.device, dtype: torch.dtype) -> str:
    """Of some products by torch's library, which can be told by variables of its own to multiply in
    another way (MKL_CBWR and the like)."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.blake2b(digest_size=16)
    for num_rows in (1, 48):
        x = torch.randn(num_rows, 768, generator=generator).to(device, dtype)
        weight = torch.randn(256, 768, generator=generator).to(device, dtype)
        product = torch.nn.functional.linear(x, weight).cpu()
        digest.update(product.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _processor() -> str:
    """By which torch's libraries choose how they multiply."""
    wanted = ("vendor_id", "model name", "cpu family", "model", "flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = {name.strip(): text.strip() for name, _, text in (x.partition(":") for x in lines)}
    said = "\n".join(f"{name}: {found.get(name)}" for name in wanted)
    return f"{found.get('model name', 'a processor')}, {_short_digest(said.encode())}"


def _multiplies(kind: type) -> bool:
    return issubclass(kind, LinearMethod)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any, where: str) -> Any:
    """As data that JSON has: infinities and NaN, which it has not, as texts. Raises
    ConfigurationError for what has no such form."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each, where) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = (each.name for each in fields(value))
        inner = {name: _plain(getattr(value, name), f"{where}.{name}") for name in names}
        return {"type": type(value).__name__, **inner}
    raise ConfigurationError(
        f"cache_dir can't be used with this model: {where} is of type {type(value).__name__}, which"
        " says nothing that another process could compare; leave cache_dir out"
    )


def answer_digest(config: ModelConfig, tokenizer: Path | None) -> str:
    """Of what determines tokens and log-probabilities beside the bytes of pages: the whole config,
    all sources of quire, the library of grammars, and the tokenizer, whose tokens grammars know.

    tokenizer: the folder, or the GGUF file, that it is in; None: it is not read. Raises OSError.
    """
    digest = hashlib.blake2b(digest_size=16)
    versions = f"{__version__} {importlib.metadata.version('llguidance')}"
    whole_config = repr(_plain(config, type(config).__name__))
    for part in (versions, whole_config, _package_digest(PACKAGE, "")):
        digest.update(f"{len(part)} {part}".encode())
    for path in _tokenizer_files(tokenizer):
        with path.open("rb") as file:
            content = file.read(_TOKENIZER_BYTES)
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _tokenizer_files(where: Path | None) -> list[Path]:
    if where is None:
        return []
    if where.is_file():
        return [where]
    return [where / name for name in _TOKENIZER_FILES if (where / name).is_file()]


def _package_digest(package: Path, *folders: str) -> str:
    """Of the sources in these folders; the version, where there are only compiled ones."""
    paths = [path for name in folders for path in (package / name).rglob("*.py")]
    if not paths:
        return f"version {__version__}"
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        content = path.read_bytes()
        name = path.relative_to(package).as_posix()
        digest.update(f"{len(name)} {len(content)} {name}".encode() + content)
    return digest.hexdigest()


def _sources_of_others(classes: Iterable[type]) -> dict[str, str]:
    """Of modules outside the package in which one of the classes, or a base of it, is defined, and
    of those that these import.

    Raises ConfigurationError where a class has no file: it might be another one tomorrow.
    """
    found: dict[str, str] = {}
    waiting: list[tuple[str, Path]] = []
    for kind in (base for each in classes for base in each.__mro__):
        root = kind.__module__.partition(".")[0]
        if root in _OURS or root in sys.stdlib_module_names:
            continue
        path = _source_file(kind)
        if path is None:
            raise ConfigurationError(
                f"cache_dir can't be used with {_name(kind)}, which has no source file by which"
                " another process could tell it from another version; put it into a module, or"
                " leave cache_dir out"
            )
        found[kind.__module__] = _file_digest(path)
        waiting.append((kind.__module__, path))
    while waiting:
        for name, path in _modules_used_by(*waiting.pop()):
            if name not in found:
                found[name] = _file_digest(path)
                # What an installed package imports goes with its version.
                if not {"site-packages", "dist-packages"} & set(path.parts):
                    waiting.append((name, path))
    return found


def _modules_used_by(name: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Modules with a source that another one, of this source, imports, wherever it does. A compiled
    one says nothing of that."""
    if source.suffix != ".py":
        return
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    tree = ast.parse(source.read_bytes(), str(source))
    for used in _imported_names(tree, package):
        root = used.partition(".")[0]
        if root in _OURS or root in sys.stdlib_module_names:
            continue
        file = _file_of(used)
        if file is not None and file.endswith(".py"):
            yield used, Path(file)


def _file_of(name: str) -> str | None:
    """Of a module that was imported, or that another part of its package may yet import."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    package = name.rpartition(".")[0]
    if not hasattr(sys.modules.get(package), "__path__"):
        return None
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin


def _imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """All that may be modules of what is imported. package: that relative ones are looked up in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            yield from [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _source_file(kind: type) -> Path | None:
    try:
        return Path(inspect.getfile(kind))
    except (TypeError, OSError):  # of the interpreter, or of a session that is typed
        return None


def _file_digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _short_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
