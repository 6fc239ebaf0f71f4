#!/usr/bin/env python3
"""Average two finished models: python soup.py A B SHARE_OF_B OUT --data data/  (writes OUT, prints held-out losses)"""

import argparse
import json
import shutil
from pathlib import Path

import small_model
from safetensors.torch import load_file
from token_data import Docs

ap = argparse.ArgumentParser()
ap.add_argument("a", type=Path)
ap.add_argument("b", type=Path)
ap.add_argument("share", type=float)
ap.add_argument("out", type=Path)
ap.add_argument("--data", type=Path, required=True)
ap.add_argument(
    "--final", type=Path, help="final.json of the run, rewritten with the losses of the average"
)
ap.add_argument("--final-out", type=Path)
args = ap.parse_args()
a, b = (load_file(str(d / "model.safetensors")) for d in (args.a, args.b))
model = small_model.build_model(small_model.BIG, 4096, 0)
mixed = {k: (1 - args.share) * a[k].float() + args.share * b[k].float() for k in a}
model.load_state_dict({k: v.bfloat16().float() for k, v in mixed.items()}, strict=False)
small_model.save_model(model, args.out, 0)
for f in args.a.glob("*token*"):
    shutil.copy(f, args.out)
final = json.loads(args.final.read_text()) if args.final else {}
for name in ("val_code", "val_chat_fn", "val_chat_file", "seen_chat"):
    docs = Docs(args.data, name)
    loss = small_model.evaluate(model, docs, name != "val_code", 512, 8, False)
    final[name] = {
        "loss": round(loss, 4),
        "bits_per_byte": round(small_model.bits_per_byte(loss, docs), 4),
        "tokens": docs.tokens,
        "bytes": docs.bytes,
    }
for n in (2048, 4096):
    final[f"val_code_{n}"] = round(
        small_model.evaluate(model, Docs(args.data, "val_code"), False, n, 2, False), 4
    )
print(
    args.share,
    {
        k: v["loss"] if isinstance(v, dict) else v
        for k, v in final.items()
        if k.startswith(("val", "seen"))
    },
)
if args.final_out:
    args.final_out.write_text(json.dumps(final, indent=2) + "\n")
