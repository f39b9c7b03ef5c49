#!/usr/bin/env python3
"""Write the small GGUF files in seeds/gguf that the gguf target starts from.

    python fuzz/make_gguf_seeds.py

Needs the gguf and numpy packages. One file a family, with few and narrow layers;
every tensor type appears in one of them. The weights are random.
"""

import os

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType
OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seeds", "gguf")
TOKENS = ["<s>", "</s>", "<|im_end|>"] + [chr(c) for c in range(97, 109)] + ["ab"]
RANDOM = np.random.default_rng(1)


def tensor(writer, name, shape, kind):
    if kind in (Q.F32, Q.F16):
        dtype = np.float32 if kind == Q.F32 else np.float16
        values = RANDOM.normal(0, 0.1, shape).astype(dtype)
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
        return
    if kind == Q.BF16:
        upper = RANDOM.normal(0, 0.1, shape).astype(np.float32).view(np.uint16)[:, 1::2]
        writer.add_tensor(name, np.ascontiguousarray(upper).view(np.uint8), raw_dtype=kind)
        return
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = RANDOM.integers(0, 56, (shape[0], shape[1] // block * size)).astype(np.uint8)
    writer.add_tensor(name, raw, raw_dtype=kind)


def model(arch, hidden, inner, heads, kv_heads, head_dim, kinds, recurrent=False):
    writer = gguf.GGUFWriter(os.path.join(OUT, arch), arch)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1 + recurrent)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    kind = iter(kinds * 20)
    tensor(writer, "token_embd.weight", (len(TOKENS), hidden), next(kind))
    tensor(writer, "output_norm.weight", (hidden,), Q.F32)
    if recurrent:
        recurrent_layer(writer, hidden, kind)
    at = f"blk.{int(recurrent)}."
    q = heads * head_dim * (2 if recurrent else 1)
    for name, rows, columns in (("q", q, hidden), ("k", kv_heads * head_dim, hidden),
                                ("v", kv_heads * head_dim, hidden), ("output", hidden, heads * head_dim)):
        tensor(writer, f"{at}attn_{name}.weight", (rows, columns), next(kind))
        if arch == "qwen2" and name != "output":
            tensor(writer, f"{at}attn_{name}.bias", (rows,), Q.F32)
    if arch in ("qwen3", "qwen35"):
        tensor(writer, f"{at}attn_q_norm.weight", (head_dim,), Q.F32)
        tensor(writer, f"{at}attn_k_norm.weight", (head_dim,), Q.F32)
    for layer in range(1 + recurrent):
        at = f"blk.{layer}."
        post = "post_attention_norm" if recurrent else "ffn_norm"
        tensor(writer, f"{at}attn_norm.weight", (hidden,), Q.F32)
        tensor(writer, f"{at}{post}.weight", (hidden,), Q.F32)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensor(writer, f"{at}ffn_{name}.weight", (rows, columns), next(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recurrent_layer(writer, hidden, kind):
    """Gated DeltaNet with 1 key head and 2 value heads of width 32."""
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(32)
    writer.add_ssm_group_count(1)
    writer.add_ssm_time_step_rank(2)
    writer.add_ssm_inner_size(64)
    writer.add_uint32("qwen35.full_attention_interval", 2)
    at = "blk.0."
    tensor(writer, f"{at}attn_qkv.weight", (128, hidden), next(kind))
    tensor(writer, f"{at}attn_gate.weight", (64, hidden), next(kind))
    tensor(writer, f"{at}ssm_alpha.weight", (2, hidden), next(kind))
    tensor(writer, f"{at}ssm_beta.weight", (2, hidden), next(kind))
    tensor(writer, f"{at}ssm_conv1d.weight", (128, 4), Q.F32)
    tensor(writer, f"{at}ssm_a", (2,), Q.F32)
    tensor(writer, f"{at}ssm_dt.bias", (2,), Q.F32)
    tensor(writer, f"{at}ssm_norm.weight", (32,), Q.F32)
    tensor(writer, f"{at}ssm_out.weight", (hidden, 64), next(kind))


os.makedirs(OUT, exist_ok=True)
model("llama", 32, 32, 1, 1, 32, [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
model("qwen2", 256, 32, 1, 1, 32, [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.F16, Q.Q4_K, Q.Q6_K, Q.F16])
model("qwen3", 32, 32, 2, 1, 16, [Q.F16, Q.F32, Q.BF16])
model("qwen35", 32, 32, 1, 1, 32, [Q.Q8_0, Q.F16, Q.Q4_0], recurrent=True)
