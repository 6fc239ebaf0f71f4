"""Random weights, in shards, for a folder that has only a config.json.

    python -m benchmarks.checkpoints.random_weights --model FOLDER [--shard-bytes 1e9]

The tensors are those that quire expects of the config's family, in bfloat16: so any family that is
served can be measured at any size, without transformers and in hardly any memory. Numbers repeat
after 32 million of them, from another one in each tensor.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from quire.formats.dense import DenseMethod
from quire.layers.sharded import LinearMethods
from quire.models.architectures import MODELS
from quire.models.checkpoints.loader import blueprint, tensor_shapes
from quire.models.registry import load_config

NUM_DIFFERENT = 1 << 25
DEVIATION = 0.02
ITEM_BYTES = 2
ALIGNMENT = 8
PRIME_STEP = 104_729
"""Between the first numbers of two tensors."""

Shapes = dict[str, tuple[int, ...]]


def write_weights(folder: Path, shard_bytes: int, seed: int = 0) -> int:
    """Write them beside config.json. Returns their bytes."""
    config = load_config(folder)
    entry = MODELS.get(config.architecture)
    if entry.rename is not None or entry.arrangement is not None:
        raise SystemExit(f"the files of {config.architecture} have other names, or another order")
    shapes = tensor_shapes(blueprint(config, entry, LinearMethods(DenseMethod())), entry)
    if config.tie_word_embeddings:
        del shapes[entry.head]
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(NUM_DIFFERENT, dtype=torch.bfloat16)
    numbers.normal_(0, DEVIATION, generator=generator)
    shards = list(_shards(shapes, shard_bytes))
    weight_map = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, numbers)
        weight_map |= dict.fromkeys(shard, name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return ITEM_BYTES * sum(map(prod, shapes.values()))


def _shards(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> Iterator[Shapes]:
    shard: Shapes = {}
    for name, shape in shapes.items():
        if shard and ITEM_BYTES * sum(map(prod, (*shard.values(), shape))) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _write_shard(path: Path, shapes: Shapes, numbers: torch.Tensor) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + ITEM_BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    raw = memoryview(numbers.view(torch.uint8).numpy())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            first = ITEM_BYTES * (index * PRIME_STEP % len(numbers))
            left = ITEM_BYTES * prod(shape)
            while left:
                left -= file.write(raw[first : first + left])
                first = 0


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--shard-bytes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_bytes = write_weights(arguments.model, int(arguments.shard_bytes), arguments.seed)
    print(f"{arguments.model}: {num_bytes} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
