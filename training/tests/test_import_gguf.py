"""A GGUF becomes a transformers folder with the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kozue_train.stages import import_gguf

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


def permute(w: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama's q and k in a GGUF, as llama.cpp's converter writes it."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write(path: Path, model: torch.nn.Module, arch: str = "llama") -> None:
    """The model as a float32 GGUF without a tokenizer."""
    c = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_context_length(128)
    writer.add_rope_freq_base(5000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    back = {v: k for k, v in {**import_gguf.LAYER, **import_gguf.TOP}.items()}
    for name, p in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        w = p.numpy()
        stem, last = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            layer, rest = stem.removeprefix("model.layers.").split(".", 1)
            heads = {"self_attn.q_proj": c.num_attention_heads, "self_attn.k_proj": c.num_key_value_heads}.get(rest)
            writer.add_tensor(f"blk.{layer}.{back[rest]}.{last}", np.ascontiguousarray(permute(w, heads) if heads else w))
        else:
            writer.add_tensor(f"{back[stem]}.{last}", w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_llama_keeps_its_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=5000.0, tie_word_embeddings=True, max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config)
    # Values that bfloat16 holds, so that the import loses nothing.
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    write(tmp_path / "m.gguf", model)
    import_gguf.run(tmp_path / "m.gguf", tmp_path / "hf", tokenizer=False)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (back(ids).logits - model(ids).logits).abs().max() < 1e-5
    assert back.config.tie_word_embeddings and back.config.num_key_value_heads == 2


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    write(tmp_path / "m.gguf", transformers.LlamaForCausalLM(config), arch="gemma2")
    with pytest.raises(ValueError, match="architecture gemma2; only llama, qwen2"):
        import_gguf.run(tmp_path / "m.gguf", tmp_path / "hf", tokenizer=False)
    with pytest.raises(ValueError, match="tensor blk.0.ssm_a: not one"):
        import_gguf.hf_name("blk.0.ssm_a")
    with pytest.raises(FileNotFoundError, match="give a .gguf file"):
        import_gguf.run(tmp_path / "none.gguf", tmp_path / "hf")
