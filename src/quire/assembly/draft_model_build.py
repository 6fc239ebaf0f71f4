"""Finds and builds the model that drafts for another one, which the option speculative_model names.

It is computed by the same kernels, in the same dtype, with weights as its checkpoint has them. Its
attention layers follow the model's own in the layout of pages. With several ranks, all plan the
same pages, but only rank 0 loads the model or head, whole: it alone drafts. Called by `build` and
`rank_build`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.assembly.device_setup import TRITON, DeviceSetup, choose_device, dense_methods
from quire.assembly.draft_head_build import (
    TargetFiles,
    ends_bytes,
    find_mtp,
    head_drafter,
    is_eagle3,
    load_shared_ends,
    read_eagle3,
)
from quire.assembly.draft_vocabularies import Vocabulary, has_same_ids, pair_tokens
from quire.assembly.model_kind import DraftSource, ModelKind, tokenizer_folder
from quire.attention.interface import AttentionSpec
from quire.core.scheduling.model_drafts import ModelDrafts
from quire.engine_client.messages import OnProgress
from quire.errors import CheckpointError, ConfigurationError
from quire.hub.model_folder import resolve_model_folder
from quire.kernels.cpu.sampling import NativeSampling
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import Reading, load_model, weight_bytes
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.heads.draft_head import DraftHead
from quire.models.interface import CausalLM
from quire.models.registry import find_entry, load_config
from quire.observability.log import get_logger
from quire.runtime.batch import RowBatch
from quire.runtime.draft_model import DraftModel
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner, StepRows
from quire.runtime.token_pairs import TokenPairs
from quire.sampling.host.draft_sampler import DraftSampler
from quire.sampling.host.sampler import SamplingRows
from quire.speculation.speculation_options import DRAFT_MODEL, EAGLE3, MTP
from quire.text.tokenizer import Tokenizer

LEAST_SHARE = 0.5
"""The share of the smaller vocabulary that a model must have in common with the model that drafts
for it."""

logger = get_logger(__name__)


def draft_specs(source: DraftSource | None) -> tuple[AttentionSpec, ...]:
    """The attention layers of the model that drafts, as pages are planned for them.

    Their groups keep all blocks of a sequence, windows or not, since the model may catch up from
    the first token on.
    """
    specs = () if source is None else source.config.attention_specs
    return tuple(spec if spec.window is None else replace(spec, window=None) for spec in specs)


def draft_weight_bytes(
    source: DraftSource | None, setup: DeviceSetup, target: TargetFiles | None
) -> int:
    """The bytes of the loaded weights of the model that drafts. `target`: see `add_draft_model`."""
    if source is None:
        return 0
    own = weight_bytes(source.folder, source.config, setup.dtype, dense_methods(setup))
    if target is None or source.method == DRAFT_MODEL:
        return own
    assert isinstance(source.config, DecoderConfig), "a head"
    return own + ends_bytes(source.config, target.config, setup.dtype)


def with_draft_model(kind: ModelKind, on_progress: OnProgress | None) -> ModelKind:
    """`kind` with the model that drafts for it, fetched if needed, if the options name one.

    Raises ConfigurationError and its subclasses if it can't draft for that model.
    """
    options = kind.options
    name, methods = options.speculative_model, options.speculation.split(",")
    # First, look for a head: in the model's own files, or in the folder that is named.
    if MTP in methods:
        return replace(kind, draft=DraftSource(MTP, kind.folder, find_mtp(kind), MTP))
    if name is None:
        return kind
    read = partial(load_config, from_transformers=None)

    def check(folder: Path) -> object:
        return is_eagle3(folder) or read(folder)

    folder = resolve_model_folder(
        name, None, check=check, takes_images=False, on_progress=on_progress
    )
    if is_eagle3(folder):
        if DRAFT_MODEL in methods:
            raise _refusal(name, "it is a head for EAGLE-3; set speculation to 'eagle3'")
        head = read_eagle3(kind, name, folder)
        return replace(kind, draft=DraftSource(name, folder, head, EAGLE3))
    if EAGLE3 in methods:
        raise _refusal(name, "it is no head for EAGLE-3; set speculation to 'draft_model'")
    # Otherwise, check that the folder has a model that can draft.
    if not kind.generates:
        raise _refusal(name, "the model that it would draft for generates no tokens; leave it out")
    if options.kernels == TRITON or choose_device(options.device).type != "cpu":
        raise _refusal(
            name,
            "in this version a model drafts on the CPU only; leave it out, or say device='cpu'",
        )
    config = read(folder)
    if not find_entry(config).generates:
        raise _refusal(name, f"{config.architecture} predicts no tokens; name a model that does")
    if config.recurrent_specs:
        raise _refusal(
            name,
            f"{config.architecture} has recurrent states, which can't be cut back to the accepted"
            " drafts in this version; name a model without them",
        )
    if not all(spec.causal for spec in config.attention_specs):
        raise _refusal(name, f"{config.architecture} attends to later tokens; name another model")
    pairs = _pair_vocabularies(kind, name, folder, config)
    return replace(kind, draft=DraftSource(name, folder, config, pairs=pairs))


def _pair_vocabularies(
    kind: ModelKind, name: str, folder: Path, config: ModelConfig
) -> TokenPairs | None:
    """Pairs the token ids of the model and of the model that drafts; None if they are the same.

    Raises ConfigurationError if less than LEAST_SHARE of the smaller vocabulary's tokens have a
    partner.
    """
    own_size, size = kind.config.vocab_size, config.vocab_size
    own = None if kind.options.skip_tokenizer_init else _tokenizer(tokenizer_folder(kind.options))
    other = None if own is None else _tokenizer(folder)
    if own is None or other is None:
        if own_size != size:
            raise _refusal(
                name,
                f"its vocabulary has {size} tokens, that of the model {own_size}, and without both"
                " tokenizers they can't be compared; name a model of the same family",
            )
        return None
    mine, theirs = Vocabulary(own, own_size), Vocabulary(other, size)
    if has_same_ids(mine, theirs):
        return None
    pairs = pair_tokens(mine, theirs)
    num_pairs, fewest = len(pairs.target_ids), min(len(mine.entries()), len(theirs.entries()))
    if num_pairs < LEAST_SHARE * fewest:
        raise _refusal(
            name,
            f"its vocabulary has {num_pairs} tokens in common with the model's, which is less than"
            f" {LEAST_SHARE:.0%} of the {fewest} tokens of the smaller one; name a model of the"
            " same family",
        )
    logger.info(
        "%s has other token ids than the model; it can draft %d of the model's %d tokens",
        name,
        num_pairs,
        len(mine.entries()),
    )
    return pairs


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder; None if there is none."""
    try:
        return Tokenizer.from_folder(folder)
    except CheckpointError:
        if folder.is_file() or (folder / "tokenizer.json").is_file():
            raise
        return None


def _refusal(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"speculative_model is {name!r}, but {reason}")


def add_draft_model(
    runner: ModelRunner,
    source: DraftSource,
    setup: DeviceSetup,
    max_model_len: int,
    reading: Reading,
    target: TargetFiles | None,
) -> ModelDrafts:
    """Load the model or head that drafts, and make it the drafter of a runner without rows.

    Its layers are the last ones of the runner's KV cache. The result plans its drafts, by the times
    of runs that are measured here. `target`: the files of the runner's model, if that is one rank's
    shard of the model; None if it is whole.
    """
    most = max_model_len
    if source.method == DRAFT_MODEL:  # a head follows its model, however far
        most = min(max_model_len, source.config.max_supported_positions)
    model = load_model(
        source.folder,
        source.config,
        dtype=setup.dtype,
        device=setup.device,
        max_model_len=most,
        methods=dense_methods(setup),
        reading=reading,
    )
    use_operators(model, setup.operators)
    model.check_loaded()
    if isinstance(model, DraftHead):
        ends = None if target is None else load_shared_ends(model, target, setup, reading)
        drafter = runner.add_drafter(head_drafter(model, runner.model, setup, ends))
    else:
        assert isinstance(model, CausalLM), "checked by with_draft_model"
        drafter = runner.add_drafter(partial(_make_drafter, model, setup, source.pairs))
    return ModelDrafts(drafter.measure(), most)


def _make_drafter(
    model: CausalLM,
    setup: DeviceSetup,
    pairs: TokenPairs | None,
    kv_cache: KVCache,
    rows: StepRows,
    sampling_rows: SamplingRows,
) -> DraftModel:
    assert isinstance(rows, RowBatch), "a model drafts on the CPU only"
    kernels = setup.kernels
    return DraftModel(
        model,
        setup.new_backend(),
        kv_cache.layers()[-len(model.attention_specs) :],
        rows,
        DraftSampler(sampling_rows, None if kernels is None else NativeSampling(kernels)),
        kv_cache.num_blocks,
        kernels,
        pairs,
    )
