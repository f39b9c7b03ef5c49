"""Stage `import-gguf`: a GGUF of the llama or qwen2 family -> a transformers folder, so that drafters can be trained for it.

Weights are dequantised to bfloat16: the drafter then sees what the engine computes from the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; ValueError for what has no place there."""
    stem, _, last = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{last}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{last}"
    raise ValueError(f"tensor {name}: not one of a llama or qwen2 model")


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the order that GGUF gives to the rows of llama's q and k (pairs beside each other -> halves)."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def config_of(field: Any, arch: str, vocab: int, tied: bool) -> dict[str, Any]:
    """config.json from the metadata."""
    heads = int(field(f"{arch}.attention.head_count"))
    width = int(field(f"{arch}.embedding_length"))
    return {
        "architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_size": width, "intermediate_size": int(field(f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(field(f"{arch}.block_count")), "num_attention_heads": heads, "num_key_value_heads": int(field(f"{arch}.attention.head_count_kv")),
        "head_dim": width // heads, "vocab_size": vocab, "rms_norm_eps": float(field(f"{arch}.attention.layer_norm_rms_epsilon")), "hidden_act": "silu",
        "max_position_embeddings": int(field(f"{arch}.context_length")), "rope_theta": float(field(f"{arch}.rope.freq_base")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field(f"{arch}.rope.freq_base"))},
        "tie_word_embeddings": tied, "bos_token_id": int(field("tokenizer.ggml.bos_token_id")), "eos_token_id": int(field("tokenizer.ggml.eos_token_id")), "dtype": "bfloat16",
    }


def save_tokenizer(file: Path, out: Path, pre: str) -> None:
    """tokenizer.json and the chat template, as transformers reads them from the GGUF."""
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    if pre == "smollm":  # transformers does not read the split rule: SmolLM takes digits one by one
        tok = Tokenizer.from_file(str(out / "tokenizer.json"))
        tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tok.save(str(out / "tokenizer.json"))


def run(file: Path, out: Path, tokenizer: bool = True) -> None:
    """Writes the folder; raises ValueError where the file is of another kind."""
    from gguf import GGUFReader, dequantize

    if not file.exists():
        raise FileNotFoundError(f"{file}: not there; give a .gguf file")
    reader = GGUFReader(str(file))

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ValueError(f"{file}: has no {name}; is it a language model?")
        return found.contents()

    arch = str(field("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ValueError(f"{file}: architecture {arch}; only {', '.join(ARCHITECTURES)} can be imported")
    out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape)))
        if arch == "llama" and t.name.endswith(("attn_q.weight", "attn_k.weight")):
            w = unpermute(w, int(field(f"llama.attention.head_count{'_kv' if t.name.endswith('attn_k.weight') else ''}")))
        state[hf_name(t.name)] = torch.from_numpy(np.array(w, dtype=np.float32)).to(torch.bfloat16)
    config = config_of(field, arch, state["model.embed_tokens.weight"].shape[0], "lm_head.weight" not in state)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        save_tokenizer(file, out, str(field("tokenizer.ggml.pre")))
