"""Stage `unpack`: a packed folder -> a transformers folder in bfloat16, to train on from it or to give it another size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kozue_train.checkpoint import copy_beside
from kozue_train.packed import load_weights


def run(folder: Path, out: Path) -> None:
    """Writes the folder; raises ValueError where there is nothing to unpack. The rounding that packing did stays."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file}: not there; give a folder that `kozue quantize` made")
    config = json.loads(file.read_text())
    if config.pop("kozue", None) is None:
        raise ValueError(f"{folder}: is not packed; use it as it is")
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in load_weights(folder).items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    copy_beside(folder, out)
