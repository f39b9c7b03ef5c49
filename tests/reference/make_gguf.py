#!/usr/bin/env python3
"""Make the GGUF files in gguf/ from the tiny checkpoints, with what they hold and compute.

    python tests/reference/make_gguf.py LLAMA_CPP [FILE ...]

LLAMA_CPP is the folder of scripts/build-llama-cpp: its converter and its
llama-quantize write the files. Needs the packages of make_tiny.py and gguf.

Beside FILE.gguf lies FILE.json:
  types       tensor name -> type
  prompts     for each of two prompts: ids, 64 greedy ids and the smallest gap of the
              two largest logits, from transformers in f32 on the dequantised weights
  llama_cpp   the same from llama.cpp on the file (which quantises activations too)
and FILE.safetensors: the first and the last row of one tensor of each type,
dequantised by the gguf package (`rows.<tensor>`, [2, columns]), and the logits of
each prompt's last position (`<prompt>.last_logits`).
"""

import json
import os
import subprocess
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import make_tiny

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "gguf")
SCRATCH = os.environ.get("KOZUE_SCRATCH", "/tmp")
STEPS = 64

# file: (checkpoint, type the converter writes, llama-quantize arguments or None)
FILES = {
    "qwen3_5-gva-f32": ("qwen3_5-gva", "f32", None),
    "qwen3_5-gva-q8_0": ("qwen3_5-gva", "f32", ["Q8_0"]),
    "qwen3_5-mtp-f16": ("qwen3_5-multimodal", "f16", None),
    "qwen3_5-q4_0": ("qwen3_5", "f32", ["--pure", "Q4_0"]),
    "qwen3-bf16": ("qwen3", "bf16", None),
    "qwen3-q5_0": ("qwen3", "f32", ["--pure", "Q5_0"]),
    "qwen2-f16": ("qwen2", "f16", None),
    "qwen2-q5_1": ("qwen2", "f32", ["--pure", "Q5_1"]),
    "llama-q4_0": ("llama", "f32", ["Q4_0"]),
    "llama-q4_1": ("llama", "f32", ["--pure", "Q4_1"]),
    "llama3-rope-f16": ("llama3-rope", "f16", None),
    "llama-256-q4_k": ("llama-256", "f32", ["Q4_K_M"]),
    "llama-256-q5_k": ("llama-256", "f32", ["--pure", "Q5_K"]),
    "llama-256-q6_k": ("llama-256", "f32", ["--pure", "Q6_K"]),
}


def checkpoint(name):
    scratch = make_tiny.MODELS[name][2].get("scratch")
    return os.path.join(SCRATCH if scratch else os.path.join(HERE, "tiny"), name)


# The converter knows a tokenizer by a hash of what it does; ours are in no list,
# so the name of the split rule is given to it.
CONVERT = """
import runpy, sys
rule, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
import os
sys.path.insert(0, os.path.dirname(script))
sys.path.insert(1, os.path.join(os.path.dirname(script), "gguf-py"))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: rule
runpy.run_path(script, run_name="__main__")
"""


def convert(llama_cpp, source, rule, kind, target):
    script = os.path.join(llama_cpp, "src", "convert_hf_to_gguf.py")
    command = [sys.executable, "-c", CONVERT, rule, script, source, "--outfile", target, "--outtype", kind]
    with open(os.path.join(source, "config.json"), encoding="utf-8") as config:
        if '"model_type": "qwen3_5_text"' in config.read() and "multimodal" not in source:
            command.append("--no-mtp")  # it would look for an MTP block
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"converting {source} failed:\n{done.stdout}{done.stderr}")


def quantize(llama_cpp, source, target, arguments):
    program = os.path.join(llama_cpp, "build", "bin", "llama-quantize")
    done = subprocess.run([program, *arguments[:-1], source, target, arguments[-1], "1"],
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"quantising {source} failed:\n{done.stdout}{done.stderr}")


def ungroup(tensor, dim, keys, per_key, width):
    """Value heads from llama.cpp's order (all first ones of each key head, ...) to grouped by key head."""
    shape = list(tensor.shape)
    split = tensor.reshape(shape[:dim] + [per_key, keys, width] + shape[dim + 1:])
    return split.transpose(dim, dim + 1).reshape(shape)


def to_checkpoint(config, name, tensor):
    """Undo what the converter did to the tensor that a checkpoint calls `name`."""
    if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rows, columns = tensor.shape
        return tensor.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    if not config.model_type.startswith("qwen3_5"):
        return tensor
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor - 1
    if name.endswith("A_log"):
        tensor = torch.log(-tensor)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, each = config.linear_value_head_dim, values // keys
    fixed = 2 * keys * config.linear_key_head_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = torch.cat([tensor[:fixed], ungroup(tensor[fixed:], 0, keys, each, width)])
        return tensor.unsqueeze(1) if "conv1d" in name else tensor
    if name.endswith("in_proj_z.weight"):
        return ungroup(tensor, 0, keys, each, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return ungroup(tensor, 0, keys, each, 1)
    if name.endswith("out_proj.weight"):
        return ungroup(tensor, 1, keys, each, width)
    return tensor


def gguf_name(tensor_map, name):
    if name.endswith(".A_log"):
        return tensor_map.get_name(name)
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    return tensor_map.get_name(name, try_suffixes=(".weight", ".bias"))


def dequantised(tensor):
    import gguf
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape([int(n) for n in reversed(tensor.shape)])


def load_into(model, config, tensors, arch):
    """Put the file's dequantised weights into the transformers model; returns the largest change."""
    import gguf
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    change, used = 0.0, set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = gguf_name(names, name)
            if key is None or key not in tensors:
                sys.exit(f"the file has no tensor for {name} ({key})")
            used.add(key)
            value = to_checkpoint(config, name, dequantised(tensors[key]))
            change = max(change, (value - parameter).abs().max().item())
            parameter.copy_(value)
    unused = sorted(set(tensors) - used)
    return change, unused


def make(llama_cpp, greedy, program, file):
    import gguf
    name, kind, arguments = FILES[file]
    source, rule = checkpoint(name), make_tiny.MODELS[name][1]
    target = os.path.join(OUT, f"{file}.gguf")
    if arguments:
        full = os.path.join(SCRATCH, f"{name}-{kind}.gguf")
        convert(llama_cpp, source, rule, kind, full)
        quantize(llama_cpp, full, target, arguments)
    else:
        convert(llama_cpp, source, rule, kind, target)

    reader = gguf.GGUFReader(target)
    tensors = {t.name: t for t in reader.tensors}
    field = reader.fields["general.architecture"]
    arch_name = bytes(field.parts[field.data[0]]).decode()
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch_name)
    if make_tiny.MODELS[name][2].get("multimodal"):
        from transformers.models.qwen3_5 import Qwen3_5ForCausalLM as Loader
    else:
        Loader = AutoModelForCausalLM
    model = Loader.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    change, unused = load_into(model, model.config, tensors, arch)
    if kind == "f32" and not arguments:  # shows that to_checkpoint undoes the conversion
        assert change < 1e-6, (file, change)

    with open(os.path.join(source, "expected.json"), encoding="utf-8") as recorded:
        prompts = {key: p["prompt"] for key, p in json.load(recorded)["prompts"].items()}
    make_tiny.MIN_GAP, make_tiny.SAVED_STEPS = 0.0, []
    described, saved = {}, {}
    for key, prompt in prompts.items():
        logits, ids, _, gap = make_tiny.prefill_and_decode(model, prompt, STEPS)
        described[key] = {"prompt": prompt, "greedy": ids, "smallest_greedy_gap": round(gap, 6)}
        saved[f"{key}.last_logits"] = logits[-1].clone()
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    shown = {}
    for tensor in reader.tensors:
        shown.setdefault(tensor.tensor_type.name, tensor)
        if len(tensor.shape) > 1 and len(shown[tensor.tensor_type.name].shape) == 1:
            shown[tensor.tensor_type.name] = tensor
    for tensor in shown.values():
        rows = dequantised(tensor)
        if rows.ndim > 1:
            saved[f"rows.{tensor.name}"] = rows[[0, -1]].clone()

    runs = greedy.greedy(program, target, list(prompts.values()), STEPS, "--cache-f32")
    peer = {}
    for key, run in zip(prompts, runs):
        same = [a == b for a, b in zip(run["greedy"], described[key]["greedy"])]
        first = same.index(False) if False in same else None
        peer[key] = {"greedy": run["greedy"], "differs_from_transformers_at": first}
        if first is not None:
            peer[key]["top2_there"] = run["top2"][first]
    value = {"checkpoint": name, "types": types, "unused_by_text_model": unused, "prompts": described, "llama_cpp": peer}
    with open(os.path.join(OUT, f"{file}.json"), "w", encoding="utf-8") as out:
        json.dump(value, out)
        out.write("\n")
    save_file({n: t.contiguous() for n, t in saved.items()}, os.path.join(OUT, f"{file}.safetensors"))
    for suffix in ("gguf", "json", "safetensors"):
        os.chmod(os.path.join(OUT, f"{file}.{suffix}"), 0o644)
    print(f"{file}: {os.path.getsize(target)} bytes, {sorted(set(types.values()))}, largest weight change {change:.2g}, "
          f"gaps {[p['smallest_greedy_gap'] for p in described.values()]}, "
          f"llama.cpp differs at {[p['differs_from_transformers_at'] for p in peer.values()]}", flush=True)


def main(arguments):
    if not arguments:
        sys.exit("usage: make_gguf.py LLAMA_CPP [FILE ...]")
    llama_cpp = os.path.abspath(arguments[0])
    sys.path.insert(0, os.path.join(llama_cpp, "src", "gguf-py"))
    sys.path.insert(1, os.path.join(HERE, "llama_cpp"))
    import make_texts
    program = make_texts.compile_greedy(llama_cpp)
    torch.set_num_threads(1)
    for file in arguments[1:] or FILES:
        if file not in FILES:
            sys.exit(f"no file {file!r}; known: {', '.join(FILES)}")
        make(llama_cpp, make_texts, program, file)


if __name__ == "__main__":
    main(sys.argv[1:])
