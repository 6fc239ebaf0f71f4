"""The message that `quire serve` prints when it starts: model, memory, address.

It is made from plain values, without the engine or the socket. Called by `launch`.
"""

from collections.abc import Mapping
from typing import Any

from quire.core.memory.memory_report import format_bytes
from quire.engine_client.device_ledger import TYPICAL_REQUEST_TOKENS, ledger_parts
from quire.version import __version__

EXPOSED = "Anyone who can reach this machine may use the server; restrict it with --api-key-file.\n"
NO_OPERATOR = (
    "No key is named operator, so /metrics and /memory are refused (403): add operator:KEY.\n"
)

SINGLE_API_SERVER = (
    "  streams outlive any replica, but not this process: it is the only API server of the replicas"
)

_MEMORY = {
    "weight": "weights",
    "vision_weight": "image encoder",
    "encoder_cache": "images",
    "adapter": "adapters",
    "activation": "largest step",
    "graph": "CUDA graphs",
    "kv_cache": "KV cache",
    "other": "others",
    "unused": "unused",
    "answer": "answers",
}
_NOTES = {
    "encoder_cache": "at most, for embeddings",
    "other": "other programs, the driver, kernels' code",
    "answer": "at most, for drafts",
}


def ledger(model_name: str, facts: Mapping[str, Any]) -> str:
    """Lines with the loaded model and the memory for weights, KV cache and other uses. `facts` are
    the values that the engine reported, by name; missing values are left out."""
    lines = [f"quire {__version__}: {', '.join(_loaded(model_name, facts))}"]
    parts = ledger_parts(facts)
    width = max((len(_MEMORY[name]) for name in parts), default=0) + 2
    for name, num_bytes in parts.items():
        note = _NOTES.get(name, "")
        if name == "kv_cache":
            note = _capacity(facts)
        elif name == "adapter":
            note = f"{facts['max_loras']} slots for ranks up to {facts['max_lora_rank']}"
        lines.append(f"  {_MEMORY[name]:<{width}}{format_bytes(num_bytes):>12}  {note}".rstrip())
    if "device_memory_bytes" in facts:
        total = format_bytes(facts["device_memory_bytes"])
        lines.append(f"  {'total':<{width}}{total:>12}  {facts.get('device_name', '')}".rstrip())
    return "\n".join(lines)


def dialect_line(dialect: str, source: str, refusal: str | None) -> str:
    """A line that names the model's dialect (its markup of tool calls), the source that determined
    it, and a source that was refused."""
    line = f"  tool calls and reasoning: {dialect} (by {source})"
    return line if refusal is None else f"{line}; {refusal}"


def invitation(
    model_name: str,
    url: str,
    *,
    has_chat: bool,
    needs_key: bool,
    is_exposed: bool,
    has_operator: bool,
) -> str:
    """The server's address, and a curl command that calls it. If a key is needed, the command has a
    placeholder for it.

    `is_exposed`: other machines may reach the server, and calls need no key. `has_operator`: one of
    the keys is the operator's, who may see the numbers of the whole server.
    """
    if has_chat:
        path = "chat/completions"
        question = '"messages": [{"role": "user", "content": "What does os.path.join do?"}]'
    else:
        path, question = "completions", '"prompt": "Once upon a time"'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    warning = (EXPOSED if is_exposed else "") + ("" if has_operator else NO_OPERATOR)
    return (
        f"{warning}quire serves {model_name} at {url} (Ctrl-C ends it). Try:\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{model_name}", {question}}}\''
    )


def _loaded(model_name: str, facts: Mapping[str, Any]) -> list[str]:
    described = [
        facts[key] if key == "architecture" else f"{_count(facts[key])} parameters"
        for key in ("architecture", "num_parameters")
        if facts.get(key)
    ]
    parts = [f"{model_name} ({', '.join(described)})" if described else model_name]
    if facts.get("dtype"):
        parts.append(str(facts["dtype"]))
    if facts.get("quantization"):
        parts.append(f"{facts['quantization']} weights")
    if facts.get("kernels"):
        parts.append(f"kernels {facts['kernels']}")
    if facts.get("num_replicas"):
        parts.append(f"{facts['num_replicas']} replicas")
    num_ranks = facts.get("tensor_parallel_size", 1)
    if num_ranks > 1:
        parts.append(f"{num_ranks} ranks")
    is_several = num_ranks > 1 or bool(facts.get("num_replicas"))
    if facts.get("num_threads"):
        threads = facts["num_threads"]
        each = " each" if is_several else ""
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}{each}")
    if facts.get("numa"):  # the memory node of the first rank of the first replica
        parts.append("kept to memory nodes" if is_several else f"kept to {facts['numa']}")
    return parts


def _capacity(facts: Mapping[str, Any]) -> str:
    """The number of concurrent requests that fit into the KV cache if they share no blocks."""
    if not {"num_blocks", "block_size", "max_model_len", "num_request_blocks"} <= facts.keys():
        return ""
    num_tokens = min(TYPICAL_REQUEST_TOKENS, facts["max_model_len"])
    fitting = facts["num_blocks"] // facts["num_request_blocks"]
    blocks = f"{facts['num_blocks']} blocks of {facts['block_size']} tokens"
    bound = facts.get("max_num_seqs")
    if bound is not None and bound < fitting:
        return (
            f"{blocks}: {bound} concurrent requests of {num_tokens} tokens"
            f" (max_num_seqs; there is memory for {fitting})"
        )
    plural = "" if fitting == 1 else "s"
    return f"{blocks}: {fitting} concurrent request{plural} of {num_tokens} tokens"


def _count(number: int) -> str:
    """Abbreviate a count: 7615616512 -> "7.6 B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
