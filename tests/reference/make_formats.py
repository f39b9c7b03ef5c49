#!/usr/bin/env python3
"""Make formats/: a tiny model (tiny/qwen2) as other programs quantise it, and what its weights compute.

    python tests/reference/make_formats.py

The directories are written by what each format documents, not by those programs; codes come from
plain rounding. expected.json holds, for each set of dequantised weights, which directories have
them, and for two prompts of tiny/qwen2 64 greedy ids from transformers in f64 with the gap between
the two largest logits, relative to the root mean square of all logits of that step. Needs the
packages of make_tiny.py.
"""

import json
import os
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "tiny", "qwen2")
OUT = os.path.join(HERE, "formats")
STEPS = 64
GROUP = 32


def is_linear(name):
    return name.endswith("_proj.weight")


def few_digits(scale):
    """Six bits of precision: exact in f16 and bf16, and so is 15 times it in f16."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 64).round() / 64, exponent)


def groups(weight, group):
    return weight.reshape(weight.shape[0], -1, group)


def int4(weight):
    """Codes and zero points from 1 to 15, with a scale for each 32 inputs."""
    parts = groups(weight, GROUP)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = few_digits((high - low) / 15)
    zero = (-low / scale).round().clamp(1, 15)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    weights = (codes - zero[..., None]) * scale[..., None]
    return codes.reshape(weight.shape).long(), zero.long(), scale, weights.reshape(weight.shape)


def int8(weight):
    """Codes from -127 to 127 with a scale for each output."""
    scale = few_digits(weight.abs().amax(-1, keepdim=True) / 127)
    codes = (weight / scale).round().clamp(-127, 127)
    return codes, scale, codes * scale


def words(codes, bits=4, order=range(8)):
    """Neighbours of a row in words of 32 bits, the first in the low bits."""
    count = 32 // bits
    parts = codes.reshape(codes.shape[0], -1, count)
    word = sum(parts[..., number] << (bits * place) for place, number in zip(range(count), order))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).contiguous()


def pairs(codes):
    """Neighbours of a row in bytes, the first in the low half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).contiguous()


def half(values):
    stored = values.to(torch.float16)
    assert torch.equal(stored.double(), values), "exact in f16"
    return stored.contiguous()


def write(name, config, tensors, metadata=None):
    folder = os.path.join(OUT, name)
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
        file.write("\n")
    save_file({key: value.contiguous() for key, value in tensors.items()}, os.path.join(folder, "model.safetensors"), metadata or {"format": "pt"})


def rest(weights):
    return {name: value.to(torch.bfloat16) for name, value in weights.items() if not is_linear(name)}


def with_settings(config, **settings):
    return {**config, **settings}


def make_int4(config, weights, made):
    """The same codes in five formats."""
    gptq, awq, packed, mlx = rest(weights), rest(weights), rest(weights), rest(weights)
    for name, (codes, zero, scale, _) in made.items():
        stem = name.removesuffix(".weight")
        n, k = codes.shape
        gptq[f"{stem}.qweight"] = words(codes.T.reshape(k // 8, 8, n).transpose(1, 2).reshape(-1, 8)).reshape(k // 8, n)
        gptq[f"{stem}.qzeros"] = words(zero.T - 1)
        gptq[f"{stem}.scales"] = half(scale.T)
        gptq[f"{stem}.g_idx"] = (torch.arange(k) // GROUP).to(torch.int32)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        awq[f"{stem}.qweight"] = words(codes.T, order=order)
        awq[f"{stem}.qzeros"] = words(zero.T, order=order)
        awq[f"{stem}.scales"] = half(scale.T)
        packed[f"{stem}.weight_packed"] = words(codes)
        packed[f"{stem}.weight_zero_point"] = words(zero.T).T
        packed[f"{stem}.weight_scale"] = half(scale)
        packed[f"{stem}.weight_shape"] = torch.tensor([n, k])
        mlx[f"{stem}.weight"] = words(codes).view(torch.uint32)
        mlx[f"{stem}.scales"] = half(scale)
        mlx[f"{stem}.biases"] = half(-scale * zero)
    settings = {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    write("gptq", with_settings(config, quantization_config={"quant_method": "gptq", **settings}), gptq)
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    write("awq", with_settings(config, quantization_config=settings), awq)
    scheme = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
    write("compressed-tensors-int4", with_settings(config, quantization_config=settings), packed)
    write("mlx", with_settings(config, quantization={"bits": 4, "group_size": GROUP}), mlx)
    lalamo("lalamo-0.15", config, weights, made, later=False)


def make_int8(config, weights, made):
    tensors = rest(weights)
    for name, (codes, scale, _) in made.items():
        tensors[name] = codes.to(torch.int8)
        tensors[f"{name}_scale"] = half(scale)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
    write("compressed-tensors-int8", with_settings(config, quantization_config=settings), tensors)


def make_float8(config, weights):
    """Blocks of 32 x 32 with scales that are powers of two, so that bf16 holds the products."""
    tensors, dequantised = rest(weights), {}
    for name, weight in weights.items():
        if is_linear(name):
            n, k = weight.shape
            blocks = weight.reshape(n // 32, 32, k // 32, 32)
            scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)))
            codes = (blocks / scale[:, None, :, None]).to(torch.float32).to(torch.float8_e4m3fn)
            dequantised[name] = (codes.double() * scale[:, None, :, None]).reshape(n, k)
            tensors[name] = codes.reshape(n, k)
            tensors[f"{name}_scale_inv"] = scale.float()
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    write("fp8", with_settings(config, quantization_config=settings), tensors)
    return dequantised


def hadamard():
    index = torch.arange(32)
    ones = torch.zeros(32, 32, dtype=torch.long)
    for bit in range(5):
        ones += (index[:, None] >> bit & 1) * (index[None, :] >> bit & 1)
    return (1.0 - 2.0 * (ones % 2)).double() / 32**0.5


def signs(k):
    return torch.where(torch.arange(k) * torch.arange(k) % 7 < 4, 1, -1)


def rotated(weight):
    """H (s * w) for each row, in blocks of 32."""
    return (groups(weight * signs(weight.shape[1]), 32) @ hadamard()).reshape(weight.shape)


def restored(weight):
    return (groups(weight, 32) @ hadamard()).reshape(weight.shape) * signs(weight.shape[1])


def lalamo(name, config, weights, made, later):
    """lalamo's joined matrices; codes of rotated inputs where `later`."""
    tensors, metadata = {}, {}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = hidden // heads

    def matrix(path, sources, layout):
        k = weights[sources[0]].shape[1]
        if sources[0] not in made:
            tensors[f"{path}.weights"] = torch.cat([weights[source] for source in sources]).to(torch.bfloat16)
            metadata[f"{path}.spec"] = json.dumps({"type": "FullPrecisionSpec", "layout": layout})
            return
        codes, zero, scale = (torch.cat([made[source][part] for source in sources]) for part in range(3))
        inner = path
        spec = {"type": "IntSpec", "bits": 4, "group_size": GROUP, "is_symmetric": False, "layout": layout}
        if later:
            embedding = layout == "input_output"
            side = "output" if embedding else "input"
            tensors[f"{path}.incoherence_signs.{side}_signs"] = signs(k).to(torch.int32)
            spec = {"type": "HybridSpec", "quantization_spec": spec, "adapter_spec": None,
                    "incoherence_block_size": 32, "incoherence_processing_mode": side}
            inner = f"{path}.quantized"
            if not embedding:
                # By group, outputs padded to a multiple of four.
                pad = -codes.shape[0] % 4
                scale = torch.nn.functional.pad(scale.T, (0, pad))
                zero = torch.nn.functional.pad(zero.T, (0, pad))
        tensors[f"{inner}.weights"] = pairs(codes)
        tensors[f"{inner}.scales"] = scale.to(torch.bfloat16)
        tensors[f"{inner}.zero_points"] = pairs(zero)
        metadata[f"{path}.spec"] = json.dumps(spec)

    def linear(path, prefix, parts):
        matrix(f"{path}.weights", [f"{prefix}.{part}.weight" for part in parts], "output_input")
        biases = [weights.get(f"{prefix}.{part}.bias") for part in parts]
        if biases[0] is not None:
            tensors[f"{path}.biases"] = torch.cat(biases).to(torch.bfloat16)

    def norm(path, source):
        tensors[f"{path}.scales"] = weights[f"{source}.weight"].float()

    norm_config = {"epsilon": config["rms_norm_eps"], "scale_offset": None, "upcast_mode": "only_normalization",
                   "subtract_mean": False, "has_scale": True, "has_biases": False}
    rope = {"type": "UnscaledRoPEConfig", "base": config["rope_parameters"]["rope_theta"],
            "max_sequence_length": config["max_position_embeddings"], "head_dim": dim}
    mixer = {"type": "AttentionConfig", "out_projection_config": {}, "query_norm_config": None, "key_norm_config": None,
             "num_heads": heads, "num_groups": config["num_key_value_heads"], "head_dim": dim, "is_causal": True,
             "scale": None, "sliding_window_size": None, "logit_soft_cap": None, "has_sinks": False, "has_out_biases": False}
    if later:
        mixer |= {"qkvg_projection_config": {}, "has_qkvg_biases": True, "has_gate": False}
    else:
        mixer |= {"qkv_projection_config": {}, "has_qkv_biases": True, "gate_projection_config": None}
    layers = []
    matrix("decoder.embedding.embedding", ["model.embed_tokens.weight"], "input_output")
    for layer in range(config["num_hidden_layers"]):
        path, source = f"decoder.transformer.layers.{layer}", f"model.layers.{layer}"
        norm(f"{path}.pre_mixer_norm", f"{source}.input_layernorm")
        norm(f"{path}.pre_mlp_norm", f"{source}.post_attention_layernorm")
        joined = "qkvg_projection" if later else "qkv_projection"
        linear(f"{path}.mixer.{joined}", f"{source}.self_attn", ["q_proj", "k_proj", "v_proj"])
        linear(f"{path}.mixer.out_projection", f"{source}.self_attn", ["o_proj"])
        linear(f"{path}.mlp.up_projection", f"{source}.mlp", ["up_proj", "gate_proj"])
        linear(f"{path}.mlp.down_projection", f"{source}.mlp", ["down_proj"])
        mlp = {"type": "DenseMLPConfig", "linear_config": {}, "activation": {"type": "SiLU", "alpha": 1.0},
               "has_up_biases": False, "has_down_biases": False, "gate_clipping": None, "up_clipping": None}
        layers.append({"pre_mixer_norm_config": norm_config, "mixer_config": mixer, "post_mixer_norm_config": None,
                       "pre_mlp_norm_config": norm_config, "mlp_config": mlp, "post_mlp_norm_config": None, "rope_config": rope})
    norm("decoder.transformer.output_norm", "model.norm")
    codec = {"type": "ChatCodecConfig", "prompt_template": "{{ messages }}", "output_parser_regex": None,
             "system_role_name": "system", "user_role_name": "user", "assistant_role_name": "assistant",
             "eos_token": None, "bos_token": None}
    decoder = {"embedding_config": {"type": "TiedEmbeddingConfig", "input_scale": None, "logit_soft_cap": None, "logit_scale": None},
               "transformer_config": {"layer_configs": layers, "output_norm_config": norm_config,
                                      "model_dim": hidden, "hidden_dim": config["intermediate_size"]},
               "vocab_size": config["vocab_size"]}
    write(name, {"type": "LanguageModelConfig", "token_codec_config": codec, "decoder_config": decoder,
                 "generation_config": {"stop_token_ids": []}}, tensors, metadata)


def computed(directories, weights, dequantised):
    model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float64).eval()
    stored = {name: value.to(torch.bfloat16).double() for name, value in weights.items()}
    model.load_state_dict({**stored, **dequantised}, strict=False)
    with open(os.path.join(SOURCE, "expected.json"), encoding="utf-8") as file:
        prompts = {key: run["prompt"] for key, run in json.load(file)["prompts"].items()}
    runs = {}
    for key, prompt in prompts.items():
        ids, chosen, gaps = list(prompt), [], []
        with torch.no_grad():
            for _ in range(STEPS):
                logits = model(torch.tensor([ids])).logits[0, -1]
                top = logits.topk(2)
                gaps.append(round(float((top.values[0] - top.values[1]) / logits.square().mean().sqrt()), 5))
                chosen.append(int(top.indices[0]))
                ids.append(chosen[-1])
        runs[key] = {"prompt": prompt, "greedy": chosen, "gaps": gaps}
    return {"directories": directories, "prompts": runs}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    with open(os.path.join(SOURCE, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config.setdefault("rope_parameters", {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default"})
    weights = {name: value.to(torch.bfloat16).double() for name, value in load_file(os.path.join(SOURCE, "model.safetensors")).items()}
    linear = {name: value for name, value in weights.items() if is_linear(name)}
    expected = {}
    made = {name: int4(value) for name, value in linear.items()}
    make_int4(config, weights, made)
    same = ["gptq", "awq", "compressed-tensors-int4", "lalamo-0.15", "mlx"]
    expected["int4"] = computed(same, weights, {name: parts[3] for name, parts in made.items()})
    made = {name: int8(value) for name, value in linear.items()}
    make_int8(config, weights, made)
    expected["int8"] = computed(["compressed-tensors-int8"], weights, {name: parts[2] for name, parts in made.items()})
    expected["fp8"] = computed(["fp8"], weights, make_float8(config, weights))
    turned = {**linear, "model.embed_tokens.weight": weights["model.embed_tokens.weight"]}
    made = {name: int4(rotated(value)) for name, value in turned.items()}
    lalamo("lalamo-0.17", config, weights, made, later=True)
    dequantised = {name: restored(parts[3]) for name, parts in made.items()}
    expected["rotated"] = computed(["lalamo-0.17"], weights, {**dequantised, "lm_head.weight": dequantised["model.embed_tokens.weight"]})
    with open(os.path.join(OUT, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file)
        file.write("\n")


if __name__ == "__main__":
    main()
