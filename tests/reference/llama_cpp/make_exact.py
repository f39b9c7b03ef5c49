#!/usr/bin/env python3
"""Greedy texts of the real GGUF files with exact weights: NAME.exact.json.

    python tests/reference/llama_cpp/make_exact.py MODELS_DIR [NAME ...]

The file's weights are dequantised to f32 and run by transformers in f32, so that
nothing is rounded but the weights: where an engine and llama.cpp choose different
tokens, this shows which of them the weights want, and by how much. The prompts
are those of NAME.json; `top2` is [id, logit, id, logit] for each step. Needs
torch, transformers, gguf; the 1.5B takes 10 GB of memory.
"""

import json
import os
import sys

import torch
from gguf import GGUFReader, MODEL_ARCH, dequantize, get_tensor_name_map
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from make_texts import FILES, HERE


def model_of(path):
    reader = GGUFReader(path)

    def value(key, default=None):
        return reader.fields[key].contents() if key in reader.fields else default

    arch = value("general.architecture")
    tensors = {t.name: t for t in reader.tensors}
    kind, known = {"llama": (LlamaConfig, MODEL_ARCH.LLAMA), "qwen2": (Qwen2Config, MODEL_ARCH.QWEN2)}[arch]
    config = kind(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=value(f"{arch}.embedding_length"),
        intermediate_size=value(f"{arch}.feed_forward_length"),
        num_hidden_layers=value(f"{arch}.block_count"),
        num_attention_heads=value(f"{arch}.attention.head_count"),
        num_key_value_heads=value(f"{arch}.attention.head_count_kv"),
        rms_norm_eps=value(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value(f"{arch}.rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in tensors,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    names = get_tensor_name_map(known, config.num_hidden_layers)
    state = {}
    for name, _ in list(model.named_parameters()):
        tensor = tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        weight = weight.reshape([int(n) for n in reversed(tensor.shape)]).float()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp keeps the two halves of a rotated head interleaved.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, columns = weight.shape
            weight = weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        state[name] = weight.contiguous()
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def greedy(model, prompt, steps):
    ids, top2, cache, fed = [], [], None, prompt
    with torch.no_grad():
        for _ in range(steps):
            out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            values, indices = out.logits[0, -1].topk(2)
            ids.append(indices[0].item())
            top2.append([ids[-1], round(values[0].item(), 5), indices[1].item(), round(values[1].item(), 5)])
            fed = [ids[-1]]
    return ids, top2


def main(models, names):
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    for name in names:
        with open(os.path.join(HERE, f"{name}.json"), encoding="utf-8") as file:
            recorded = json.load(file)
        model = model_of(os.path.join(models, FILES[name]))
        runs = []
        for run in recorded["runs"]:
            ids, top2 = greedy(model, run["prompt"], recorded["steps"])
            runs.append({"name": run["name"], "greedy": ids, "top2": top2})
            for peer, other in (("llama.cpp", run["greedy"]), ("plain", run["plain"]["greedy"])):
                same = [a == b for a, b in zip(ids, other)]
                at = same.index(False) if False in same else None
                gap = "" if at is None else f" (gap {top2[at][1] - top2[at][3]:.3f} here)"
                print(f"{name} {run['name']}: {peer} differs at {at}{gap}", flush=True)
        with open(os.path.join(HERE, f"{name}.exact.json"), "w", encoding="utf-8") as out:
            out.write('{"file": %s, "runs": [\n' % json.dumps(FILES[name]))
            out.write(",\n".join(json.dumps(r) for r in runs))
            out.write("\n]}\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(FILES):
        sys.exit(__doc__.split("\n\n")[1].strip())
    main(sys.argv[1], sys.argv[2:] or FILES)
