"""quire: an inference engine for large language models, with a paged KV cache.

The names below are all there is to import from here. They are loaded when first used, so that
`import quire` and `quire --version` stay light. Nothing inside the package imports this module.
"""

from typing import TYPE_CHECKING

from quire.version import __version__

if TYPE_CHECKING:
    from quire.core.sampling_params import BeamSearchParams, SamplingParams
    from quire.engine_client.results import CompletionOutput, RequestOutput
    from quire.offline.beams import BeamSearchOutput, BeamSearchSequence
    from quire.offline.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "quire.offline.llm",
    "BeamSearchOutput": "quire.offline.beams",
    "BeamSearchParams": "quire.core.sampling_params",
    "BeamSearchSequence": "quire.offline.beams",
    "CompletionOutput": "quire.engine_client.results",
    "RequestOutput": "quire.engine_client.results",
    "SamplingParams": "quire.core.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module  # costs a few ms that `quire --version` need not pay

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # from now on the name is found without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
