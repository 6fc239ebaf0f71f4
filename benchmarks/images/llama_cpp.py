"""Compares encoders of images with llama.cpp's on the same random weights, and times both in turns.

    python -m benchmarks.images.llama_cpp SOURCES BUILD [--towers base-224] [--threads 1]

SOURCES is llama.cpp's folder, BUILD the folder of its build with shared libraries. A C++ compiler
joins its libmtmd with a small interface in C. Both sides read one GGUF pair, which the tests'
writer makes, and get the same normalized pixels. The first table has the cosine of all embeddings
of an image; the second has the median milliseconds of each.

llama.cpp puts InternVL's class token after the patches, but adds the learned positions in the order
of the file, where the token's is the first. So it shifts the positions of all patches by one.
"InternVL, rolled" gives llama.cpp a file whose first position is moved to the end.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.models.vision import (
    gemma3_files,
    internvl_files,
    lfm2_vl_files,
    pixtral_files,
    qwen3_vl_files,
)
from tests.models.vision.gguf_pairs import write_mmproj, write_text
from tests.models.vision.idefics3_files import save_smolvlm
from tests.models.vision.towers import load_found
from transformers import PreTrainedModel

from benchmarks.images.encoders import TOWERS, load, milliseconds, save
from quire.images.processors.find import find_processor
from quire.models.registry import load_config
from quire.models.vision.towers import find_tower
from quire.models.vision.vision_tower import finish

SHIM = Path(__file__).with_name("clip_shim.cpp")
MODELS = {
    "SmolVLM": (save_smolvlm, 96, 48),
    "Gemma 3": (gemma3_files.save, 24, 24),
    "LFM2-VL": (lambda folder: lfm2_vl_files.save(folder, 16), 256, 256),
    "InternVL": (internvl_files.save, 24, 24),
    "Mistral 3": (lambda folder: pixtral_files.save("mistral3", folder), 64, 64),
    "Qwen3-VL": (lambda folder: qwen3_vl_files.save("qwen3_vl", folder), 48, 48),
}
"""For each family: the writer of a tiny model, the sides of a picture that is not resized, and of
its first content, in pixels."""


class LlamaEncoder:
    """llama.cpp's encoder of one file."""

    def __init__(self, library: ctypes.CDLL, path: Path, num_threads: int) -> None:
        """Raises RuntimeError for a file that llama.cpp can't read."""
        library.shim_open.restype = ctypes.c_void_p
        library.shim_open.argtypes = [ctypes.c_char_p]
        library.shim_encode.restype = ctypes.c_long
        library.shim_encode.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
        ]
        library.shim_close.argtypes = [ctypes.c_void_p]
        self._library, self._num_threads = library, num_threads
        self._context = library.shim_open(str(path).encode())
        if not self._context:
            raise RuntimeError(f"llama.cpp can't read {path}")

    def __call__(self, pixels: torch.Tensor, num_values: int) -> torch.Tensor:
        """The embeddings of pixels [height, width, 3] fp32, flattened: [num_values]. Raises
        RuntimeError if it returns another number."""
        out = torch.empty(num_values)
        height, width, _ = pixels.shape
        arguments = (self._context, self._num_threads, width, height, pixels.data_ptr())
        found = self._library.shim_encode(*arguments, out.data_ptr(), num_values)
        if found != num_values:
            raise RuntimeError(f"llama.cpp returns {found} numbers instead of {num_values}")
        return out

    def close(self) -> None:
        """Free the encoder."""
        self._library.shim_close(self._context)


def build_shim(sources: Path, build: Path, folder: Path) -> ctypes.CDLL:
    """Compile the interface in C. Raises CalledProcessError."""
    path = folder / "shim.so"
    libraries = build / "bin"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(SHIM), "-o", str(path)),
            *(f"-I{sources / place}" for place in ("tools/mtmd", "include", "ggml/include")),
            *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lmtmd", "-lggml-base"),
        ],
        check=True,
    )
    return ctypes.CDLL(str(path))


@torch.no_grad()
def roll_positions(model: PreTrainedModel) -> None:
    """Move the learned position of the class token after the positions of the patches."""
    table = model.model.vision_tower.embeddings.position_embeddings
    table.copy_(table.roll(-1, dims=1))


def without_last(embeds: torch.Tensor, name: str) -> torch.Tensor:
    """The embeddings, without that of [IMG_END], which llama.cpp reads from the text's table."""
    return embeds[:-1] if name == "Mistral 3" else embeds


@torch.inference_mode()
def cosine(library: ctypes.CDLL, name: str, folder: Path) -> float:
    """The cosine between all embeddings of both sides for one image."""
    write, side, content_side = MODELS[name.partition(",")[0]]
    model: PreTrainedModel = write(folder)
    text, mmproj = write_text(model, folder / "text.gguf"), folder / "mmproj.gguf"
    write_mmproj(model, mmproj)
    processor = find_processor(text, str(mmproj))
    source = find_tower(text, load_config(text), str(mmproj))
    assert processor is not None and source is not None
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    content = processor.process(Image.fromarray(picture)).items[0].content
    values = torch.frombuffer(bytearray(content.values), dtype=torch.float32).view(content.shape)
    own = finish(load_found(source, model).encode(values, content.grid))
    own = without_last(own, name).flatten()
    mean, std = processor._normalize.mean, processor._normalize.std
    pixels = torch.from_numpy(picture[:content_side, :content_side].astype(np.float32)) / 255
    pixels = ((pixels - torch.tensor(mean)) / torch.tensor(std)).contiguous()
    if name.endswith("rolled"):
        roll_positions(model)
        mmproj = write_mmproj(model, folder / "rolled.gguf")
    encoder = LlamaEncoder(library, mmproj, 1)
    theirs = encoder(pixels, own.numel())
    encoder.close()
    return torch.nn.functional.cosine_similarity(own, theirs, dim=0).item()


@torch.inference_mode()
def times(
    library: ctypes.CDLL, name: str, num_threads: int, num_rounds: int, folder: Path
) -> list[float]:
    """Median milliseconds of quire in bfloat16, then of llama.cpp with F16 and with F32."""
    torch.set_num_threads(num_threads)
    size = TOWERS[name]
    model = save(size, folder)
    tower = load(folder, num_threads)
    tile = torch.rand(3, size.image_size, size.image_size) * 2 - 1
    pixels = tile.permute(1, 2, 0).contiguous()
    num_values = finish(tower.encode(tile, (1, 1, 1))).numel()
    calls = [lambda: finish(tower.encode(tile, (1, 1, 1)))]
    for kind in ("F16", "F32"):
        encoder = LlamaEncoder(
            library, write_mmproj(model, folder / f"{kind}.gguf", kind), num_threads
        )
        calls.append(lambda encoder=encoder: encoder(pixels, num_values))
    rounds = [[milliseconds(call) for call in calls] for _ in range(num_rounds)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--towers", default="base-224", help="names to time (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        library = build_shim(options.sources, options.build, Path(name))
    print("| family | cosine |\n|---|---|")
    for family in (*MODELS, "InternVL, rolled"):
        with tempfile.TemporaryDirectory() as name:
            print(f"| {family} | {cosine(library, family, Path(name)):.7f} |", flush=True)
    print("\n| encoder | quire ms | llama.cpp F16 ms | F32 ms | ratio |\n|---|---|---|---|---|")
    for tower in filter(None, options.towers.split(",")):
        with tempfile.TemporaryDirectory() as name:
            found = times(library, tower, options.threads, options.rounds, Path(name))
        cells = [f"{each:.0f}" for each in found] + [f"{min(found[1:]) / found[0]:.2f}"]
        print(f"| {tower} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
