"""Options for models that embed or score.

`assembly` applies them. Their defaults come from the model's folder (`models.pooling_config`).
"""

from dataclasses import dataclass

from quire.errors import ConfigurationError
from quire.option_fields import OneOf, Options, Pattern, option

AUTO, GENERATE, POOLING = "auto", "generate", "pooling"
RUNNERS = (AUTO, GENERATE, POOLING)
POOLING_TYPES = ("cls", "last", "mean")
OTHER_POOLING_TYPES = (("CLS", "cls"), ("LAST", "last"), ("MEAN", "mean"))


@dataclass(frozen=True)
class PoolingOptions(Options):
    """Whether the model generates text, and how it pools hidden states."""

    runner: str = option(
        AUTO,
        OneOf(RUNNERS),
        group="model",
        help="generate: text, and embeddings of it; pooling: embeddings and scores only; auto:"
        " pooling for encoders, classifiers and folders of sentence-transformers",
        doc='"generate": text, and embeddings besides; "pooling": embeddings and scores alone,'
        ' without the weights of a head that predicts tokens; "auto": "pooling" for encoders,'
        " classifiers and folders of sentence-transformers (modules.json).",
    )
    pooling_type: str | None = option(
        None,
        OneOf(POOLING_TYPES, others=OTHER_POOLING_TYPES),
        group="model",
        help=f"hidden states that become an embedding: {', '.join(POOLING_TYPES)}",
        doc="the hidden states that become an embedding: those of the first token (cls), of the"
        " last token, or the mean of all. None: as the folder says (1_Pooling/config.json). If it"
        " says nothing, last for a decoder and mean for an encoder.",
    )
    score_tokens: str | None = option(
        None,
        Pattern(r"[^,\s]+,[^,\s]+", "two tokens, the refusing one first, such as 'no,yes'"),
        group="model",
        help="score by the logits of two tokens, such as no,yes (Qwen3-Reranker)",
        doc='score a pair by the logits of two tokens, such as "no,yes": the probability of the'
        " second, as Qwen3-Reranker does; None: as the folder says.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.score_tokens is not None and self.runner == GENERATE:
            raise ConfigurationError(
                f"score_tokens is {self.score_tokens!r}, but runner is 'generate'; leave one out"
            )
