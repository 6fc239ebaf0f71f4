"""quire: an inference engine for large language models, with a paged KV cache.

The names in `__all__` are the package's public interface. They are loaded on first use, so that
`import quire` and `quire --version` stay fast. `compat.import_finder` resolves imports that are
written for vLLM's modules, and explains imports that fail. No module of the package imports this
one.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.cli.engine_args import AsyncEngineArgs, EngineArgs
    from quire.core.adapters import LoRARequest
    from quire.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from quire.core.structured_outputs import StructuredOutputsParams
    from quire.engine_client.async_llm import AsyncLLM
    from quire.engine_client.results import CompletionOutput, RequestOutput
    from quire.offline.beams import BeamSearchOutput, BeamSearchSequence
    from quire.offline.llm import LLM
    from quire.offline.llm_engine import LLMEngine
    from quire.offline.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "quire.offline.llm",
    "AsyncEngineArgs": "quire.cli.engine_args",
    "AsyncLLM": "quire.engine_client.async_llm",
    "AsyncLLMEngine": "quire.engine_client.async_llm:AsyncLLM",
    "BeamSearchOutput": "quire.offline.beams",
    "BeamSearchParams": "quire.core.sampling_params",
    "BeamSearchSequence": "quire.offline.beams",
    "CompletionOutput": "quire.engine_client.results",
    "EngineArgs": "quire.cli.engine_args",
    "LLMEngine": "quire.offline.llm_engine",
    "LoRARequest": "quire.core.adapters",
    "RequestOutput": "quire.engine_client.results",
    "RequestOutputKind": "quire.core.sampling_params",
    "SamplingParams": "quire.core.sampling_params",
    "StructuredOutputsParams": "quire.core.structured_outputs",
    "TextPrompt": "quire.offline.prompts",
    "TokensPrompt": "quire.offline.prompts",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        if name.startswith("_"):
            raise AttributeError(f"module 'quire' has no attribute {name!r}")
        from quire.errors import did_you_mean  # only for an unknown name

        raise AttributeError(f"quire has no {name}{did_you_mean(name, __all__)}")
    from importlib import import_module  # costs a few ms that `quire --version` need not pay

    module, _, other = _HOMES[name].partition(":")
    value = getattr(import_module(module), other or name)
    globals()[name] = value  # later uses don't call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _LastFinder:
    """Asks `import_finder` about modules of the package that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """See importlib.abc.MetaPathFinder."""
        if not name.startswith("quire."):
            return None
        from quire.compat.import_finder import ImportFinder  # only for a missing module

        return ImportFinder().find_spec(name, path, target)


sys.meta_path.append(_LastFinder)  # a class, like Python's own finders
