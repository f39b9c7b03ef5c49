"""Kozue's packed format read from its description: codes put by hand, and signs and rotation undone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kozue_train import quantise
from kozue_train.packed import load_weights, unpack
from safetensors.torch import save_file


@pytest.mark.parametrize(("bits", "zero", "group"), [(8, "symmetric", 64), (4, "point", 64), (4, "min", 32)])
def test_each_code_is_found_where_it_was_put(bits: int, zero: str, group: int) -> None:
    rng = np.random.default_rng(0)
    n, k = 70, 2 * group
    codes = rng.integers(0, 2**bits, (128, k))
    scale = rng.uniform(0.1, 1, (128, 2)).astype(np.float16)
    other = rng.integers(0, 16, (128, 2)).astype(np.uint8) if zero == "point" else rng.uniform(-1, 0, (128, 2)).astype(np.float16)
    data = bytearray()
    for tile in range(2):
        for g in range(2):
            rows = slice(64 * tile, 64 * tile + 64)
            data += scale[rows, g].tobytes() + (b"" if zero == "symmetric" else other[rows, g].tobytes())
            for block in range(4):
                for line in range(group // 4 // (8 // bits)):
                    for output in range(16):
                        row = codes[64 * tile + 16 * block + output, group * g : group * (g + 1)]
                        if bits == 8:
                            data += bytes(row[4 * line : 4 * line + 4].astype(np.uint8))
                        else:
                            data += bytes((row[8 * line + i] | row[8 * line + 4 + i] << 4) for i in range(4))
    got = unpack(np.frombuffer(bytes(data), dtype=np.uint8), {"shape": [n, k], "bits": bits, "group": group, "zero": zero})
    for r, c in ((0, 0), (3, 5), (17, group + 1), (69, k - 1), (64, group - 1)):
        s, code = float(scale[r, c // group]), int(codes[r, c])
        want = {"symmetric": s * (code - 128), "point": s * (code - float(other[r, c // group])), "min": s * code + float(other[r, c // group])}[zero]
        assert got[r, c] == pytest.approx(want, rel=1e-5, abs=1e-6), (r, c)
    assert got.shape == (n, k)


def packed_folder(folder: Path) -> torch.Tensor:
    """A packed folder of one rotated 8-bit matrix `a.weight` and a vector `b`; returns the matrix before packing."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rotated = quantise.rotate(w)
    scale, _ = quantise.fit(rotated.unflatten(-1, (-1, 64)), 8)
    codes = ((rotated / scale[:, 0]).round() + 128).clamp(0, 255).to(torch.uint8).numpy()
    data = scale[:, 0, 0].half().numpy().tobytes() + codes.reshape(4, 16, 16, 4).transpose(0, 2, 1, 3).tobytes()
    form = json.dumps({"shape": [64, 64], "bits": 8, "group": 64, "zero": "symmetric", "signs": "hadamard.64"})
    save_file(
        {"a.weight": torch.frombuffer(bytearray(data), dtype=torch.uint8), "b": torch.ones(3), "hadamard.64": quantise.signs(64).to(torch.int8)},
        folder / "model.safetensors", metadata={"format": "kozue", "a.weight": form},
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "kozue": {"size": "L"}}))
    (folder / "tokenizer.json").write_text("{}")
    return w


def test_rotation_is_undone(tmp_path: Path) -> None:
    w = packed_folder(tmp_path)
    got = load_weights(tmp_path)
    assert set(got) == {"a.weight", "b"}
    assert (got["a.weight"] - w).norm() / w.norm() < 0.008
    with pytest.raises(FileNotFoundError, match="give a folder"):
        load_weights(tmp_path / "none")
