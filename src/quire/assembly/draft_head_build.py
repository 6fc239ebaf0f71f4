"""Finds and builds heads that draft for the model.

An MTP head is in the model's own files, an EAGLE-3 head in a folder of its own. A head shares
modules with its model, whose program must keep the inputs that the head reads. So `prepare_target`
comes before the runner is made. Called by `draft_model_build` and `rank_build`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from quire.assembly.device_setup import TRITON, DeviceSetup, choose_device, dense_methods
from quire.assembly.model_kind import DraftSource, ModelKind
from quire.errors import ConfigurationError
from quire.kernels.cpu.sampling import NativeSampling
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import Reading, load_ends
from quire.models.checkpoints.readers import find_reader, open_checkpoint
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.decoder import DecoderEnds, DecoderForCausalLM
from quire.models.heads.draft_head import DraftHead
from quire.models.heads.eagle3 import ARCHITECTURES, Eagle3Config, load_eagle3_config
from quire.models.interface import TextModel
from quire.models.registry import MTP_HEADS, find_entry
from quire.runtime.batch import RowBatch
from quire.runtime.draft_head import HeadDrafter
from quire.runtime.drafters import Drafter
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import StepRows
from quire.sampling.host.draft_sampler import DraftSampler
from quire.sampling.host.sampler import SamplingRows


class TargetFiles(NamedTuple):
    """The files of a model for which a head drafts."""

    folder: Path
    #: The config of the whole model.
    config: ModelConfig


def find_mtp(kind: ModelKind) -> DecoderConfig:
    """The config of the MTP head in the model's files. Raises ConfigurationError and
    CheckpointError if there is none that can draft."""
    from quire.models.heads.mtp import mtp_config  # it imports two families, so only if needed

    check_head(kind, "speculation has 'mtp'")
    config = mtp_config(kind.config, MTP_HEADS)
    find_entry(config).arranged(open_checkpoint(kind.folder), config)  # finds the head's tensors
    return config


def is_eagle3(folder: Path) -> bool:
    """Whether a folder has an EAGLE-3 head. Raises CheckpointError."""
    names = find_reader(folder).read_config(folder).get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def read_eagle3(kind: ModelKind, name: str, folder: Path) -> Eagle3Config:
    """The config of the head in `folder`, which the option speculative_model names. Raises
    ConfigurationError and its subclasses if it can't draft for the model."""
    check_head(kind, f"speculative_model is {name!r}")
    return load_eagle3_config(folder, kind.config)


def check_head(kind: ModelKind, option: str) -> None:
    """Raise ConfigurationError if no head can draft for the model. `option` begins the message."""
    options, reason = kind.options, None
    if not kind.generates:
        reason = "the model that it would draft for generates no tokens"
    elif options.kernels == TRITON or choose_device(options.device).type != "cpu":
        reason = "in this version a head drafts on the CPU only"
    if reason is not None:
        raise ConfigurationError(f"{option}, but {reason}; leave it out")


def prepare_target(model: TextModel, draft: DraftSource | None, max_num_tokens: int) -> None:
    """Let the model keep the inputs that a head reads, in steps of at most max_num_tokens. Nothing
    is kept for other drafters. Raises UnsupportedModelError if the model can't."""
    if draft is not None and isinstance(draft.config, Eagle3Config):
        assert draft.config.target_layers is not None
        model.keep_inputs(draft.config.target_layers, max_num_tokens)


def ends_bytes(head: DecoderConfig, target: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes, at most, of what `load_shared_ends` loads for a head of this config."""
    num_tables = 1 if target.tie_word_embeddings else 2
    if isinstance(head, Eagle3Config):
        num_tables = 0 if head.has_embedding else 1
    return num_tables * target.vocab_size * target.hidden_size * dtype.itemsize


def load_shared_ends(
    head: DraftHead, target: TargetFiles, setup: DeviceSetup, reading: Reading
) -> DecoderEnds | None:
    """Load the ends of the target that the head uses. Several ranks split the target, but only one
    of them drafts, so it needs them whole. None if the head uses neither."""
    if not (head.shares_embedding or head.shares_head):
        return None
    ends = load_ends(
        target.folder,
        target.config,
        has_head=head.shares_head,
        dtype=setup.dtype,
        device=setup.device,
        methods=dense_methods(setup),
        reading=reading,
    )
    use_operators(ends, setup.operators)
    return ends


def head_drafter(
    head: DraftHead, target: TextModel, setup: DeviceSetup, ends: DecoderEnds | None = None
) -> Callable[[KVCache, StepRows, SamplingRows], Drafter]:
    """Returns what makes the drafter of the runner of `target` from a loaded head. The head's
    layers are the last ones of the KV cache. `ends`: see `DraftHead.use_target`."""

    def make(kv_cache: KVCache, rows: StepRows, sampling_rows: SamplingRows) -> Drafter:
        assert isinstance(rows, RowBatch), "a head drafts on the CPU only"
        assert isinstance(target, DecoderForCausalLM), "checked by prepare_target"
        head.use_target(target, rows.max_num_tokens, ends)
        kernels = setup.kernels
        return HeadDrafter(
            head,
            target,
            setup.new_backend(),
            kv_cache.layers()[-len(head.attention_specs) :],
            rows,
            DraftSampler(sampling_rows, None if kernels is None else NativeSampling(kernels)),
            kv_cache.num_blocks,
            kernels,
        )

    return make
