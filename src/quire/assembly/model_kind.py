"""Decides whether a model is served to generate text, or to embed and score.

Called by `build`, in every rank.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.assembly.config_overrides import move_overrides_to_options
from quire.assembly.reports.block_size import with_block_size
from quire.core.pooling import Activation, ModelPooling, PairForm
from quire.errors import ConfigurationError
from quire.hub.found_model import OnProgress
from quire.hub.model_files import shown_name
from quire.hub.model_folder import resolve_model_folder, resolve_text_folder
from quire.models.checkpoints.readers import find_reader
from quire.models.config import ModelConfig
from quire.models.config_fields import overridden
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.pooling_config import (
    PoolingFolder,
    model_pooling,
    read_pooling,
)
from quire.models.registry import find_entry, load_config
from quire.models.transformers_names.read_fields import known_version
from quire.models.vision.towers import TowerSource, find_tower
from quire.observability.log import get_logger
from quire.options.engine_options import EngineOptions
from quire.options.pooling_options import AUTO, GENERATE, POOLING
from quire.runtime.token_pairs import TokenPairs
from quire.speculation.speculation_options import DRAFT_MODEL, MTP
from quire.text.tokenizer import Tokenizer

_MAX_NAMES_SHOWN = 20
logger = get_logger(__name__)

_FROM_TRANSFORMERS = {"auto": None, "native": False, "transformers": True}
"""For each value of the option model_impl, the argument `from_transformers` of `load_config`."""

_INSTRUCTED = "Qwen3"
"""Rerankers whose architecture has this prefix expect pairs in the format `PairForm.QWEN3`."""


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A model that drafts for another one, or a head that drafts for its model; see
    `draft_model_build`."""

    name: str
    folder: Path
    config: ModelConfig
    #: Its name in the option speculation, and of its drafts in metrics.
    method: str = DRAFT_MODEL
    #: The tokens that it has in common with its model; None if both have the same token ids, and
    #: for heads.
    pairs: TokenPairs | None = None


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model, and how it is served."""

    #: The engine's options, completed by defaults that depend on the model.
    options: EngineOptions
    folder: Path
    config: ModelConfig
    pooling: ModelPooling
    #: Whether the model is served to generate text; otherwise it embeds or scores.
    generates: bool
    #: The model or head that drafts for it; None without one, and until `with_draft_model` has
    #: found it.
    draft: DraftSource | None = None
    #: The encoder of images; None if the model is served for text.
    tower: TowerSource | None = None


def tokenizer_folder(checked: EngineOptions) -> Path:
    """The folder of the tokenizer that the options name."""
    revision = None if checked.tokenizer else checked.revision
    return resolve_text_folder(checked.tokenizer or checked.model, revision)


def choose_kind(options: EngineOptions, on_progress: OnProgress | None = None) -> ModelKind:
    """Find the model that the options name, fetch it if needed, and decide how to serve it.

    `on_progress` is called while files are fetched; None shows a bar on stderr. Raises
    ConfigurationError and its subclasses before weights are fetched.
    """
    options = move_overrides_to_options(options)
    overrides = options.hf_overrides
    from_transformers = _FROM_TRANSFORMERS[options.model_impl]
    read = partial(load_config, overrides=overrides, from_transformers=from_transformers)
    folder = resolve_model_folder(
        options.model,
        options.revision,
        check=read,
        needs_tokenizer=options.tokenizer is None and not options.skip_tokenizer_init,
        takes_images=options.fetches_encoder,
        on_progress=on_progress,
    )
    said = read_pooling(folder)
    config = read(folder)
    could_generate = find_entry(config).generates
    if options.runner == GENERATE and not could_generate:
        raise ConfigurationError(
            f"runner is 'generate', but {config.architecture} predicts no tokens; leave it out to"
            " embed or score"
        )
    # By default a model pools if its folder has a pooling config or it has no output head.
    is_asked_to = options.runner == POOLING or options.score_tokens is not None
    is_made_to = said is not None or not could_generate
    generates = not (is_asked_to or (is_made_to and options.runner == AUTO))
    pooling = _pooling(options, folder, config, said)
    if not generates and not pooling.score_token_ids:
        config = read(folder, pools_hidden=True)
    if not generates:
        options = _with_fitting_length(options, config, said)
    options = with_block_size(options, config)
    tower, reason = None, why_text_only(options, config)
    if generates and reason is None:
        tower = find_tower(folder, config, options.mmproj)
    elif options.mmproj is not None:
        reason = reason or "it does not generate text"
        raise ConfigurationError(
            f"mmproj is {options.mmproj!r:.200}, but the model takes no images ({reason}); leave it"
            " out"
        )
    return ModelKind(options, folder, config, pooling, generates, tower=tower)


def why_text_only(options: EngineOptions, config: ModelConfig) -> str | None:
    """The reason in the options why images are not served; None if there is none."""
    if options.language_model_only:
        return "language_model_only is set"
    if isinstance(config, FallbackConfig):
        return "a class of transformers computes its language model"
    return None


def log_unexpected_properties(kind: ModelKind) -> None:
    """Warn of properties that a user of the model might not expect.

    For example, the model is computed by a class of transformers, which may be slower. Or only the
    text part of a multimodal model is served.
    """
    config = kind.config
    if isinstance(config, FallbackConfig):
        logger.warning(
            "%s is computed by transformers %s (model_impl is %r) on quire's memory, attention and"
            " linears; docs/models.md says what that means",
            config.architecture,
            config.transformers_version,
            kind.options.model_impl,
        )
    if config.wrapper is not None and kind.tower is None:
        reason = why_text_only(kind.options, config)
        logger.warning(
            "%s is served for text, by its language model (%s); what its files hold for images and"
            " sound is left out%s",
            config.wrapper,
            config.architecture,
            "" if reason is None else f" ({reason})",
        )
    if config.left_out:
        names = ", ".join(map(shown_name, config.left_out[:_MAX_NAMES_SHOWN]))
        rest = len(config.left_out) - _MAX_NAMES_SHOWN
        logger.warning(
            "config.json: the fields %s%s are left out, since no model class of transformers %s"
            " reads them",
            *(names, f" and {rest} more" if rest > 0 else "", known_version()),
        )
    if config.num_predicting_layers and MTP not in kind.options.speculation.split(","):
        logger.info("layers that predict tokens further on (MTP) draft only with --speculation mtp")


def _pooling(
    options: EngineOptions, folder: Path, config: ModelConfig, said: PoolingFolder | None
) -> ModelPooling:
    raw = overridden(find_reader(folder).read_config(folder), options.hf_overrides or {})
    pooling = model_pooling(config, said, raw, options.pooling_type)
    if options.score_tokens is not None:
        if not find_entry(config).generates:
            raise ConfigurationError(
                f"score_tokens is {options.score_tokens!r}, but {config.architecture} predicts no"
                " tokens; leave it out"
            )
        token_ids = _token_ids(options, options.score_tokens)
        pooling = replace(pooling, score_token_ids=token_ids, activation=Activation.SOFTMAX)
    scores = pooling.num_scores or pooling.score_token_ids
    if scores and config.architecture.startswith(_INSTRUCTED):
        pooling = replace(pooling, pair_form=PairForm.QWEN3)
    return pooling


def _token_ids(options: EngineOptions, words: str) -> tuple[int, ...]:
    source = options.tokenizer or options.model
    revision = None if options.tokenizer else options.revision
    tokenizer = Tokenizer.from_folder(resolve_text_folder(source, revision))
    found: list[int] = []
    for word in words.split(","):
        token_ids = tokenizer.encode(word, add_special_tokens=False)
        if len(token_ids) != 1:
            raise ConfigurationError(
                f"score_tokens has {word!r}, which is {len(token_ids)} tokens of this model; name"
                " two words of one token each"
            )
        found += token_ids
    return tuple(found)


def _with_fitting_length(
    options: EngineOptions, config: ModelConfig, said: PoolingFolder | None
) -> EngineOptions:
    """The options, with a max_model_len for embedding or scoring.

    This length is at most the length in the model's folder, and for an encoder at most
    max_num_batched_tokens.
    """
    longest = options.max_model_len or config.max_supported_positions
    if said is not None and said.max_tokens is not None and options.max_model_len is None:
        longest = min(longest, said.max_tokens)
    if config.is_causal:
        return replace(options, max_model_len=longest)
    if options.cache_dir is not None:
        raise ConfigurationError(
            f"cache_dir is {options.cache_dir!r}, but an encoder's prefixes can't be cached: each"
            " token attends to later tokens, too; leave it out"
        )
    most = options.max_num_batched_tokens
    if options.max_model_len is not None and options.max_model_len > most:
        raise ConfigurationError(
            f"max_model_len is {options.max_model_len}, but an encoder computes an input in one"
            f" step, of max_num_batched_tokens={most} tokens at most; raise that, or lower this"
        )
    if longest > most:
        logger.warning(
            "an encoder computes an input in one step, so max_model_len is %d, as"
            " max_num_batched_tokens is, instead of %d",
            most,
            longest,
        )
    # In an encoder, appending tokens changes K and V of every token, so prefixes can't be reused.
    return replace(options, max_model_len=min(longest, most), enable_prefix_caching=False)
