#!/usr/bin/env python3
"""Write a checkpoint of train.py as a model: python export.py work/checkpoint.pt OUT [--draft]"""

import sys
from pathlib import Path

import small_model
import torch

saved = torch.load(sys.argv[1], weights_only=False)
model = small_model.build_model(
    small_model.DRAFT if "--draft" in sys.argv else small_model.BIG, 4096, 0
)
model.load_state_dict(saved["model"])
small_model.save_model(model, Path(sys.argv[2]), 0)
print(saved["state"])
