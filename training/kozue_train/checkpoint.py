"""Checkpoints: HF folders in bfloat16, resumable states, and pieces small enough to be carried."""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kozue_train.model.config import TargetConfig
from kozue_train.model.qwen3_5 import Target
from kozue_train.packed import load_weights

GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [2, 0], "pad_token_id": 0}
F32_KEPT = ("A_log", "dt_bias")
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def bf16_state(model: nn.Module) -> dict[str, Tensor]:
    """bfloat16 copies of all parameters (A_log and dt_bias too, as Qwen3.5 checkpoints have them)."""
    return {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in model.named_parameters()}


def save_hf(model: Target, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors; tokenizer files are put there by the caller."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    save_file(bf16_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def copy_beside(folder: Path, out: Path) -> None:
    """Copies what a model needs beside its weights, as far as it is there."""
    for name in BESIDE:
        if (folder / name).exists():
            (out / name).write_bytes((folder / name).read_bytes())


def load_hf(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """A Target with the weights of an HF folder or a packed one (float32 parameters; `dtype` of the products)."""
    model = Target(TargetConfig.from_hf(Path(folder) / "config.json"), dtype)
    weights = load_weights(folder)
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder}/model.safetensors: missing {missing[:3]}, unexpected {unexpected[:3]}; is it a checkpoint of this shape?")
    return model.to(device)


def save_resume(path: Path, **what: Any) -> None:
    """Writes a resumable state through a temporary file, so that a killed run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(what, partial)
    partial.rename(path)


def load_resume(path: Path, device: torch.device) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return loaded


def pack(data: bytes) -> bytes:
    """Shrinks bfloat16 data to about 0.67 of its size: high bytes entropy-coded, low bytes as they are."""
    pairs = np.frombuffer(data, dtype=np.uint8).reshape(-1, 2)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    high = coder.compress(pairs[:, 1].tobytes()) + coder.flush()
    return len(high).to_bytes(8, "little") + high + pairs[:, 0].tobytes()


def unpack(data: bytes) -> bytes:
    """Inverse of `pack`."""
    size = int.from_bytes(data[:8], "little")
    high = np.frombuffer(zlib.decompress(data[8 : 8 + size], -15), dtype=np.uint8)
    low = np.frombuffer(data[8 + size :], dtype=np.uint8)
    return np.stack((low, high), 1).tobytes()


def write_parts(path: Path, out: Path, stem: str, part_bytes: int = 16_000_000, raw: int = 20_000_000) -> list[Path]:
    """Splits a file of bfloat16 data into packed parts of at most `part_bytes` each (raw slices of even size)."""
    data = path.read_bytes()
    if len(data) % 2:
        data += b"\0"
    slices = [data[i : i + raw] for i in range(0, len(data), raw)]
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(pack, slices))
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for i, p in enumerate(packed):
        if len(p) > part_bytes:
            raise ValueError(f"part {i} of {path} packs to {len(p)} bytes, more than {part_bytes}; lower raw")
        file = out / f"{stem}.{i:02d}"
        file.write_bytes(p)
        files.append(file)
    (out / f"{stem}.size").write_text(str(path.stat().st_size))
    return files


def join_parts(folder: Path, stem: str, target: Path) -> None:
    """Inverse of `write_parts`."""
    size = int((folder / f"{stem}.size").read_text())
    data = b"".join(unpack(f.read_bytes()) for f in sorted(folder.glob(f"{stem}.[0-9][0-9]")))
    if len(data) < size:
        raise ValueError(f"{folder}/{stem}.*: {len(data)} bytes after unpacking, {size} expected; a part is missing")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data[:size])
