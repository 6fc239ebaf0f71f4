"""Maps names of Ollama's library to the hub ids of the same models.

The table must be updated when Ollama's library changes. Called by `model_folder`, to advise a user
who gives such a name in place of a hub id.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class _Family:
    """The models of one family in Ollama's library."""

    #: The hub id, with `{}` in place of the size.
    hub_id: str
    #: The sizes in Ollama's tags; the tag `latest` is the first size. Empty if the family has one
    #: model.
    sizes: tuple[str, ...] = ()
    #: Whether the hub id has the size in upper case.
    has_upper_case: bool = True

    def named(self, tag: str) -> str | None:
        """The hub id for a tag of Ollama's, such as 0.6b or 8b-q4_K_M; None if it is unknown."""
        if not self.sizes:
            return self.hub_id
        size = self.sizes[0] if tag == LATEST else tag.lower().partition("-")[0]
        if size not in self.sizes:
            return None
        return self.hub_id.format(size.upper() if self.has_upper_case else size)


_FAMILIES: Mapping[str, _Family] = {
    "gemma2": _Family("google/gemma-2-{}-it", ("9b", "2b", "27b"), has_upper_case=False),
    "gemma3": _Family("google/gemma-3-{}-it", ("4b", "1b", "12b", "27b"), has_upper_case=False),
    "gpt-oss": _Family("openai/gpt-oss-{}", ("20b", "120b"), has_upper_case=False),
    "llama3.1": _Family("meta-llama/Llama-3.1-{}-Instruct", ("8b", "70b", "405b")),
    "llama3.2": _Family("meta-llama/Llama-3.2-{}-Instruct", ("3b", "1b")),
    "llama3.3": _Family("meta-llama/Llama-3.3-70B-Instruct"),
    "mistral": _Family("mistralai/Mistral-7B-Instruct-v0.3"),
    "phi4": _Family("microsoft/phi-4"),
    "qwen2.5": _Family(
        "Qwen/Qwen2.5-{}-Instruct", ("7b", "0.5b", "1.5b", "3b", "14b", "32b", "72b")
    ),
    "qwen2.5-coder": _Family(
        "Qwen/Qwen2.5-Coder-{}-Instruct", ("7b", "0.5b", "1.5b", "3b", "14b", "32b")
    ),
    "qwen3": _Family("Qwen/Qwen3-{}", ("8b", "0.6b", "1.7b", "4b", "14b", "32b")),
    "smollm2": _Family("HuggingFaceTB/SmolLM2-{}-Instruct", ("1.7b", "135m", "360m")),
    "tinyllama": _Family("TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
}


def advice_for(name: str) -> str | None:
    """Advice to use a hub id in place of a name of Ollama's, as a clause; None if the name is
    unknown. `name` may have a tag after a colon."""
    stem, _, tag = name.removeprefix("library/").partition(":")
    family = _FAMILIES.get(stem.lower())
    if family is None:
        return None
    known = family.named(tag or LATEST) or family.named(LATEST)
    return f"is a name of Ollama's library, not a hub id; the hub has such a model as {known!r}"
