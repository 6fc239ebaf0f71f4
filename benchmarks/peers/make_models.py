"""Make the two models that the tables of the README and docs/performance.md were measured with.

    python benchmarks/peers/make_models.py --out FOLDER [--only llama-160m]

Random weights in bfloat16, in Hugging Face form, with a byte-level BPE tokenizer that is trained on
the interpreter's standard library and padded with unused tokens to the model's vocabulary. Needs
transformers and tokenizers. `llama-160m` is the shape of a small Llama: 124.7 million parameters,
of which 49.2 million are its embedding and its head.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "llama-160m": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    },
}
MAX_TRAINED_TOKENS = 32_000
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="the models' folder")
    parser.add_argument("--only", choices=SHAPES, help="one of them")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_config(name: str) -> Any:
    """The shape as transformers has it."""
    from transformers import AutoConfig  # seconds, which --help can do without

    shape = dict(SHAPES[name])
    theta = shape.pop("rope_theta")
    return AutoConfig.for_model(
        **shape,
        hidden_act="silu",
        attention_bias=False,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def make_model(name: str, folder: Path, seed: int) -> int:
    """Write weights and config; how many parameters there are."""
    import torch  # with transformers: seconds
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder, safe_serialization=True)
    # Readers of the older form of a config look for these two at its top.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": SHAPES[name]["rope_theta"], "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2))
    return sum(int(each.numel()) for each in model.parameters())


def make_tokenizer(name: str, folder: Path) -> None:
    """Train it, pad its vocabulary, and write it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    vocab_size = SHAPES[name]["vocab_size"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trained.decoder = decoders.ByteLevel()
    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=min(MAX_TRAINED_TOKENS, vocab_size),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train(texts, trainer)
    # Padding goes into the vocabulary itself, not into added tokens: loading stays fast.
    data = json.loads(trained.to_str())
    for token_id in range(trained.get_vocab_size(), vocab_size):
        data["model"]["vocab"][f"<|unused_{token_id}|>"] = token_id
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=SHAPES[name]["max_position_embeddings"],
    ).save_pretrained(folder)


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    for name in [args.only] if args.only else SHAPES:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        num_parameters = make_model(name, folder, args.seed)
        make_tokenizer(name, folder)
        print(f"{folder}: {num_parameters / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
