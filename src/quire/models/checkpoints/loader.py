"""Builds a model and fills it from a checkpoint.

Weights are copied piece by piece into the (fused) linears. A checkpoint's tensors and a model's
parameters must match one to one: a missing, unexpected or misshapen tensor is refused by name.
The caller chooses the device and the weight formats.
"""

import dataclasses
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import nn

from quire.errors import CheckpointError, UnsupportedModelError
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import SampledMethod, WideInputsMethod
from quire.hub.model_files import shown_name
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.experts import Experts
from quire.layers.fused_parameter import FusedParameter
from quire.layers.linear import Linear, SlottedModule, WeightSlot, without_weights
from quire.layers.sharded import LinearMethods, Sharding
from quire.models.checkpoints.block_formats import BlockFormats
from quire.models.checkpoints.quantized.methods import refuse_quantized_names
from quire.models.checkpoints.source import CheckpointSource
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderEnds
from quire.models.interface import TextModel
from quire.models.model_entry import ModelEntry
from quire.models.registry import find_entry
from quire.models.sharding import split_config

_log = logging.getLogger(__name__)

# Tensors of old checkpoints that can be computed from the config.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_MAX_NAMES_SHOWN = 8

# Size of the sample by which a vocabulary projection chooses its layout: runs, and rows of a run.
_SAMPLE_RUNS = 16
_SAMPLE_RUN_ROWS = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading weights."""

    #: Number of threads that fill the model.
    num_threads: int = 1
    #: Called about a hundred times by the loading thread, with (weights read, weights in total).
    on_progress: Progress | None = None
    #: The digest that all weights are added to; None if no digest is wanted.
    digest: WeightsDigest | None = None


ONE_THREAD = Reading()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disables Python's garbage collector. The many modules of a model would trigger full
    collections, which take 0.12 s each with torch and a tokenizer loaded (Zen 5)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collections()
def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    methods: LinearMethods | None = None,
    reading: Reading = ONE_THREAD,
) -> TextModel:
    """Load the model of `folder`, ready to run. `config` is `registry.load_config(folder)`.

    Weights are converted to `dtype`. `max_model_len` is the length for rope types that depend on a
    length. If `methods` is None, linears are dense, and are computed by torch. If `methods` has a
    `sharding`, the model is one rank's shard of the model that `config` describes. Needs the
    model's memory once, plus a few MiB for each thread that reads.
    Raises CheckpointError that names the file or the tensors at fault.
    """
    # First, check that the checkpoint matches the config, before any memory is allocated.
    entry = find_entry(config)
    checkpoint = _open(folder, config, entry)
    stored = LinearMethods(DenseMethod()) if methods is None else methods
    whole = blueprint(config, entry, stored)
    shapes = tensor_shapes(whole, entry)
    _check_match(folder, checkpoint, config, shapes)
    if config.tie_word_embeddings and _ends_differ(checkpoint, entry):
        _log.warning(
            "%s: its config ties the embedding and the head, but its weights have two different "
            "tensors for them; both are used, as in transformers",
            folder,
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
        _check_match(folder, checkpoint, config, shapes)
    sharding = stored.sharding
    # Then build the model, or the shard of one rank.
    share = config
    if sharding is not None:
        share = split_config(config, sharding.group.rank, sharding.group.size)
    with nullcontext() if methods is None else without_weights():
        model = entry.model(share, dtype=dtype, device=device, max_model_len=max_model_len)
    _place_on_host(model, stored)
    # Choose a method for each linear by the block format of its weights, and allocate the weights.
    block_formats = _block_formats(whole, config, entry, checkpoint, stored)
    block_formats.log_dequantized(folder, dtype)
    for remark in () if config.quantized is None else config.quantized.remarks:
        _log.warning("%s: %s", folder, remark)
    if methods is not None:
        _use_methods(model, block_formats, methods, dtype, device)
    # Find the place of each tensor, and fill all of them.
    if sharding is not None:
        sharding.join(model)
        model.vocab_size = config.vocab_size
    slots = _own_slots(model, config, checkpoint, sharding, shapes)
    head_name = entry.head
    if config.tie_word_embeddings:
        head_name, _ = _kept_and_spare_end(checkpoint, entry)
    _show_samples(model, checkpoint, head_name)
    fill(slots, checkpoint, reading)
    for module in model.modules():
        if isinstance(module, Linear | VocabEmbedding):
            module.finish()
    return model.eval()


@_no_collections()
def load_ends(
    folder: Path,
    config: ModelConfig,
    *,
    has_head: bool,
    dtype: torch.dtype,
    device: torch.device,
    methods: LinearMethods,
    reading: Reading = ONE_THREAD,
) -> DecoderEnds:
    """Load the embedding of a decoder whole and, if `has_head`, its vocabulary projection, too.

    `load_model` must have loaded the model, or a shard of it, since it checks the checkpoint.
    """
    entry = find_entry(config)
    checkpoint = _open(folder, config, entry)
    if config.tie_word_embeddings and _ends_differ(checkpoint, entry):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    whole = blueprint(config, entry, methods)
    block_formats = _block_formats(whole, config, entry, checkpoint, methods)
    with without_weights():
        ends = DecoderEnds(config, has_head=has_head, dtype=dtype, device=device)
    _use_methods(ends, block_formats, methods, dtype, device)
    slots = checkpoint_slots(ends, entry.checkpoint_parts)
    if config.tie_word_embeddings:
        _merge_ends(slots, checkpoint, entry)
    fill(slots, checkpoint, reading)
    for module in ends.modules():
        if isinstance(module, Linear | VocabEmbedding):
            module.finish()
    return ends.eval()


def load_again(
    linears: Collection[Linear],
    model: TextModel,
    folder: Path,
    config: ModelConfig,
    *,
    methods: LinearMethods,
    reading: Reading = ONE_THREAD,
) -> None:
    """Read the weights of some linears of a loaded model again, and round them by the linears'
    current methods. Biases are unchanged. The other arguments are those of `load_model`. Raises
    CheckpointError.
    """
    entry = find_entry(config)
    checkpoint = _open(folder, config, entry)
    shapes = tensor_shapes(blueprint(config, entry, methods), entry)
    if config.tie_word_embeddings and _ends_differ(checkpoint, entry):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    slots = {
        name: tuple(slot for slot in places if slot.part is not None and slot.part[0] in linears)
        for name, places in _own_slots(model, config, checkpoint, methods.sharding, shapes).items()
    }
    fill({name: places for name, places in slots.items() if places}, checkpoint, reading)
    for linear in linears:
        linear.finish()


def _own_slots(
    model: TextModel,
    config: ModelConfig,
    checkpoint: CheckpointSource,
    sharding: Sharding | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[WeightSlot, ...]]:
    """The places of all tensors of the checkpoint in the model, or in one rank's shard of it.

    `shapes` are the shapes of the unsharded tensors.
    """
    entry = find_entry(config)
    slots = checkpoint_slots(model, entry.checkpoint_parts)
    if sharding is not None:
        slots = _cut_slots(slots, sharding, shapes)
    if config.tie_word_embeddings:
        _merge_ends(slots, checkpoint, entry)
    return slots


def _open(folder: Path, config: ModelConfig, entry: ModelEntry) -> CheckpointSource:
    """Open the weights. Raises CheckpointError if there are fewer tensors than layers.

    This refuses a damaged config with a million layers, whose blueprint would take hours."""
    checkpoint = entry.open(folder, config)
    if len(checkpoint.names) < config.num_layers:
        raise CheckpointError(
            f"{folder}: the weights are {len(checkpoint.names)} tensors, but config.json says"
            f" {config.num_layers} layers; the download is not whole, or config.json describes"
            " another model"
        )
    return checkpoint


def _block_formats(
    whole: TextModel,
    config: ModelConfig,
    entry: ModelEntry,
    checkpoint: CheckpointSource,
    methods: LinearMethods,
) -> BlockFormats:
    renamed = {}
    if config.tie_word_embeddings:
        kept, spare = _kept_and_spare_end(checkpoint, entry)
        renamed = {kept: kept, spare: kept}
    slots = checkpoint_slots(whole, entry.checkpoint_parts)
    return BlockFormats(whole, slots, checkpoint, methods, renamed=renamed)


def _use_methods(
    model: nn.Module,
    block_formats: BlockFormats,
    methods: LinearMethods,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            place = torch.device("cpu") if module.is_on_host else device
            module.use(methods.of(module, block_formats.of_linear(path)), dtype, place)
        elif isinstance(module, VocabEmbedding):
            quantized = methods.of_block_format(block_formats.of_table(path))
            if quantized is not None:
                module.keep_quantized(quantized, dtype, device)


def weight_bytes(
    folder: Path, config: ModelConfig, dtype: torch.dtype, methods: LinearMethods
) -> int:
    """Bytes of memory of the loaded model of `folder`. Raises the errors of `served_blueprint`."""
    return stored_bytes(served_blueprint(folder, config, methods), config, dtype)


def served_blueprint(folder: Path, config: ModelConfig, methods: LinearMethods) -> TextModel:
    """The blueprint of the model of `folder`, with the methods that store its weights.

    Raises CheckpointError for weights that don't match `config`. Raises UnsupportedModelError if
    `methods` multiply all experts of a layer in one kernel, but the layer's block formats differ or
    its inputs are reordered.
    """
    entry = find_entry(config)
    checkpoint = _open(folder, config, entry)
    whole = blueprint(config, entry, methods)
    _check_match(folder, checkpoint, config, tensor_shapes(whole, entry))
    _block_formats(whole, config, entry, checkpoint, methods).choose_methods()
    if methods.groups_experts:
        _check_experts(folder, whole)
    return whole


def _check_experts(folder: Path, whole: TextModel) -> None:
    for path, module in whole.named_modules():
        if isinstance(module, Experts) and not (module.is_on_host or module.are_grouped):
            raise UnsupportedModelError(
                f"{folder}: the weights of {path} have different block formats, or reordered"
                " inputs, and no GPU kernel multiplies such experts at once; take a checkpoint that"
                " quantizes all experts alike, or device='cpu'"
            )


def stored_bytes(whole: TextModel, config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of memory of the loaded model that `config` describes. `whole` is its blueprint."""
    num_bytes = sum(module_bytes(module, dtype) for module in whole.modules())
    heads = [module for module in whole.modules() if isinstance(module, LMHead)]
    if config.tie_word_embeddings and all(each.method.is_exact for each in heads):
        # The blueprint has the embedding and the head; a tied model stores them once.
        num_bytes -= config.vocab_size * config.hidden_size * dtype.itemsize
    if whole.recurrent_specs:  # the engine can't choose wide inputs of such a model
        num_bytes -= sum(map(_wide_bytes, whole.modules()))
    return num_bytes


def module_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the module's own parameters (not of its children) in a model of this dtype, as its
    method stores them."""
    if isinstance(module, VocabEmbedding) and module.method is not None:
        return module.method.num_bytes(module.vocab_size, module.hidden_size, dtype)
    if not isinstance(module, Linear):
        return dtype.itemsize * sum(each.numel() for each in module.parameters(recurse=False))
    biases = module.output_size if module.has_bias else 0
    own = sum(buffer.nbytes for buffer in module.buffers(recurse=False))
    weight = module.method.num_bytes(module.output_size, module.input_size, dtype)
    return weight + biases * dtype.itemsize + own + _wide_bytes(module)


def _wide_bytes(module: nn.Module) -> int:
    """The bytes of the weights of a module's wide inputs."""
    if not (isinstance(module, Linear) and module.may_have_wide):
        return 0
    method = module.method.storage
    if not isinstance(method, WideInputsMethod):
        return 0
    return method.wide_bytes(module.output_size, module.input_size)


def checkpoint_slots(
    model: nn.Module, checkpoint_parts: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[WeightSlot, ...]]:
    """Maps each tensor's name in the checkpoint to the places in the model that it fills."""
    slots: dict[str, tuple[WeightSlot, ...]] = {}
    slotted = ""
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        # A SlottedModule has slots for its inner modules, so skip these modules.
        if slotted and path.startswith(f"{slotted}."):
            continue
        if isinstance(module, SlottedModule):
            slotted = path
            slots |= {
                f"{parent}.{name}": (slot,) for name, slot in module.checkpoint_slots().items()
            }
            continue
        if isinstance(module, Linear | FusedParameter):
            is_fused = len(module.part_sizes) > 1
            parts = checkpoint_parts.get(leaf, (leaf,)) if is_fused else (leaf,)
            assert len(parts) == len(module.part_sizes), path
            for (parameter, index), slot in module.slots().items():
                name = f"{parts[index]}.{parameter}"
                slots[f"{parent}.{name}" if parent else name] = (slot,)
            continue
        if isinstance(module, VocabEmbedding) and (table := module.quantized_slot()) is not None:
            slots[f"{path}.weight"] = (table,)
        for name, tensor in _stored(module):
            load = partial(_copy_rows, tensor)
            slots[f"{path}.{name}"] = (WeightSlot(tuple(tensor.shape), load),)
    return slots


def _stored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters, and its buffers that are part of a checkpoint."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _cut_slots(
    slots: Mapping[str, tuple[WeightSlot, ...]],
    sharding: Sharding,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[WeightSlot, ...]]:
    """Make slots that take whole tensors of shapes `shapes`, and keep the rank's shard of each."""
    return {
        name: tuple(sharding.cut(slot, shapes[name]) for slot in places)
        for name, places in slots.items()
    }


def _copy_rows(parameter: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
    whole = parameter if parameter.dim() else parameter[None]  # a single number is one row
    whole[first_row : first_row + len(rows)].copy_(rows)


def _merge_ends(
    slots: dict[str, tuple[WeightSlot, ...]], checkpoint: CheckpointSource, entry: ModelEntry
) -> None:
    """Let one tensor fill the embedding and the head of a tied model."""
    kept, _ = _kept_and_spare_end(checkpoint, entry)
    slots[kept] = slots.pop(entry.embedding, ()) + slots.pop(entry.head, ())


def _kept_and_spare_end(checkpoint: CheckpointSource, entry: ModelEntry) -> tuple[str, str]:
    """Names of a tied model's embedding and head. The first is the tensor that fills both; the
    second is not needed. If the checkpoint has both tensors, they are equal."""
    if entry.embedding in checkpoint.names:
        return entry.embedding, entry.head
    return entry.head, entry.embedding


def _show_samples(model: nn.Module, checkpoint: CheckpointSource, head_name: str) -> None:
    """Give the vocabulary projection's method a sample of the tensor `head_name`, if it needs
    one."""
    for module in model.modules():
        if isinstance(module, LMHead):
            method = module.method.storage
            if isinstance(method, SampledMethod) and method.wants_sample:
                method.take_sample(module, _sample_rows(checkpoint, head_name))


def _sample_rows(checkpoint: CheckpointSource, name: str) -> torch.Tensor:
    """About a thousand rows, in runs spread over the whole tensor: [R, I] fp32."""
    num_rows = checkpoint.shape(name)[0]
    runs = min(_SAMPLE_RUNS, -(-num_rows // _SAMPLE_RUN_ROWS))
    found = []
    for run in range(runs):
        first = run * num_rows // runs
        span = range(first, min(first + _SAMPLE_RUN_ROWS, num_rows))
        with checkpoint.rows(name, span) as rows:
            found.append(rows.float().clone())
    return torch.cat(found)


def fill(
    slots: Mapping[str, tuple[WeightSlot, ...]],
    checkpoint: CheckpointSource,
    reading: Reading,
) -> None:
    """Read all tensors piece by piece into their slots, with one or several threads."""
    for _ in fill_in_pieces(slots, checkpoint, reading):
        pass


def fill_in_pieces(
    slots: Mapping[str, tuple[WeightSlot, ...]],
    checkpoint: CheckpointSource,
    reading: Reading,
) -> Iterator[None]:
    """The same as `fill`, but yields after each piece. With one thread, nothing is read between two
    calls of `next`."""
    # First, list the pieces in the order in which they lie in the files.
    pieces = [
        (name, rows)
        for name in checkpoint.names
        if name in slots
        for rows in checkpoint.pieces(name)
    ]

    # Load each piece into all slots of its tensor, as codes if any slot keeps codes.
    def load(piece: tuple[str, range]) -> None:
        name, span = piece
        if any(slot.load_quantized is not None for slot in slots[name]):
            load_quantized(name, span)
            return
        with checkpoint.rows(name, span) as rows:
            if reading.digest is not None:
                reading.digest.add(name, span.start, rows)
            for slot in slots[name]:
                slot.load(span.start, rows)

    def load_quantized(name: str, span: range) -> None:
        with checkpoint.quantized_rows(name, span) as rows:
            if reading.digest is not None:
                reading.digest.add_quantized(name, span.start, rows)
            for slot in slots[name]:
                if slot.load_quantized is not None:
                    slot.load_quantized(span.start, rows)
                else:
                    slot.load(span.start, rows.numbers())

    def load_all(results: Iterable[None]) -> Iterator[None]:
        """Iterate over the results, which raises the errors of `load`, and report the progress."""
        sizes = [_num_weights(checkpoint, piece) for piece in pieces]
        total, done, reported = sum(sizes), 0, -1
        for size, _ in zip(sizes, results, strict=True):
            done += size
            percent = 100 * done // max(1, total)
            if reading.on_progress is not None and percent > reported:
                reported = percent
                reading.on_progress(done, total)
            yield

    # Then load them all.
    if reading.num_threads == 1:
        yield from load_all(map(load, pieces))
        return
    with ThreadPoolExecutor(reading.num_threads, thread_name_prefix="load") as threads:
        yield from load_all(threads.map(load, pieces))


def _num_weights(checkpoint: CheckpointSource, piece: tuple[str, range]) -> int:
    name, rows = piece
    return len(rows) * prod(checkpoint.shape(name)[1:])


def _ends_differ(checkpoint: CheckpointSource, entry: ModelEntry) -> bool:
    both = {entry.embedding, entry.head} <= checkpoint.names
    return both and not checkpoint.equal(entry.embedding, entry.head)


def _place_on_host(model: TextModel, methods: LinearMethods) -> None:
    """Mark the part of the model that the CPU computes for another device, before methods are
    chosen. Raises UnsupportedModelError if the model's layers can't be on two devices."""
    host = methods.host
    if host is None:
        return
    if not host.has_experts_only:
        model.place_on_host(host.num_layers)
        return
    layers = [each for each in model.modules() if isinstance(each, Experts)]
    for experts in layers[max(0, len(layers) - host.num_layers) :]:
        experts.place_on_host()


def tensor_shapes(whole: TextModel, entry: ModelEntry) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the blueprint `whole`, by their names in the checkpoint."""
    slots = checkpoint_slots(whole, entry.checkpoint_parts)
    return {name: slot.shape for name, (slot,) in slots.items()}


def blueprint(config: ModelConfig, entry: ModelEntry, methods: LinearMethods) -> TextModel:
    """The model on the meta device, to compute sizes. Its embedding and head are not tied."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    model = entry.model(untied, dtype=torch.float32, device=torch.device("meta"), max_model_len=1)
    _place_on_host(model, methods)
    for module in model.modules():
        if isinstance(module, Linear):
            module.method = methods.stored_by(module)
    return model


def _check_match(
    folder: Path,
    checkpoint: CheckpointSource,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises CheckpointError if the weights don't match the model that `config` describes.

    `shapes` are those of all tensors of the untied model. The check runs before any memory of the
    model's size is allocated, because the config may be wrong.
    """
    # A tied model needs one tensor for its embedding and head.
    entry = find_entry(config)
    shapes, spare_names = dict(shapes), set()
    if config.tie_word_embeddings:
        _, spare = _kept_and_spare_end(checkpoint, entry)
        spare_names.add(spare)
        del shapes[spare]
    # Refuse tensors that fill nothing, except derived buffers and biases that are zero.
    unexpected = {
        name
        for name in checkpoint.names - shapes.keys() - spare_names
        if not name.endswith(_DERIVED_SUFFIXES) and not _is_zero_bias(checkpoint, name)
    }
    if config.quantized is None:
        refuse_quantized_names(str(folder), sorted(unexpected))
    # The causes of a missing head are different, so its message is, too.
    missing = shapes.keys() - checkpoint.names
    if missing == {entry.head}:
        raise CheckpointError(
            f"{folder}: the weights lack {entry.head}, the head that predicts tokens, and"
            " config.json does not tie it to the embeddings (tie_word_embeddings); the download is"
            " not whole, or the model was saved without its head and can only embed"
        )
    if missing:
        raise CheckpointError(
            f"{folder}: the weights lack {listed(missing)}; the download is not whole, or "
            "config.json describes another model"
        )
    if unexpected:
        raise CheckpointError(
            f"{folder}: the weights have {listed(unexpected)}, which the model of config.json has "
            "no place for; ignoring them would change its results"
        )
    # Last, compare the shapes.
    wrong = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, shape in shapes.items()
        if checkpoint.shape(name) != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: the weights have other shapes than config.json says: {listed(wrong)}"
        )


def _is_zero_bias(checkpoint: CheckpointSource, name: str) -> bool:
    """Whether the tensor is a bias of zeros. AutoGPTQ adds a bias to every linear."""
    if not name.endswith(".bias") or len(checkpoint.shape(name)) != 1:
        return False
    for span in checkpoint.pieces(name):
        with checkpoint.rows(name, span) as rows:
            if rows.any():
                return False
    return True


def listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _MAX_NAMES_SHOWN
    return ", ".join(map(shown_name, ordered[:_MAX_NAMES_SHOWN])) + (
        f" and {rest} more" if rest > 0 else ""
    )
