"""The adapters that clients may name as a model.

A name refers to a folder, either from the start (`--lora-modules`) or from a load over HTTP. The
folder is read when the name is loaded or first requested. From then on, requests identify the
adapter by its digest, so open calls keep their adapter even if its name is reassigned or removed.
Created by `launch`.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.adapters import AdapterRef
from quire.engine_client.fleet import EngineFleet
from quire.errors import (
    AdapterError,
    ConfigurationError,
    InvalidRequestError,
    QuireError,
    check_characters,
    shown,
)
from quire.hub.adapter_files import CONFIG_FILE, adapters_in

MAX_NAMES = 10_000
MAX_NAME_CHARACTERS = 256

ANY_MODEL = "dummy"
"""The model name that huggingface_hub sends by default. No adapter may have this name."""

NOT_ENABLED = "this server serves no adapters; start it with --enable-lora"


class UnknownAdapterError(QuireError):
    """There is no adapter of this name."""

    http_status = 404
    code = "adapter_not_found"
    param = "lora_name"


@dataclass(slots=True, eq=False)
class NamedAdapter:
    """A name and the folder that it refers to."""

    name: str
    path: str
    #: Time at which the name was registered, in seconds since 1970.
    created_s: int = field(default_factory=lambda: int(time.time()))
    #: Task in which the engine reads the folder; None until the adapter is first requested.
    found: "asyncio.Task[AdapterRef] | None" = None


class AdapterNames:
    """The adapter names of one server. Invariant: no adapter name is also a name of the model
    itself."""

    def __init__(
        self,
        engine: EngineFleet | None = None,
        paths: Mapping[str, str] | None = None,
        model_names: Iterable[str] = (),
    ) -> None:
        """`engine` is None if the server serves no adapters. `paths` maps the names given at the
        start to the adapters' folders (see `read_modules`)."""
        self._engine = engine
        self._model_names = frozenset(model_names)
        self._known = {name: NamedAdapter(name, path) for name, path in (paths or {}).items()}

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def get(self, name: str | None) -> NamedAdapter | None:
        """The adapter that is currently registered under this name; None if the name is unknown."""
        return None if name is None else self._known.get(name)

    def listed(self) -> list[NamedAdapter]:
        """All adapters, in the order in which they were registered."""
        return list(self._known.values())

    async def ref_of(self, known: NamedAdapter | None) -> AdapterRef | None:
        """The `AdapterRef` to put into an adapter's requests; None for the model itself.

        Reads the adapter on first use, even if its name was removed after `get`. Raises
        AdapterError and EngineDeadError.
        """
        return None if known is None else await self._found(known)

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Read the adapter in a folder now and register it under a name.

        With `in_place`, a name in use is reassigned to the new adapter instead of refused. Raises
        InvalidRequestError for a name that is in use or not allowed, AdapterError for a folder that
        can't be read. After an error the names are unchanged.
        """
        engine = self._enabled()
        self._check_name(name, in_place)
        if not path:
            raise InvalidRequestError(
                "lora_path is '', but must be a folder of the server's machine", "lora_path"
            )
        new = NamedAdapter(name, os.path.abspath(path))
        new.found = asyncio.ensure_future(engine.find_adapter(name, new.path, anew=True))
        await new.found
        self._check_name(name, in_place)  # a concurrent call may have added the name
        self._known[name] = new

    def unload(self, name: str) -> None:
        """Remove a name: open calls continue, new calls with the name are refused. Raises
        UnknownAdapterError."""
        self._enabled()
        if name not in self._known:
            raise UnknownAdapterError(
                f"the adapter {shown(name)} is not loaded here; /v1/models lists those that are"
            )
        del self._known[name]

    async def read_all(self, names: Iterable[str]) -> None:
        """Read the adapters of these names now. Raises ConfigurationError if one can't be read."""
        for name in names:
            try:
                await self._found(self._known[name])
            except AdapterError as error:
                raise ConfigurationError(f"lora_modules: {error}") from error

    async def _found(self, known: NamedAdapter) -> AdapterRef:
        """The adapter's reference. The engine reads the folder at the first call; concurrent calls
        wait for that read."""
        if known.found is None:
            finding = self._enabled().find_adapter(known.name, known.path)
            known.found = asyncio.ensure_future(finding)
        task = known.found
        try:
            return await asyncio.shield(task)
        except QuireError:
            if known.found is task:
                known.found = None  # so that the next call tries again
            raise

    def _check_name(self, name: str, in_place: bool) -> None:
        _check_words(name)
        if name in self._model_names:
            raise InvalidRequestError(
                f"lora_name is {shown(name)}, which is the model's own name; choose another",
                "lora_name",
            )
        if name in self._known and not in_place:
            raise InvalidRequestError(
                f"lora_name is {shown(name)}, which is loaded already; unload it first, or say"
                " load_inplace",
                "lora_name",
            )
        if name not in self._known and len(self._known) >= MAX_NAMES:
            raise InvalidRequestError(
                f"there are {MAX_NAMES} adapters already; unload some", "lora_name"
            )

    def _enabled(self) -> EngineFleet:
        if self._engine is None:
            raise InvalidRequestError(NOT_ENABLED)
        return self._engine


def _check_words(name: str) -> None:
    """Raises InvalidRequestError for a name that no adapter may have on any server."""
    check_characters(name, "lora_name")
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequestError(
            f"lora_name is {shown(name)}, but must have 1 to {MAX_NAME_CHARACTERS} characters",
            "lora_name",
        )
    if name == ANY_MODEL:
        raise InvalidRequestError(
            f"lora_name is {shown(name)}, which stands for the model itself; choose another",
            "lora_name",
        )


@dataclass(frozen=True, slots=True)
class LoRAModules:
    """The adapters named in `--lora-modules`."""

    #: Maps each name to its folder.
    paths: Mapping[str, str] = field(default_factory=dict)
    #: Names given as name=folder or in JSON. Their adapters are read before the server begins to
    #: serve, unlike the adapters found in a parent folder.
    read_first: tuple[str, ...] = ()


def read_modules(given: Iterable[str], model_names: Iterable[str]) -> LoRAModules:
    """Parse the values of `--lora-modules`.

    Each value is name=folder, a JSON object with name and path, or a folder whose subfolders are
    adapters, each named after its subfolder. Raises ConfigurationError for any other value, and for
    a name that is in use or not allowed.
    """
    paths: dict[str, str] = {}
    read_first: list[str] = []
    for text in given:
        named = _named(text)
        if named is None:
            found = _listed(text)
        else:
            found = dict([named])
            read_first += found
        for name, path in found.items():
            try:
                _check_words(name)
            except InvalidRequestError as error:
                raise ConfigurationError(f"lora_modules is {text!r:.80}: {error}") from error
            if name in paths or name in model_names:
                raise ConfigurationError(
                    f"lora_modules: the name {name!r} is given twice, or is the model's own"
                )
            paths[name] = os.path.abspath(path)
    if len(paths) > MAX_NAMES:
        raise ConfigurationError(f"lora_modules: {len(paths)} adapters, above {MAX_NAMES}")
    return LoRAModules(paths, tuple(read_first))


def _named(text: str) -> tuple[str, str] | None:
    """The name and the folder in a value; None if the value is only a folder."""
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = None
        fields = found if isinstance(found, dict) else {}
        name, path = fields.get("name"), fields.get("path")
        unknown = fields.keys() - {"name", "path", "base_model_name"}
        if not isinstance(name, str) or not isinstance(path, str) or unknown:
            raise ConfigurationError(
                f"lora_modules is {text!r:.80}, but an object must have name and path, both texts"
            )
        return name, path
    name, equals, path = text.partition("=")
    return (name, path) if equals and name and path else None


def _listed(text: str) -> Mapping[str, str]:
    folder = Path(text)
    if (folder / CONFIG_FILE).is_file():
        raise ConfigurationError(
            f"lora_modules is {text!r:.80}, which is an adapter itself; give it a name:"
            f" {folder.name}={text}"
        )
    try:
        found = adapters_in(folder)
    except OSError as error:
        raise ConfigurationError(
            f"lora_modules is {text!r:.80}, but must be name=folder, or a folder of adapters:"
            f" {error.strerror}"
        ) from error
    if not found:
        raise ConfigurationError(
            f"lora_modules is {text!r:.80}, a folder without adapters: none of its folders has an"
            f" {CONFIG_FILE}"
        )
    return {name: str(path) for name, path in found.items()}
