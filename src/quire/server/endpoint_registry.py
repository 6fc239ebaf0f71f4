"""The registry of HTTP endpoints: the routers of the files in `routes`, and those of plugins."""

from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:  # it imports the web framework
    from quire.server.routes.endpoint import Endpoints

ENDPOINTS: "Registry[Endpoints]" = Registry(
    "endpoint",
    {
        "page": "quire.server.routes.admin.page:router",
        "docs_page": "quire.server.routes.admin.docs_page:router",
        "completions": "quire.server.routes.openai.completions:router",
        "chat": "quire.server.routes.openai.chat:router",
        "messages": "quire.server.routes.anthropic.messages:router",
        "chats": "quire.server.routes.ollama.chats:router",
        "ollama_embeddings": "quire.server.routes.ollama.embeddings:router",
        "served_models": "quire.server.routes.ollama.served_models:router",
        "model_changes": "quire.server.routes.ollama.model_changes:router",
        "responses": "quire.server.routes.openai.responses.responses:router",
        "stored_responses": "quire.server.routes.openai.responses.stored_responses:router",
        "files": "quire.server.routes.openai.uploaded_files:router",
        "batches": "quire.server.routes.openai.batches:router",
        "embeddings": "quire.server.routes.openai.embeddings:router",
        "scoring": "quire.server.routes.vllm.scoring:router",
        "tokenize": "quire.server.routes.vllm.tokenize:router",
        "tokenizer_info": "quire.server.routes.vllm.tokenizer_info:router",
        "models": "quire.server.routes.openai.models:router",
        "adapters": "quire.server.routes.vllm.adapters:router",
        "sleep_mode": "quire.server.routes.vllm.sleep_mode:router",
        "version": "quire.server.routes.admin.version:router",
        "health": "quire.server.routes.admin.health:router",
        "memory": "quire.server.routes.admin.memory:router",
        "stats": "quire.server.routes.admin.stats:router",
        "replicas": "quire.server.routes.admin.replicas:router",
        "metrics": "quire.server.routes.admin.metrics:router",
    },
)
"""The routers in the order of the OpenAPI document."""
