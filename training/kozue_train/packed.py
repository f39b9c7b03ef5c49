"""Reads Kozue's packed checkpoints (docs/checkpoint.md) as ordinary tensors, so that what is shipped can be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

TILE = 64


def unpack(data: np.ndarray, form: dict[str, Any]) -> np.ndarray:
    """Bytes of a packed matrix -> float32 [outputs, inputs] in the space that its codes stand for."""
    n, k = form["shape"]
    bits, group, zero = form["bits"], form["group"], form["zero"]
    rows, groups = -(-n // TILE), -(-k // group)
    extra = {"symmetric": 0, "point": TILE, "min": 2 * TILE}[zero]
    tiles = data.reshape(rows, groups, 2 * TILE + extra + TILE * group * bits // 8)
    scale = np.ascontiguousarray(tiles[..., : 2 * TILE]).view("<f2").astype(np.float32)
    between = np.ascontiguousarray(tiles[..., 2 * TILE : 2 * TILE + extra])
    lines = tiles[..., 2 * TILE + extra :].reshape(rows, groups, 4, -1, 16, 4)  # block of outputs, line, output, input in the quad
    if bits == 4:
        lines = np.stack((lines & 15, lines >> 4), 4).reshape(rows, groups, 4, -1, 16, 4)
    codes = lines.transpose(0, 2, 4, 1, 3, 5).reshape(rows, TILE, groups, group).transpose(0, 2, 1, 3).astype(np.float32)
    if zero == "symmetric":
        w = (codes - 2 ** (bits - 1)) * scale[..., None]
    elif zero == "point":
        w = (codes - between.astype(np.float32)[..., None]) * scale[..., None]
    else:
        w = codes * scale[..., None] + between.view("<f2").astype(np.float32)[..., None]
    out: np.ndarray = w.transpose(0, 2, 1, 3).reshape(rows * TILE, groups * group)[:n, :k]
    return out


def rotate_back(w: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """s * (H w') over blocks of 32 inputs."""
    i = np.arange(32)
    odd = np.array([x.bit_count() & 1 for x in range(32)])
    h = np.where(odd[i[:, None] & i[None]], -1.0, 1.0).astype(np.float32) / np.float32(32**0.5)
    out: np.ndarray = (w.reshape(w.shape[0], -1, 32) @ h).reshape(w.shape) * signs.astype(np.float32)
    return out


def load_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, packed ones unpacked to float32; FileNotFoundError where there is none."""
    file = Path(folder) / "model.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{file}: not there; give a folder with a checkpoint")
    out: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as f:
        about = f.metadata() or {}
        for name in list(f.keys()):
            if name.startswith("hadamard.") and about.get("format") == "kozue":
                continue
            t = f.get_tensor(name)
            if name in about:
                form = json.loads(about[name])
                w = unpack(t.numpy(), form)
                if form.get("signs"):
                    w = rotate_back(w, f.get_tensor(form["signs"]).numpy())
                t = torch.from_numpy(np.ascontiguousarray(w))
            out[name] = t
    return out
