"""Loads plugins: modules outside of quire that register policies, formats, endpoints and others.

A plugin is an entry point of the group "quire.plugins" of an installed package, or is named by the
option `plugins`. Either names a module, or a function of one as "module:function", which is called.
Checking an engine's options loads the plugins: so each process that has such options (API server,
engine, rank, `LLM`) knows the names that plugins register before it reads options that use them.
"""

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.deferred_imports import import_deferred
from quire.errors import ConfigurationError
from quire.option_fields import Flag, Options, Texts, check_each, declared_options, option
from quire.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "quire.plugins"
REQUIRES = "requires_quire"
"""The name in a plugin's module of the versions of quire that it works with, such as ">=0.1,<0.2"
(PEP 440)."""
PLUGIN_FLAG = "--plugin"

_lock = threading.RLock()
_loaded: set[str] = set()


def load_plugins(names: Iterable[str] = ()) -> None:
    """Load the plugins of installed packages, and those named, unless this process has loaded them.

    Raises ConfigurationError for a plugin that can't be imported, registers a name that is taken,
    or needs another version of quire.
    """
    from importlib.metadata import EntryPoint  # 50 ms, which `quire --version` doesn't need

    named = [EntryPoint(name, name, GROUP) for name in names]
    with _lock:
        for plugin in (*_installed(), *named):
            if plugin.value not in _loaded:
                _loaded.add(plugin.value)  # at once: a plugin may check options itself
                try:
                    _load(plugin)
                except BaseException:
                    _loaded.discard(plugin.value)
                    raise


@cache
def _installed() -> "tuple[EntryPoint, ...]":
    from importlib.metadata import entry_points  # 50 ms, which `quire --version` doesn't need

    return tuple(entry_points(group=GROUP))


def _load(plugin: "EntryPoint") -> None:
    title = f"plugin {plugin.value!r}"
    if plugin.pattern.match(plugin.value) is None:
        raise ConfigurationError(
            f"{title} can't be loaded: name a module (package.module), or module:function"
        )
    import_deferred()
    if plugin.dist is not None:
        title += f" of the package {plugin.dist.name}"
    try:
        found = plugin.load()
        _check_version(getattr(sys.modules[plugin.module], REQUIRES, None))
        if plugin.attr:
            found()
    except ConfigurationError as error:
        raise ConfigurationError(f"{title} can't be loaded: {error}") from error
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError) and error.name == plugin.module:
            text += "; install it, or put its folder into PYTHONPATH"
        raise ConfigurationError(f"{title} can't be loaded: {text}") from error


def _check_version(required: str | None) -> None:
    if required is None:
        return
    from packaging.specifiers import SpecifierSet  # only where a plugin says what it requires

    if not SpecifierSet(required).contains(__version__, prereleases=True):
        raise ConfigurationError(f"it needs quire {required}, but this is {__version__}")


@dataclass(frozen=True, slots=True)
class Plugins(Texts):
    """Modules of plugins, which are loaded when the option is checked."""

    def validate(self, name: str, value: Any, *, is_optional: bool) -> tuple[str, ...]:
        names = Texts.validate(self, name, value, is_optional=is_optional)
        load_plugins(names)
        return names


@dataclass(frozen=True)
class PluginOptions(Options):
    """The option that names plugins.

    It is checked before all other options of a class, which accept names that plugins add.
    """

    plugins: tuple[str, ...] = option(
        (),
        Plugins("a module"),
        group="computation",
        help="import this module, which registers policies, formats, endpoints or others; may be"
        " repeated",
        doc="modules that register policies, formats, endpoints or others, see docs/extending.md;"
        ' "module:function" also calls the function. Plugins of installed packages need not be'
        " named.",
        flag=Flag(name=PLUGIN_FLAG.lstrip("-"), metavar="MODULE"),
    )

    def __post_init__(self) -> None:
        check_each(PluginOptions, {"plugins": self.plugins})
        super().__post_init__()


def add_plugin_flag(parser: Any) -> None:
    """Add `--plugin` to the parser of a command without the engine's flags."""
    ((each, declared),) = declared_options(PluginOptions)
    shown = {"metavar": declared.flag.metavar, "help": declared.help}
    parser.add_argument(PLUGIN_FLAG, dest=each.name, action="append", **shown)


def load_plugins_of(words: Sequence[str]) -> None:
    """Load the plugins that a command line names, before it is parsed, so that help texts and
    checks of other words know the plugins' names. Raises ConfigurationError."""
    mine = words[: words.index("--")] if "--" in words else words
    named = [value for word, value in pairwise(mine) if word == PLUGIN_FLAG]
    named += [word.partition("=")[2] for word in mine if word.startswith(f"{PLUGIN_FLAG}=")]
    load_plugins(named)
