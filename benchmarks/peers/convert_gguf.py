"""Run llama.cpp's own converter on a model of `make_models.py`, whose tokenizer it can't know.

    python benchmarks/peers/convert_gguf.py --llama-cpp SOURCE --model FOLDER --out FILE.gguf

It knows a BPE tokenizer by a hash of what it makes of a text; ours is taken to be split as GPT-2's.
"""

import argparse
import runpy
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama-cpp", required=True, type=Path, help="its source folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--outtype", default="bf16", choices=("bf16", "f16", "f32"))
    args = parser.parse_args(argv)
    script = args.llama_cpp / "convert_hf_to_gguf.py"
    if not script.is_file():
        parser.error(f"--llama-cpp is {args.llama_cpp}, but there is no {script.name} in it")
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    from conversion import base  # llama.cpp's

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = [script.name, args.model, "--outfile", args.out, "--outtype", args.outtype]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
