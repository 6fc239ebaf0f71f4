"""Finds and builds the class of transformers that a config names.

Functions that need the package transformers import it themselves, so that an engine that serves a
native model never loads it. Code in a model's folder is never run. Called by the other files of
this folder.
"""

import copy
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.models.config_bounds import checked_integer

ATTENTION = "quire"
"""The name under which quire's attention and experts are registered with transformers."""

FIRST_VERSION = 5
INSTALL = f"pip install 'transformers>={FIRST_VERSION}.0'"


def why_no_transformers() -> str | None:
    """The reason why the package can't be used, as the end of a sentence; None if it can be used.
    Doesn't import it."""
    if importlib.util.find_spec("transformers") is None:
        return f"the package transformers is not installed ({INSTALL})"
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < FIRST_VERSION:
        return f"transformers {version} is too old; {FIRST_VERSION}.0 is the first ({INSTALL})"
    return None


def find_class(raw: Mapping[str, Any]) -> tuple[Any, type[Any]]:
    """(config object, model class) of transformers for the contents of config.json.

    Raises UnsupportedModelError if the package is missing, transformers has no built-in class, or
    the class can't run with quire's attention, and CheckpointError for invalid fields.
    """
    # First, check that the package is installed and knows the model type.
    name = _class_name(raw)
    reason = why_no_transformers()
    if reason is not None:
        raise UnsupportedModelError(refusal(name, reason))
    # Takes seconds to import, and is not always installed.
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, version = raw.get("model_type"), importlib.metadata.version("transformers")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if "auto_map" in raw and not is_known:
        reason = "it is defined by code in the model's folder (auto_map), which is never run"
        raise UnsupportedModelError(refusal(name, reason))
    if not is_known:
        reason = f"transformers {version} knows no model_type {shown(model_type)}; a newer one may"
        raise UnsupportedModelError(refusal(name, reason))
    # Then find the class for next-token prediction. It must be the class that the config names.
    config = _read_config(CONFIG_MAPPING[model_type], raw)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    classes = found if isinstance(found, (list, tuple)) else (found,)
    for kind in classes:
        if name in (None, kind.__name__):
            _check_class(config, kind)
            return config, kind
    known = ", ".join(kind.__name__ for kind in classes) or "none"
    reason = f"the class of {model_type} that predicts the next token is {known}"
    raise UnsupportedModelError(refusal(name, reason))


_NOT_OF_THE_MODEL = frozenset(
    {
        "_attn_implementation",
        "_experts_implementation",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "use_kernels",
    }
)
"""Fields of config.json that would make transformers choose or fetch other code."""


_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def _read_config(kind: type[Any], raw: Mapping[str, Any]) -> Any:
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name in _NUM_LAYERS:
            if fields.get(name) is not None:  # transformers makes a list of this length
                checked_integer(f"config.json: {name}", "num_hidden_layers", fields[name])
    try:
        return kind.from_dict(_without_code(raw))
    except Exception as error:  # a config of transformers may raise anything
        raise CheckpointError(
            f"config.json: transformers' {kind.__name__} doesn't accept this config: {error}"
        ) from error


def _without_code(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in raw.items()
        if name not in _NOT_OF_THE_MODEL
    }


def refusal(name: str | None, reason: str) -> str:
    """The message of a refusal. `name` is the name of the class, or None if the config has none.
    `reason` is the end of the sentence."""
    which = f"architectures is {shown([name])}, whose"
    if name is None:
        which = "architectures names no class, and its model_type's"
    return f"config.json: {which} class of transformers can't run on quire's memory: {reason}"


def _class_name(raw: Mapping[str, Any]) -> str | None:
    """The name of the model's class; None if only the config's model_type determines it."""
    names = raw.get("architectures")
    if not names:
        return None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(
            f"config.json: architectures is {shown(names)}, but must be a list of one name"
        )
    return names[0]


_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def _check_class(config: Any, kind: type[Any]) -> None:
    """Raises UnsupportedModelError if the class's flags or the config's layer types show that the
    class can't run with quire's attention."""
    if getattr(kind, "_is_stateful", False):
        reason = "its layers carry a state beside keys and values"
    elif not kind._supports_attention_backend:
        reason = "it doesn't pass its attention through transformers' interface"
    else:
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_KINDS
        if not kinds:
            return
        reason = f"it has layers of the kind {', '.join(sorted(map(str, kinds)))}"
    raise UnsupportedModelError(refusal(kind.__name__, reason))


def build(
    config: Any,
    kind: type[Any],
    *,
    attention: str = ATTENTION,
    dtype: torch.dtype,
    only_meta: bool = False,
) -> Any:
    """Build a model of the class, with its parameters on torch's meta device.

    Its buffers, such as the frequencies of rotations, have values; with `only_meta` they are on the
    meta device, too. No parameters are tied or initialized.
    """
    from transformers.initialization import no_init_weights  # is not always installed

    config = copy.deepcopy(config)
    with ExitStack() as stack:
        stack.enter_context(no_init_weights())
        stack.enter_context(_parameters_on_meta())
        model = kind._from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation=ATTENTION
        )
    for module in model.modules():
        if hasattr(module, _WARNING):  # the method would look for padding in each step
            setattr(module, _WARNING, _warn_of_nothing)
    # Buffers move to meta last, since some classes read their values while they are built.
    return (model.to("meta") if only_meta else model).eval()


_WARNING = "warn_if_padding_and_no_attention_mask"


def _warn_of_nothing(*args: Any) -> None:
    """Replaces transformers' warning about padding. A step has no padding."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the `with`, each parameter moves to the meta device when a module registers it, before
    its memory is touched."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    with replaced(nn.Module, "register_parameter", register_on_meta):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a class or a module within the `with`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def base_of(model: Any) -> Any:
    """The body of a model with a head: everything except the head."""
    base = getattr(model, model.base_model_prefix, None)
    if not isinstance(base, nn.Module):
        reason = f"it has no part {model.base_model_prefix!r}"
        raise UnsupportedModelError(refusal(type(model).__name__, reason))
    return base


class GivenHidden(nn.Module):
    """Takes the place of a model's body below its head, and returns given hidden states."""

    def __init__(self, hidden: torch.Tensor | None = None) -> None:
        super().__init__()
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return self if name == "decoder" else super().__getattr__(name)  # OPT's head calls it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The given hidden states, as an output of a transformers model."""
        return _Output(self.hidden)


class _Output:
    """The output of a transformers model that has only hidden states."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        """None for every other field, such as keys and values or router logits."""
        return None
