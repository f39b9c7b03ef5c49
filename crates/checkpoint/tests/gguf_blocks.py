#!/usr/bin/env python3
"""Write gguf_blocks.txt: random blocks of every quantised type and what the `gguf` Python
package (0.19 or later) makes of them. One line a type: name, blocks in hex, f32 values in hex."""

import pathlib

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

# Bytes of f16 scales in a block; they get moderate values, all other bytes are random.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.F16: [0], Type.BF16: None,
}

random = np.random.default_rng(5)
lines = []
for kind, places in SCALES.items():
    values, size = GGML_QUANT_SIZES[kind]
    count = 512 // values
    if kind == Type.BF16:
        data = (random.normal(size=count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        data = data.view(np.uint8).reshape(count, 2)
    else:
        data = random.integers(0, 256, (count, size), dtype=np.uint8)
        for place in places:
            scale = (random.normal(size=count) * 0.01).astype(np.float16)
            data[:, place : place + 2] = scale.view(np.uint8).reshape(count, 2)
    real = dequantize(data.reshape(-1), kind).astype("<f4").reshape(-1)
    assert real.size == 512 and np.isfinite(real).all()
    lines.append(f"{kind.name} {data.tobytes().hex()} {real.tobytes().hex()}\n")
pathlib.Path(__file__).with_suffix(".txt").write_text("".join(lines))
