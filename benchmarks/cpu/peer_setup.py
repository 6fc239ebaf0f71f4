"""Which engines and models `cpu.py` measures, and how each is started: quire's side, and a file.

    [[model]]
    name = "llama-160m"
    folder = "MODELS/llama-160m"      # Hugging Face form: quire's, and the shape for the floors
    num_requests = 48                 # of the workload
    max_num_seqs = 48
    files = { Q4_K_M = "GGUF/llama-160m-q4_k_m.gguf" }     # quire's, at this precision

    [[engine]]
    name = "vLLM"
    precision = "bf16"                # it is compared with quire's
    command = ["VENV/bin/python", "DRIVERS/vllm_offline.py"]
    environment = { LD_PRELOAD = "..." }
    arguments = []                    # after the drivers' common ones, so they win
    skip = ["prefill"]                # parts that it is not measured in
    long_context = ["VENV/bin/python", "benchmarks/peers/vllm_long_context.py"]
    server = ["VENV/bin/python", "-m", "...", "--model", "{model}", "--port", "{port}"]
    quality = ["VENV/bin/python", "benchmarks/quality/openvino_logits.py"]
    [engine.models.llama-160m]
    path = "MODELS/llama-160m"        # in the engine's own form
    arguments = []

A driver has the command line and the result file of `peers/driver.py`; a long_context driver those
of `peers/long_context.py`, and a quality driver those of `quality/reading.py`. The words of server
may have {model}, {host}, {port}, {threads} and {max_num_seqs} in them. Paths are as from the
working directory.
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = "quire"
PARTS = ("decode1", "prefill", "workload")
QUIRE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "fp32": ("--dtype", "float32"),
    "bf16": (),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
FILES = ("Q8_0", "Q5_K_M", "Q4_K_M")
"""Precisions of which the model names the file, which is the same for all engines."""
PRECISIONS = (*QUIRE_ARGUMENTS, *FILES)

# The prompts are random, so that a prefix cache has nothing to give: off on both sides.
QUIRE_SERVER = (
    *(sys.executable, "-m", "quire", "serve", "{model}", "--host", "{host}", "--port", "{port}"),
    *("--max-num-seqs", "{max_num_seqs}", "--num-threads", "{threads}"),
    "--no-enable-prefix-caching",
)


class SetupError(ValueError):
    """The set-up file doesn't say what is needed."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model in Hugging Face form and the load that it carries. files: by precision, where it is
    one of FILES."""

    name: str
    folder: Path
    num_requests: int = 48
    max_num_seqs: int = 48
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """A model in an engine's own form, and what the driver is told for it alone."""

    path: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """One engine at one precision: its drivers, and the models that it has. Where long_context,
    server or quality is empty, it is not measured there."""

    name: str
    precision: str
    command: tuple[str, ...]
    models: Mapping[str, Placed]
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    skip: frozenset[str] = frozenset()
    long_context: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    quality: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name} {self.precision}"


@dataclass(frozen=True, slots=True)
class Setup:
    """Models, and the engines that run them, quire first."""

    models: tuple[Model, ...]
    engines: tuple[EngineSetup, ...]


def read_setup(path: Path, quire_arguments: tuple[str, ...] = ()) -> Setup:
    """The file's models and engines, and quire at every precision before them.

    Raises SetupError for a file that doesn't say what the module's text shows.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"{path}: {error}") from error
    models = tuple(_read_model(path, entry) for entry in _entries(path, raw, "model"))
    engines = tuple(_read_engine(path, entry) for entry in raw.get("engine", []))
    known = {model.name for model in models}
    for engine in engines:
        for name in sorted(set(engine.models) - known):
            raise SetupError(f"{path}: {engine.key} has model {name!r}, but [[model]] has not")
    return Setup(models, (*quire_engines(models, quire_arguments), *engines))


def quire_engines(
    models: tuple[Model, ...], arguments: tuple[str, ...] = ()
) -> tuple[EngineSetup, ...]:
    """quire from this checkout, in this environment, at every precision."""
    offline, long_context, quality = (
        (sys.executable, str(HERE.parent / driver))
        for driver in (
            "peers/quire_offline.py",
            "peers/quire_long_context.py",
            "quality/quire_logits.py",
        )
    )

    def placed(precision: str) -> dict[str, Placed]:
        if precision not in FILES:
            return {model.name: Placed(str(model.folder)) for model in models}
        return {
            model.name: Placed(model.files[precision])
            for model in models
            if precision in model.files
        }

    return tuple(
        EngineSetup(
            name=OURS,
            precision=precision,
            command=(*offline, *extra),
            models=placed(precision),
            arguments=arguments,
            long_context=(*long_context, *extra, *arguments),
            server=(*QUIRE_SERVER, *extra, *arguments),
            quality=(*quality, *extra, *arguments),
        )
        for precision in PRECISIONS
        for extra in [QUIRE_ARGUMENTS.get(precision, ())]
    )


def choose(
    setup: Setup, models: Sequence[str], engines: Sequence[str], precisions: Sequence[str]
) -> Setup:
    """The setup with only the named entries; an empty list keeps all. Raises SetupError if nothing
    is left."""
    left_models = [one for one in setup.models if not models or one.name in models]
    left_engines = [
        one
        for one in setup.engines
        if (not precisions or one.precision in precisions) and (not engines or one.name in engines)
    ]
    for what, listed in (("--models", left_models), ("--engines, --precisions", left_engines)):
        if not listed:
            raise SetupError(f"{what}: none of the set-up's is left")
    return Setup(tuple(left_models), tuple(left_engines))


def _read_model(path: Path, entry: Mapping[str, Any]) -> Model:
    values = _checked(path, "[[model]]", entry, Model)
    return Model(**{**values, "folder": Path(values["folder"])})


def _read_engine(path: Path, entry: Mapping[str, Any]) -> EngineSetup:
    values = _checked(path, "[[engine]]", entry, EngineSetup)
    where = f"[engine.models] of {values['name']}"
    values["models"] = {
        name: Placed(**_tuples(_checked(path, where, placed, Placed)))
        for name, placed in values["models"].items()
    }
    values["skip"] = frozenset(values.get("skip", ()))
    if values["precision"] not in PRECISIONS:
        raise SetupError(
            f"{path}: precision is {values['precision']!r}, but must be one of"
            f" {', '.join(PRECISIONS)}"
        )
    if not values["skip"] <= set(PARTS):
        raise SetupError(f"{path}: skip is {sorted(values['skip'])}, but the parts are {PARTS}")
    return EngineSetup(**_tuples(values))


def _entries(path: Path, raw: Mapping[str, Any], name: str) -> list[Any]:
    if not raw.get(name):
        raise SetupError(f"{path} has no [[{name}]]; it needs at least one")
    return list(raw[name])


def _checked(path: Path, where: str, entry: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The entry, if it has the fields of the dataclass: all that need be there, and no others."""
    fields = kind.__dataclass_fields__
    unknown = sorted(set(entry) - set(fields))
    needed = {
        name
        for name, one in fields.items()
        if one.default is one.default_factory  # both say that there is none
    }
    missing = sorted(needed - set(entry))
    if unknown or missing:
        raise SetupError(f"{path}: {where} lacks {missing} and has {unknown}, which nobody knows")
    return dict(entry)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def listed_words(text: str) -> list[str]:
    """The words of an option that lists them with commas."""
    return [word for word in text.split(",") if word]


def check_arguments(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    lowest: Mapping[str, int],
    parts: Sequence[str],
) -> None:
    """End the program where an argument is below its lowest value, or --parts names an unknown
    part."""
    for name, low in lowest.items():
        if getattr(args, name) < low:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}, but must be at least {low}")
    unknown = sorted(set(args.parts) - set(parts))
    if unknown:
        parser.error(f"--parts names {unknown}, but the parts are {', '.join(parts)}")
