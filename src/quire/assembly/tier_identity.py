"""Collects everything that determines the bytes of cached pages: the fingerprint of the disk tier.

A fingerprint has these parts:

    weights    the content of all tensors of the model, as stored in the checkpoint
    model      its parsed config, and the rotary frequencies under max_model_len
    pages      block size, groups and windows, each layer's place and format; the rank and the
               number of ranks
    numerics   number formats, kernels, backends, libraries, device
    code       the sources of all computing code, including classes of other packages

According to docs/determinism.md, nothing else changes a byte of a page: not the number of threads,
the sizes of steps, batches or pool, nor policies, graphs, seeds or sampling. Tokenizer, chat
template and the model's name have no effect, since pages are found by token ids. Tenant and salt
need no part here, since they change the names of the stored records. A needless part costs a cold
cache, but a missing part causes wrong tokens. So whole source files count, even if a release has
changed only comments. Called by `rank_build`.
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
from quire.kernels.cpu.library import NativeKernels
from quire.layers.linear import Linear
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.models.vision.vision_tower import VisionConfig
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout
from quire.tiers.fingerprint import Fingerprint
from quire.version import __version__

PACKAGE = Path(__file__).parent.parent
COMPUTING_FOLDERS = (
    *("attention", "distributed", "formats", "kernels", "layers", "models", "recurrence"),
    "runtime",
)
"""The package's folders with the code that determines K, V and states."""

NO_KV_FIELDS = frozenset(
    {
        "dtype",  # the part `weights` has the checkpoint's dtype, `numerics` the activations'
        "tie_word_embeddings",  # this and the next three concern the head after the last layer
        "num_labels",
        "logits_scale",
        "vocab_size",
        "left_out",
        "max_position_embeddings",  # its effect is in the frequencies, or in a tensor's shape
    }
)
"""The fields of a model's config that do not change the bytes of pages, or whose effect another
part of the fingerprint covers."""

_OURS = ("quire", "torch")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_BYTES = 64 << 20
"""Maximum number of bytes that are read of a file. In a GGUF file the tokenizer precedes the
weights."""


class PageIdentity:
    """Collects the parts of the fingerprint of one rank's pages while the rank is built."""

    def __init__(self) -> None:
        #: The digest of the weights, which the loader updates.
        self.weights = WeightsDigest()
        #: The digest of the draft model's weights; the digest of no data without a draft model.
        self.draft_weights = WeightsDigest()
        #: Digest of the input statistics that were used to round weights; the digest of no data if
        #: all weights were rounded to nearest.
        self.rounding = WeightsDigest()
        #: The config of the encoder of images; None without one.
        self.tower: VisionConfig | None = None
        self._max_model_len = 0
        self._classes: set[type] = set()

    def record_model(self, model: TextModel, max_model_len: int) -> None:
        """Record the classes of the loaded model, and the length of its longest sequence."""
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
        draft_config: ModelConfig | None = None,
    ) -> Fingerprint:
        """The fingerprint. `record_model` must have been called.

        The pages of each rank hold different heads, so the rank is part of the fingerprint.
        For `is_native` see `ModelRunner`. `draft_config` is that of the model that drafts, whose
        K and V are in the pages, too. Raises ConfigurationError for parts that can't be
        identified.
        """
        # First, collect the formats and everything that computes.
        backend = setup.new_backend()
        attention = {"backend": _name(type(backend))}
        if backend.package is not None:
            attention[backend.package] = importlib.metadata.version(backend.package)
        numerics: dict[str, Any] = {
            "dtype": str(setup.dtype),
            "kv_format": setup.kv_format.name,
            "quantization": options.quantization,
            "rounding": self.rounding.digest().hex(),
            "linears": sorted({_name(each) for each in self._classes if _multiplies(each)}),
            "attention": attention,
            "kernels": setup.name,
            **_device(setup, is_native),
        }
        # Then add the model, its pages and the sources.
        formats = setup.kv_format.keys, setup.kv_format.values
        seen = self._classes | set(map(type, (backend, config, *formats)))
        drafter: dict[str, Any] = {}
        if draft_config is not None:
            weights = self.draft_weights.digest().hex()
            drafter = {"drafter": _config(draft_config) | {"weights": weights}}
        tower: dict[str, Any] = {}
        if self.tower is not None:
            tower = {"tower": _plain(self.tower, type(self.tower).__name__)}
        positions = config.position_key(self._max_model_len)
        return Fingerprint(
            weights=self.weights.digest().hex(),
            model=_config(config) | {"positions": _short_digest(positions)} | drafter | tower,
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
    """Identifies the libraries and the processor or GPU that compute, besides quire's sources.

    torch is always included, since it makes the tables of rotary embeddings.
    """
    facts: dict[str, Any] = {
        "program": "native" if is_native else "modules",
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }
    if setup.kernels is not None:
        facts["library"] = _file_digest(setup.kernels.library.path)
    host = setup.methods.host
    if host is not None:
        kind = "experts" if host.has_experts_only else "layers"
        facts["host"] = {kind: host.num_layers, **_host_kernels(host.kernels)}
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


def _host_kernels(kernels: NativeKernels | None) -> dict[str, str]:
    """Identifies what computes experts on the host of a GPU."""
    if kernels is None:
        return {"kernels": "torch", "processor": _processor()}
    return {"kernels": kernels.isa, "library": _file_digest(kernels.library.path)}


def _products_digest(device: torch.device, dtype: torch.dtype) -> str:
    """A digest of some matrix products computed by torch, since environment variables (MKL_CBWR and
    others) change how its libraries multiply."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.blake2b(digest_size=16)
    for num_rows in (1, 48):
        x = torch.randn(num_rows, 768, generator=generator).to(device, dtype)
        weight = torch.randn(256, 768, generator=generator).to(device, dtype)
        product = torch.nn.functional.linear(x, weight).cpu()
        digest.update(product.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _processor() -> str:
    """The processor's name, and a digest of the properties by which torch's libraries choose
    kernels."""
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
    """The value as JSON data, with infinities and NaN as strings.

    Raises ConfigurationError for a value that can't be converted.
    """
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
        " can't be compared between processes; leave cache_dir out"
    )


def answer_digest(config: ModelConfig, tokenizer: Path | None) -> str:
    """A digest of everything that determines tokens and log-probabilities, except page bytes.

    It covers the whole config, all sources of quire, the grammar library and the tokenizer, which
    grammars depend on. `tokenizer` is its folder or GGUF file; None leaves it out. Raises OSError.
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
    """A digest of the sources in these folders; the version if there are only compiled files."""
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
    """Digests of modules of other packages that define the classes or their bases, and of the
    modules that these import.

    Raises ConfigurationError if a class has no file, since later changes could not be detected.
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
                # Imports of an installed package are fixed by its version.
                if not {"site-packages", "dist-packages"} & set(path.parts):
                    waiting.append((name, path))
    return found


def _modules_used_by(name: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules that the module `name` imports anywhere in its source file, if they have
    source files. A compiled module yields none."""
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
    """The file of a module, if the module or its package was imported; None if unknown."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    package = name.rpartition(".")[0]
    if not hasattr(sys.modules.get(package), "__path__"):
        return None
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin


def _imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """The imported names that may be modules. Relative imports are resolved in `package`."""
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
    except (TypeError, OSError):  # a built-in class, or one typed in an interactive session
        return None


def _file_digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _short_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
