"""Times encoders of images beside transformers', in turns, on the same random weights.

    python -m benchmarks.images.encoders [--towers base-512,so400m-384] [--threads 2] [--rounds 5]
        [--layers 2] [--clock processor]

Both encode one image: quire in bfloat16 by its native kernels, transformers in float32 and bfloat16
by torch. The table has the median milliseconds of each, how many times faster quire is than the
faster one, and quire's products in GFLOP/s. All layers of an encoder cost the same, so the first
few are enough to compare large images. Processor time of one thread is less sensitive to other work
on the machine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from quire.formats.format_registry import load_weight_format
from quire.kernels.cpu.selection import select_kernels
from quire.layers.sharded import LinearMethods
from quire.models.registry import load_config
from quire.models.vision.slices import use_kernels
from quire.models.vision.towers import find_tower
from quire.models.vision.vision_tower import VisionTower, finish


class Size(NamedTuple):
    """The sizes of an encoder and its image."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    image_size: int
    #: Whether it is Pixtral's encoder, whose MLP has a gate; else SigLIP's.
    is_pixtral: bool = False

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_flops(self) -> int:
        """Operations of the linears and the attention for one image."""
        mlp = (3 if self.is_pixtral else 2) * self.hidden_size * self.intermediate_size
        weights = 4 * self.hidden_size**2 + mlp
        pairs = 2 * self.num_patches * self.hidden_size
        return 2 * self.num_layers * self.num_patches * (weights + pairs)


TOWERS = {
    "base-224": Size(768, 3072, 12, 12, 16, 224),
    "base-512": Size(768, 3072, 12, 12, 16, 512),
    "so400m-384": Size(1152, 4304, 27, 16, 14, 378),
    "so400m-896": Size(1152, 4304, 27, 16, 14, 896),
    "pixtral-1540": Size(1024, 4096, 24, 16, 14, 1540, is_pixtral=True),
}
"""base is SmolVLM's encoder (93 million parameters); so400m the tower of Gemma 3 and Idefics 3;
pixtral the tower of Mistral Small 3."""


def save(size: Size, folder: Path) -> PreTrainedModel:
    """Write a random model of this encoder, with a small language model, in bfloat16."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "patch_size": size.patch_size,
        "image_size": size.image_size,
    }
    text = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    side = size.image_size // size.patch_size
    factor = next(factor for factor in (2, 3, 1) if side % factor == 0)
    made: PreTrainedModel
    if size.is_pixtral:
        vision |= {"model_type": "pixtral", "hidden_act": "silu"}
        config = Mistral3Config(vision_config=vision, text_config=text, spatial_merge_size=factor)
        made = Mistral3ForConditionalGeneration(config)
    else:
        small = SmolVLMConfig(
            vision_config=vision, text_config=text, scale_factor=factor, image_token_id=5
        )
        made = SmolVLMForConditionalGeneration(small)
    model = made.eval().to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def load(folder: Path, num_threads: int, kernels_name: str) -> VisionTower:
    """quire's encoder of a saved model."""
    kernels = select_kernels(kernels_name, num_threads, torch.bfloat16, takes_fewer=False)
    method = load_weight_format(None).method(kernels, None)
    source = find_tower(folder, load_config(folder))
    assert source is not None, "the folder has an encoder that quire knows"
    loading = source.load(
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        methods=LinearMethods(method, dense=method),
    )
    tower = finish(loading)
    width = source.config.output_size
    tower.use_embedding(lambda ids: torch.zeros(len(ids), width, dtype=torch.bfloat16))
    use_kernels(tower, kernels)
    return tower


Clock = Callable[[], float]
"""Returns seconds."""
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}


def milliseconds(call: Callable[[], object], clock: Clock) -> float:
    """The time of one call."""
    begin = clock()
    call()
    return 1000 * (clock() - begin)


@torch.inference_mode()
def measure(
    size: Size, dtype: torch.dtype, num_threads: int, num_rounds: int, clock: Clock, kernels: str
) -> list[float]:
    """Median milliseconds of quire and of transformers, which computes in dtype.

    While quire computes, torch has one thread, as in an engine with native kernels: more would wait
    for work actively, and take the processors from the kernels' threads.
    """
    with tempfile.TemporaryDirectory() as name:
        model, tower = save(size, Path(name)).to(dtype), load(Path(name), num_threads, kernels)
    tile = torch.rand(3, size.image_size, size.image_size) * 2 - 1
    given: dict[str, object] = {"pixel_values": tile[None, None].to(dtype)}
    if size.is_pixtral:
        given = {"pixel_values": tile[None].to(dtype), "image_sizes": [[size.image_size] * 2]}
    calls = (
        (1, lambda: finish(tower.encode(tile, (1, 1, 1)))),
        (num_threads, lambda: model.model.get_image_features(**given)),
    )
    rounds: list[list[float]] = []
    for _ in range(1 + num_rounds):
        times: list[float] = []
        for num_torch_threads, call in calls:
            torch.set_num_threads(num_torch_threads)
            times.append(milliseconds(call, clock))
        rounds.append(times)
    del rounds[0]  # the first calls prepare what later ones reuse
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--towers", default=",".join(TOWERS), help="names (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of calls (%(default)s)")
    parser.add_argument("--layers", type=int, help="of each encoder; all without it")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="(%(default)s)")
    parser.add_argument("--kernels", default="auto", help="instruction set of quire (%(default)s)")
    options = parser.parse_args(arguments)
    clock = CLOCKS[options.clock]
    print("| encoder | patches | quire ms | GFLOP/s | transformers fp32 ms | bf16 ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in options.towers.split(","):
        size, own, theirs = TOWERS[name], [], []
        if options.layers is not None:
            size = size._replace(num_layers=options.layers)
        for dtype in (torch.float32, torch.bfloat16):
            given = options.threads, options.rounds, clock, options.kernels
            ours, other = measure(size, dtype, *given)
            own.append(ours)
            theirs.append(other)
        median = statistics.median(own)
        cells = [name, size.num_patches, f"{median:.0f}", f"{size.num_flops / median / 1e6:.0f}"]
        cells += [f"{each:.0f}" for each in theirs] + [f"{min(theirs) / median:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
