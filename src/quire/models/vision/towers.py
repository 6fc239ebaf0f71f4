"""Lists the towers by multimodal architecture, and loads one from a model's folder.

To add a tower, add a line in `TOWERS`, and a wrapper in `models.wrappers` if it has none. Called by
`assembly`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.hub.gguf.image_encoder import find_image_encoder
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear, without_weights
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.gguf.encoder_file import GGUFEncoderFile
from quire.models.checkpoints.loader import (
    ONE_THREAD,
    Reading,
    checkpoint_slots,
    fill_in_pieces,
    listed,
    module_bytes,
)
from quire.models.checkpoints.readers import find_reader, open_checkpoint
from quire.models.checkpoints.renamed import RenamedCheckpoint, with_words
from quire.models.checkpoints.source import CheckpointSource
from quire.models.checkpoints.transposed import TransposedCheckpoint
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.models.model_entry import CHECKPOINT_PARTS
from quire.models.vision import (
    gemma3_tower,
    gemma4_tower,
    idefics3,
    internvl,
    lfm2_vl,
    pixtral,
    qwen3_vl,
    siglip,
)
from quire.models.vision.vision_tower import Slices, VisionConfig, VisionTower


@dataclass(frozen=True, slots=True)
class TowerEntry:
    """The classes of a tower, and the names of its tensors."""

    config: type[VisionConfig]
    tower: type[VisionTower]
    #: Prefixes of the tower's tensors in the files, after an optional "model.".
    prefixes: tuple[str, ...]
    #: Words of the names in the files, and the words of the tower's names that replace them.
    words: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: The types that vision_config may have; None if all. quire has no tower for other types.
    model_types: tuple[str, ...] | None = None
    #: Prefixes of the tower's names of tensors that it does not use.
    unused: tuple[str, ...] = ()
    #: The tower's names of matrices that the files have as [inputs, outputs].
    transposed: tuple[str, ...] = ()

    def open(self, place: Path) -> CheckpointSource:
        """The tower's tensors under the tower's names. `place` is `TowerSource.place`. Raises
        CheckpointError."""
        replace = with_words(self.words)

        def rename(name: str) -> str | None:
            bare = name.removeprefix("model.")
            ours = replace(bare) if bare.startswith(self.prefixes) else None
            return None if ours is None or ours.startswith(self.unused) else ours

        source = GGUFEncoderFile(place) if place.is_file() else open_checkpoint(place)
        renamed = RenamedCheckpoint(source, rename)
        return TransposedCheckpoint(renamed, self.transposed) if self.transposed else renamed


_GEMMA3 = TowerEntry(
    gemma3_tower.Gemma3VisionConfig,
    gemma3_tower.Gemma3Tower,
    ("vision_tower.", "multi_modal_projector."),
    gemma3_tower.WORDS,
    unused=gemma3_tower.UNUSED,
    transposed=gemma3_tower.TRANSPOSED,
)
_GEMMA4 = TowerEntry(
    gemma4_tower.Gemma4VisionConfig, gemma4_tower.Gemma4Tower, ("vision_tower.", "embed_vision.")
)
_IDEFICS3 = TowerEntry(
    idefics3.Idefics3VisionConfig,
    idefics3.Idefics3Tower,
    ("vision_model.", "connector."),
    siglip.OTHER_NAMES,
)
_INTERNVL = TowerEntry(
    internvl.InternVLConfig,
    internvl.InternVLTower,
    ("vision_tower.", "multi_modal_projector."),
    siglip.OTHER_NAMES,
)
_LFM2_VL = TowerEntry(
    lfm2_vl.Lfm2VlVisionConfig,
    lfm2_vl.Lfm2VlTower,
    ("vision_tower.", "multi_modal_projector."),
    lfm2_vl.WORDS,
    unused=lfm2_vl.UNUSED,
    model_types=("siglip2_vision_model",),
)
_PIXTRAL = TowerEntry(
    pixtral.PixtralConfig,
    pixtral.PixtralTower,
    ("vision_tower.", "multi_modal_projector."),
    model_types=("pixtral",),
)
_QWEN3_VL = TowerEntry(
    qwen3_vl.Qwen3VLVisionConfig, qwen3_vl.Qwen3VLTower, ("visual.",), qwen3_vl.OTHER_NAMES
)

TOWERS: dict[str, TowerEntry] = {
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "InternVLForConditionalGeneration": _INTERNVL,
    "Lfm2VlForConditionalGeneration": _LFM2_VL,
    "LlavaForConditionalGeneration": _PIXTRAL,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_VL,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
"""Towers by the name of the multimodal architecture in config.json."""


@dataclass(frozen=True, slots=True)
class TowerSource:
    """A tower in a model's files, before it is loaded."""

    #: The model's folder, or the GGUF file with the encoder.
    place: Path
    entry: TowerEntry
    config: VisionConfig

    def max_content_tokens(self, max_model_len: int | None) -> int:
        """Number of tokens of the longest content, in prompts of at most max_model_len tokens; None
        if there is no such bound."""
        most = self.outline().max_content_tokens
        return most if max_model_len is None else min(most, max_model_len)

    def max_content_values(self, max_model_len: int | None) -> int:
        """Number of values in the embeddings of the longest content; see `max_content_tokens`."""
        tower = self.outline()
        num_tokens = self.max_content_tokens(max_model_len)
        return num_tokens * tower.num_parts * self.config.output_size

    def embedding_width(self) -> int:
        """Number of values of an embedding of the tower."""
        return self.outline().num_parts * self.config.output_size

    def join_look_up(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Call `use_embedding` in a rank that doesn't load the tower."""
        self.outline().use_embedding(embed)

    def prepare(self, model: TextModel, max_num_tokens: int) -> None:
        """Prepare the loaded language model for the tower's embeddings, in steps of at most
        `max_num_tokens`, before a program is recorded. Raises UnsupportedModelError."""
        tower = self.outline()
        model.take_contents(tower.num_parts, tower.rotary_sections, max_num_tokens)

    def weight_bytes(self, dtype: torch.dtype, methods: LinearMethods) -> int:
        """Bytes of memory of the loaded tower. Raises CheckpointError for weights that don't match
        the config."""
        whole = self.outline()
        self._check_match(whole)
        for module in whole.modules():
            if isinstance(module, Linear):
                module.method = methods.stored_by(module)
        return sum(module_bytes(module, dtype) for module in whole.modules())

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        methods: LinearMethods,
        reading: Reading = ONE_THREAD,
    ) -> Slices[VisionTower]:
        """Load the tower, ready to encode, in slices between which steps may run.

        Raises CheckpointError, and MemoryError or RuntimeError if the memory is too small.
        """
        self._check_match(self.outline())
        with without_weights():
            tower = self._build(dtype, device)
        yield
        for module in tower.modules():
            if isinstance(module, Linear):
                module.use(methods.of(module), dtype, device)
        slots = checkpoint_slots(tower, CHECKPOINT_PARTS)
        yield from fill_in_pieces(slots, self.entry.open(self.place), reading)
        for module in tower.modules():
            if isinstance(module, Linear | VocabEmbedding):
                module.finish()
                yield
        return tower.eval()

    def outline(self) -> VisionTower:
        """The tower on the meta device: it knows all sizes, but can't encode."""
        return self._build(torch.float32, torch.device("meta"))

    def _build(self, dtype: torch.dtype, device: torch.device) -> VisionTower:
        return self.entry.tower(self.config, dtype=dtype, device=device)

    def _check_match(self, whole: VisionTower) -> None:
        """Raise CheckpointError unless the files have exactly the tensors of the tower."""
        checkpoint = self.entry.open(self.place)
        slots = checkpoint_slots(whole, CHECKPOINT_PARTS)
        shapes = {name: slot.shape for name, (slot,) in slots.items()}
        for names, what in (
            (shapes.keys() - checkpoint.names, "lack"),
            (checkpoint.names - shapes.keys(), "have, beyond what config.json describes,"),
        ):
            if names:
                raise CheckpointError(
                    f"{self.place}: the weights of the encoder of images {what} {listed(names)};"
                    " set language_model_only to serve the model for text"
                )
        wrong = [
            f"{name} {list(checkpoint.shape(name))} instead of {list(shape)}"
            for name, shape in shapes.items()
            if checkpoint.shape(name) != shape
        ]
        if wrong:
            raise CheckpointError(
                f"{self.place}: the weights of the encoder of images have other shapes than"
                f" config.json says: {listed(wrong)}"
            )


def find_tower(folder: Path, config: ModelConfig, mmproj: str | None = None) -> TowerSource | None:
    """The tower of a model with this config; None if the model is for text only, or if quire has no
    tower for it.

    `folder` is the model's folder or GGUF file. `mmproj` is that of `find_image_encoder`. Raises
    UnsupportedModelError and CheckpointError for a config that the tower does not support.
    """
    try:
        encoder = find_image_encoder(folder, mmproj)
        name = config.wrapper if encoder is None else encoder.settings.architecture
        entry = None if name is None else TOWERS.get(name)
        if entry is None:
            return None
        if encoder is None:
            place, raw = folder, find_reader(folder).read_config(folder)
        else:
            place, raw = encoder.path, encoder.settings.config
        vision = raw.get("vision_config")
        model_type = vision.get("model_type") if isinstance(vision, dict) else None
        if entry.model_types is not None and model_type not in entry.model_types:
            return None
        return TowerSource(place, entry, entry.config.from_hf(raw, config.hidden_size))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; to serve the model for text, set language_model_only"
        ) from error
