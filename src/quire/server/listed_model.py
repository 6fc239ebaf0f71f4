"""An entry of the file of models: a model of a server that has several.

Made by `cli.models_file`, read by `model_loader`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.server.config import ServerConfig

MODEL_OPTIONS = (
    "tool_call_parser",
    "reasoning_parser",
    "chat_template_file",
    "default_chat_template_kwargs",
    "exclude_tools_when_tool_choice_none",
    "enable_force_include_usage",
    "return_tokens_as_token_ids",
    "lora_modules",
    "replicas",
    "routing_policy",
    "idle_unload_s",
    "heartbeat_timeout_s",
    "max_engine_restarts",
)
"""The server's options that an entry of the file of models may have."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """An entry of the file of models: the names of a model, and the options that differ from the
    server's."""

    names: tuple[str, ...]
    #: Fields of `EngineOptions` by name.
    engine_options: Mapping[str, object]
    #: Fields of `ServerConfig` by name.
    server_options: Mapping[str, Any] = field(default_factory=dict)
    #: Bytes for weights and KV cache together; None means that they are computed.
    memory_bytes: int | None = None
    #: Whether the model is loaded at the start and never unloaded.
    is_pinned: bool = False

    @property
    def files_in_use(self) -> list[str]:
        """The models whose files this one needs, by name or path."""
        found = map(self.engine_options.get, ("model", "tokenizer", "speculative_model"))
        return [str(name) for name in found if name is not None]

    def num_replicas(self, server: ServerConfig) -> int:
        """The number of the model's engines, by its own options or those of the server."""
        return int(self.server_options.get("replicas", server.replicas))
