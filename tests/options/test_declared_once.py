"""An option is declared in one place: flag, YAML key, LLM argument, bounds and docs follow."""

import argparse
import ast
import importlib.util
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.attention.backends import BACKENDS
from quire.cli.config_file import ConfiguredParser
from quire.cli.flags import (
    SERVER_GROUPS,
    add_engine,
    check_served,
    engine_options,
    served_engine_options,
    server_options,
)
from quire.cli.parser import build_parser
from quire.compat.llm_options import ALIASES
from quire.core.scheduling.policy import POLICIES
from quire.errors import ConfigurationError
from quire.formats.format_registry import weight_formats
from quire.offline.llm import LLM
from quire.option_fields import (
    Bytes,
    Flag,
    OneOf,
    Options,
    Switch,
    Whole,
    declared_options,
    flag_name,
    flag_words,
    option,
    takes_arguments_of,
)
from quire.options.engine_options import EngineOptions
from quire.server.config import ServerConfig

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class SpillOptions(Options):
    """A component with options, as its file would declare them: all that this file says of them."""

    spill_memory: int | None = option(
        None, Bytes(4096), group="memory", help="memory that blocks are spilled to"
    )
    spill_codec: str = option(
        "none", OneOf(("none", "zip")), group="memory", help="spilled as {names}"
    )
    num_spill_threads: int = option(
        2, Whole(1, 8), group="computation", help="threads that spill", flag=Flag(others=("-st",))
    )
    verify_spill: bool = option(False, Switch(), group="memory", help="read again what was spilled")


@dataclass(frozen=True)
class WithSpill(EngineOptions, SpillOptions):
    """The engine's options with one component more."""


@pytest.fixture
def parser() -> ConfiguredParser:
    parser = ConfiguredParser(prog="quire")
    parser.add_argument("--config")
    parser.add_argument("--model")
    add_engine(parser, WithSpill)
    return parser


def given(parser: argparse.ArgumentParser, words: str) -> dict[str, Any]:
    return engine_options(parser.parse_args(words.split()), WithSpill)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """tools/python_reference.py, which writes docs/python.md."""
    spec = importlib.util.spec_from_file_location(
        "python_reference", ROOT / "tools" / "python_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_option_has_a_flag(
    parser: ConfiguredParser, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--spill-memory 2MiB --spill-codec zip -st 3 --verify-spill --no-enforce-eager"
    assert given(parser, words) == {
        "spill_memory": "2MiB",
        "spill_codec": "zip",
        "num_spill_threads": 3,
        "verify_spill": True,
        "enforce_eager": False,
    }
    assert given(parser, "") == {}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--spill-codec NAME spilled as none or zip (none)" in printed
    assert "--num-spill-threads N, -st N threads that spill (2)" in printed
    assert "--verify-spill, --no-verify-spill read again what was spilled (no)" in printed


def test_a_new_option_is_a_key_of_the_file(parser: ConfiguredParser, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("spill_codec: zip\nnum-spill-threads: 4\nverify-spill: false\n")
    assert given(parser, f"--config {path}") == {
        "spill_codec": "zip",
        "num_spill_threads": 4,
        "verify_spill": False,
    }


def test_a_new_option_is_an_argument() -> None:
    class Model:
        @takes_arguments_of(WithSpill)
        def __init__(self, model: str | None = None, **options: Any) -> None:
            self.options = WithSpill.from_mapping({**options, "model": model})

    assert inspect.signature(Model).parameters["num_spill_threads"].default == 2
    made = Model("org/model", spill_memory="1MiB")
    assert (made.options.spill_memory, made.options.model) == (1 << 20, "org/model")
    assert WithSpill.from_mapping(made.options.as_mapping()) == made.options
    assert made.options.part(SpillOptions) == {
        "spill_memory": 1 << 20,
        "spill_codec": "none",
        "num_spill_threads": 2,
        "verify_spill": False,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spill_memory": 1}, "spill_memory is 1, but must be at least 4096"),
        ({"spill_codec": "rar"}, r"spill_codec is 'rar', but must be one of \('none', 'zip'\)"),
        ({"num_spill_threads": 9}, "num_spill_threads is 9, but must be at most 8"),
        ({"verify_spill": 1}, "verify_spill is 1, but must be True or False"),
        ({"spill_kodec": "zip"}, "unknown option spill_kodec; did you mean spill_codec"),
    ],
)
def test_a_new_option_has_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WithSpill.from_mapping(options)


def test_a_new_option_has_a_row_in_the_reference(reference: ModuleType) -> None:
    rows = reference.option_entries(WithSpill)
    assert "- `num_spill_threads` (`--num-spill-threads`): threads that spill" in rows


# ---- the options that there are -----------------------------------------------------------------


ALL = [(EngineOptions, each, declared) for each, declared in declared_options(EngineOptions)]
ALL += [(ServerConfig, each, declared) for each, declared in declared_options(ServerConfig)]
WITHOUT_GROUP = {"model", "skip_tokenizer_init"}
"""MODEL has its place in each command; the other is for Python alone."""

each_option = pytest.mark.parametrize(
    ("options", "each", "declared"), ALL, ids=[each.name for _, each, _ in ALL]
)


@pytest.fixture(scope="module")
def serve() -> argparse.ArgumentParser:
    """The parser of the command. To build it takes longer than a test of one option."""
    (commands,) = [action for action in build_parser()._actions if action.dest == "command"]
    assert isinstance(commands.choices, dict)
    parser: argparse.ArgumentParser = commands.choices["serve"]
    return parser


@each_option
def test_every_option_has_its_flag_in_serve(
    options: Any, each: Any, declared: Any, serve: argparse.ArgumentParser
) -> None:
    if declared.group is None:
        assert each.name in WITHOUT_GROUP
    else:
        assert serve._option_string_actions[flag_name(each, declared)].dest == each.name


def test_values_become_words_and_values_again() -> None:
    given = {
        "num_blocks": 200,
        "block_size": "auto",
        "enable_prefix_caching": False,
        "batch_invariant": True,
        "hf_overrides": {"rope_theta": 1e4},
        "max_model_len": None,
        "skip_tokenizer_init": True,
        "kv_cache_memory": "2 GiB",
    }
    words = flag_words(EngineOptions, given)
    read = vars(build_parser().parse_args(["serve", *words]))
    kept = {name: read[name] for name in given if name in read and read[name] is not None}
    del given["max_model_len"], given["skip_tokenizer_init"]
    assert kept | {"hf_overrides": json.loads(kept["hf_overrides"])} == given


@each_option
def test_every_option_has_bounds(options: Any, each: Any, declared: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{each.name} "):
        options(**{each.name: object()})


def test_every_engine_option_is_an_argument_and_has_a_row(reference: ModuleType) -> None:
    names = {each.name for each, _ in declared_options(EngineOptions)}
    assert names == set(inspect.signature(LLM).parameters) - {
        "kv_allocator",
        "pooler_config",
        "profiler_config",
        *ALIASES,
    }
    page = reference.PAGE.read_text()
    assert [row for row in reference.option_entries(EngineOptions) if row not in page] == []


OTHER_USES = {
    *("model", "--model"),  # comes by its place, too
    *("seed", "--seed"),  # of the sampling
    *("--port", "--revision", "api_keys", "log_level"),  # of `quire doctor`; from the environment
    *("--api-key", "--served-model-name"),  # of the server that `quire replay` asks
    *("--replicas", "kv_cache_dtype"),  # of `quire plan`
    *("revision", "tokenizer"),  # refused beside a file of several models
    "mm_processor_kwargs",  # of a call, as in vLLM
    "enable_prefix_caching",  # settled by the allocator that an LLM is compared with
}
"""Names of options in the files below."""


def test_no_other_file_on_the_way_names_an_option() -> None:
    words = {each.name for _, each, _ in ALL} | {flag_name(*each[1:]) for each in ALL}
    words -= OTHER_USES
    package = ROOT / "src" / "quire"
    paths = [*package.glob("cli/*.py"), *package.glob("options/*.py"), package / "offline/llm.py"]
    for path in paths:
        if path.name in ("compat.flags.py", "llm_options.py"):  # names as data
            continue
        constants = (n.value for n in ast.walk(ast.parse(path.read_text())) if is_text(n))
        assert words.isdisjoint(constants), path


def is_text(node: ast.AST) -> Any:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_serve_s_own_defaults_are_declared_too() -> None:
    args = build_parser().parse_args(["serve"])
    assert served_engine_options(args) == {
        "max_itl_ratio": 2.7,
        "start_costs": "~/.cache/quire/start_costs.json",
        "disable_log_stats": False,
    }
    assert server_options(args) == {}
    words = ["serve", "--max-itl-ratio", "0", "--start-costs", "costs.json"]
    words += ["--disable-log-stats", "--seed", "4"]
    assert served_engine_options(build_parser().parse_args(words)) == {
        "max_itl_ratio": 0.0,
        "start_costs": "costs.json",
        "disable_log_stats": True,
        "seed": 4,
    }


def test_a_value_of_the_file_is_checked_alone() -> None:
    """max_num_batched_tokens may be below the default of max_num_seqs, which another line sets."""
    check_served(build_parser().parse_args(["serve", "--max-num-batched-tokens", "10"]))
    with pytest.raises(ConfigurationError, match="seed is -1"):
        check_served(build_parser().parse_args(["serve", "--seed", "-1"]))


def test_every_group_is_one_of_the_help() -> None:
    groups = {declared.group for _, _, declared in ALL} - {None}
    assert set(SERVER_GROUPS) < groups


def test_descriptions_of_registry_entries_are_in_the_reference() -> None:
    docs = {each.name: declared.doc for each, declared in declared_options(EngineOptions)}
    for name, entry in BACKENDS.items():
        assert f'"{name}" ({entry.description})' in docs["attention_backend"]
    for name, entry in weight_formats().items():
        assert f"to {name}, with {entry.description}" in docs["quantization"]
    assert all(f'"{name}"' in docs["scheduling_policy"] for name in POLICIES)
