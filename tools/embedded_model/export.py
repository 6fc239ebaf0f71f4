#!/usr/bin/env python3
"""Write a checkpoint of train.py as a model: python export.py work/checkpoint.pt OUT [--draft]"""

import sys
from pathlib import Path

import torch
import train

saved = torch.load(sys.argv[1], weights_only=False)
model = train.build_model(train.DRAFT if "--draft" in sys.argv else train.BIG, 4096, 0)
model.load_state_dict(saved["model"])
train.save_model(model, Path(sys.argv[2]), 0)
print(saved["state"])
