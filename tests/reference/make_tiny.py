#!/usr/bin/env python3
"""Make the tiny random checkpoints in tiny/ and what transformers computes on them.

    python tests/reference/make_tiny.py [NAME ...]
    python tests/reference/make_tiny.py --values [NAME ...]   only expected.safetensors again

Needs torch, transformers==5.24.0, safetensors, tokenizers (CPU is enough).
Beside each checkpoint it writes expected.json (token ids, see `reference`) and
expected.safetensors (f32 logits and hidden states). The seed of each model is
the first one whose 300 greedy tokens are varied, hold no stop token and have no
near-tie, so that comparing token for token is a fair test.
"""

import contextlib
import json
import os
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

import tokenizer as bpe

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 300
MIN_GAP = 1e-3  # smallest difference of the two largest logits, over all greedy steps
SAVED_STEPS = [1, 10, 100]  # logits after feeding that many generated tokens


def qwen35(layers, hidden, intermediate, heads, kv_heads, head_dim, keys, values, linear_dim, tied):
    return Qwen3_5TextConfig(
        vocab_size=320, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, linear_num_key_heads=keys, linear_num_value_heads=values,
        linear_key_head_dim=linear_dim, linear_value_head_dim=linear_dim,
        tie_word_embeddings=tied, max_position_embeddings=1024, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                         "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    )


def llama(hidden, heads, kv_heads, intermediate, layers, rope, tied=False):
    return LlamaConfig(
        vocab_size=320, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        tie_word_embeddings=tied, max_position_embeddings=1024, rms_norm_eps=1e-5,
        rope_parameters=rope,
    )


# name: (config, split rule, how it is laid out on disk)
MODELS = {
    "qwen3_5": (qwen35(4, 64, 64, 2, 1, 32, 2, 2, 32, True), "qwen35", {}),
    # More value heads than key heads, as in the 4B and larger.
    "qwen3_5-gva": (qwen35(4, 64, 64, 4, 2, 32, 2, 4, 16, False), "qwen35", {}),
    "qwen3_5-deep": (qwen35(8, 96, 64, 2, 1, 64, 2, 2, 32, True), "qwen35", {"dtype": "bf16"}),
    # As published: nested config, model.language_model. prefix, vision tower and
    # MTP tensors in the files, several shards.
    "qwen3_5-multimodal": (qwen35(4, 64, 64, 2, 1, 32, 2, 2, 32, True), "qwen35",
                           {"multimodal": True, "shards": 3}),
    # head_dim is not hidden / heads.
    "qwen3": (Qwen3Config(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                          tie_word_embeddings=True, max_position_embeddings=1024,
                          rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "qwen2", {}),
    # Config keys as older files have them; more rows of embedding than tokens.
    "qwen2": (Qwen2Config(vocab_size=352, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
                          num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                          max_position_embeddings=1024,
                          rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
              "qwen2", {"legacy_config": True, "template_in_config": True, "varied": (25, 8)}),
    "llama": (llama(96, 3, 1, 96, 2, {"rope_type": "default", "rope_theta": 1e5}),
              "smollm", {"legacy_config": True}),
    # Frequency scaling that matters within the tested length.
    "llama3-rope": (llama(64, 4, 2, 96, 3,
                          {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                           "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 64}),
                    "llama-bpe", {}),
    # Heads wider than hidden / heads, windows shorter than the prompts.
    "mistral": (MistralConfig(vocab_size=320, hidden_size=64, intermediate_size=64,
                              num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                              head_dim=32, sliding_window=24, max_position_embeddings=1024,
                              rms_norm_eps=1e-5,
                              rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
                "mistral", {"dtype": "bf16"}),
    # A matrix for each expert, as published and as transformers saves it.
    "qwen3_moe": (Qwen3MoeConfig(vocab_size=320, hidden_size=64, moe_intermediate_size=32,
                                 num_hidden_layers=3, num_attention_heads=4,
                                 num_key_value_heads=2, head_dim=32, num_experts=8,
                                 num_experts_per_tok=3, norm_topk_prob=True,
                                 tie_word_embeddings=True, max_position_embeddings=1024,
                                 rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
                  "qwen2", {"dtype": "bf16", "experts_apart": True}),
    # Layers without experts: one that is named, and all but every second.
    "qwen3_moe-mixed": (Qwen3MoeConfig(vocab_size=320, hidden_size=64, moe_intermediate_size=32,
                                       intermediate_size=96, mlp_only_layers=[1],
                                       decoder_sparse_step=2, num_hidden_layers=4,
                                       num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                                       num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
                                       tie_word_embeddings=True, max_position_embeddings=1024,
                                       rope_parameters={"rope_type": "default",
                                                        "rope_theta": 1e6}),
                        "qwen2", {"dtype": "bf16", "experts_apart": True}),
    # Fused experts, as published.
    "qwen3_5_moe": (Qwen3_5MoeTextConfig(
        vocab_size=320, hidden_size=64, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, num_experts=6, num_experts_per_tok=2,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, tie_word_embeddings=True, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                         "mrope_interleaved": True, "mrope_section": [2, 1, 1]}),
        "qwen35", {"dtype": "bf16"}),
    # Windows shorter than the prompts, rotations of two kinds, a scale that is not the head's width.
    "gemma3": (Gemma3TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=24,
        sliding_window=24, max_position_embeddings=1024,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        "gemma", {"dtype": "bf16"}),
    # Rows of 256 for the K-quants; only GGUF files of it are kept.
    "llama-256": (llama(256, 4, 2, 256, 1, {"rope_type": "default", "rope_theta": 1e4}, tied=True),
                  "llama-bpe", {"scratch": True, "varied": (10, 3)}),
}

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

SHORT = [17, 205, 3, 99, 258]


def long_prompt(name, count):
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, 310, (count,), generator=generator).tolist()


LONG_LENGTH = {"qwen3_5": 131, "qwen3_5-gva": 150, "qwen3_5-deep": 70, "qwen3_5-multimodal": 128,
               "qwen3": 100, "qwen2": 129, "llama": 97, "llama3-rope": 140, "llama-256": 70,
               "mistral": 120, "qwen3_moe": 100, "qwen3_moe-mixed": 80, "qwen3_5_moe": 131, "gemma3": 120}


def randomise(model, seed):
    """Weights under which a left-out bias, norm weight or decay is visible."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, std, mean=0.0):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    # Sharp, strong attention keeps the attention-only models out of fixed points.
    hybrid = model.config.model_type.startswith("qwen3_5")
    gemma = model.config.model_type.startswith("gemma3")
    zero_centred = hybrid or gemma
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.copy_(torch.log(torch.rand(tensor.shape, generator=generator) * 2.0 + 0.02))
            elif name.endswith("dt_bias"):
                normal(tensor, 1.0, -0.5)
            elif name.endswith("linear_attn.norm.weight"):
                normal(tensor, 0.3, 1.0)
            elif name.endswith(("q_norm.weight", "k_norm.weight")) and not hybrid:
                normal(tensor, 0.4, 0.8 if zero_centred else 1.8)
            elif gemma and (".post_" in name or name == "model.norm.weight"):
                # Layers that outweigh the scaled embedding, whose own token is the likeliest.
                normal(tensor, 0.3, 4.0 if name == "model.norm.weight" else 1.0)
            elif "norm" in name:
                normal(tensor, 0.3, 0.0 if zero_centred else 1.0)
            elif "conv1d" in name:
                normal(tensor, 0.5)
            elif name.endswith(".bias"):
                normal(tensor, 0.5)
            elif name.endswith(".mlp.gate.weight"):
                # Clear choices, so that rounding does not change them.
                normal(tensor, 3.0 / tensor.shape[-1] ** 0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                normal(tensor, 0.06 if gemma else 0.3)
            elif name.endswith("o_proj.weight") and not hybrid:
                normal(tensor, 2.5 / tensor.shape[-1] ** 0.5)
            elif name.endswith(("q_proj.weight", "k_proj.weight")) and not hybrid:
                normal(tensor, 1.8 / tensor.shape[-1] ** 0.5)
            else:
                normal(tensor, 1.1 / tensor.shape[-1] ** 0.5)


def prefill_and_decode(model, prompt, steps):
    """Prompt logits [n, V], greedy ids [steps], logits of the saved steps, smallest gap, margin list."""
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        prompt_logits = out.logits[0].float()
        row, greedy, saved, gaps = prompt_logits[-1], [], {}, []
        for step in range(steps + 1):
            if step:
                out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values,
                            use_cache=True)
                row = out.logits[0, -1].float()
            if step in SAVED_STEPS:
                saved[step] = row.clone()
            if step == steps:
                break
            top = row.topk(2)
            gaps.append((top.values[0] - top.values[1]).item())
            greedy.append(top.indices[0].item())
            if gaps[-1] < MIN_GAP:
                return None
    return prompt_logits, greedy, saved, min(gaps)


def acceptable(run, stops, varied):
    """varied: how many different tokens there must be in all, and among the last 60."""
    if run is None:
        return False
    greedy = run[1]
    return len(set(greedy)) >= varied[0] and len(set(greedy[-60:])) >= varied[1] and not stops & set(greedy)


@contextlib.contextmanager
def in_double(model):
    """The model in f64, also where transformers casts to f32.

    Two f32 programs that add in another order differ by up to 2e-4 on these models
    (transformers' chunked Gated DeltaNet from f64 as much as anything), so the values
    to compare with come from f64.
    """
    to, as_float = torch.Tensor.to, torch.Tensor.float

    def wide(kind):
        return torch.float64 if kind is torch.float32 else kind

    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.to = lambda self, *args, **options: to(
        self, *map(wide, args), **{name: wide(value) for name, value in options.items()})
    try:
        model.double()
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float = to, as_float
        model.float()


def values(model, prompts):
    """The tensors of expected.safetensors for `prompts` of expected.json.

    `<p>.prompt_logits` holds the rows `logit_positions` of the prompt;
    `<p>.step_logits` the rows after feeding `logit_steps` generated tokens.
    """
    tensors = {}
    with in_double(model), torch.no_grad():
        for key, described in prompts.items():
            prompt = described["prompt"]
            text = prompt + described["greedy"][:max(SAVED_STEPS)]
            logits = model(torch.tensor([text]), use_cache=False).logits[0]
            tensors[f"{key}.prompt_logits"] = logits[described["logit_positions"]]
            tensors[f"{key}.step_logits"] = logits[[len(prompt) - 1 + s for s in SAVED_STEPS]]
        states = []

        def keep(module, inputs, out):
            states.append(out[0] if isinstance(out, tuple) else out)

        parts = [model.model.embed_tokens, *model.model.layers, model.model.norm]
        hooks = [part.register_forward_hook(keep) for part in parts]
        prompt = prompts["short"]["prompt"]
        model(torch.tensor([prompt]), use_cache=False)
        for hook in hooks:
            hook.remove()
    states = [state.reshape(len(prompt), -1) for state in states]
    # [layers + 1, 5, hidden]: the embedding, then the residual stream after each layer.
    tensors["short.hidden"] = torch.stack(states[:-1])
    tensors["short.final_norm"] = states[-1]  # [5, hidden]
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}


def described_runs(runs):
    """The prompts of expected.json."""
    described = {}
    for key, prompt, (_, greedy, _, gap) in runs:
        last = len(prompt) - 1
        positions = sorted({p for p in (0, 1, 2, 3, 4, 63, 64, 65, 127, 128, last) if p <= last})
        described[key] = {"prompt": prompt, "logit_positions": positions, "greedy": greedy,
                          "logit_steps": SAVED_STEPS, "smallest_greedy_gap": round(gap, 6)}
    return described


def legacy(config):
    """config.json as written before rope_parameters existed."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    return config


def multimodal(config, tensors):
    text = dict(config)
    for key in ("architectures", "transformers_version"):
        text.pop(key, None)
    text.update(attn_output_gate=True, full_attention_interval=4, mamba_ssm_dtype="float32",
                mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "image_token_id": 318, "video_token_id": 319, "vision_start_token_id": 316,
        "vision_end_token_id": 317, "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 32,
                          "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
                          "patch_size": 4, "num_position_embeddings": 16},
        "transformers_version": config["transformers_version"],
    }
    renamed = {}
    for name, tensor in tensors.items():
        renamed[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = tensor
    generator = torch.Generator().manual_seed(99)

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.1

    renamed["model.visual.patch_embed.proj.weight"] = random(32, 3, 2, 4, 4)
    renamed["model.visual.patch_embed.proj.bias"] = random(32)
    renamed["model.visual.blocks.0.attn.qkv.weight"] = random(96, 32)
    renamed["model.visual.blocks.0.attn.qkv.bias"] = random(96)
    renamed["model.visual.merger.linear_fc2.weight"] = random(64, 32)
    hidden = config["hidden_size"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        renamed[f"mtp.{name}.weight"] = random(hidden)
    renamed["mtp.fc.weight"] = random(hidden, 2 * hidden)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.3."):
            renamed[name.replace("model.layers.3.", "mtp.layers.0.")] = random(*tensor.shape)
    return outer, renamed


def by_expert(tensors):
    """A matrix for each expert and part, as published checkpoints of Qwen3 have them."""
    apart = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".mlp.experts"):
            apart[name] = tensor
            continue
        kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        for expert, fused in enumerate(tensor):
            for part, matrix in zip(kinds, fused.chunk(len(kinds))):
                apart[f"{layer}.{expert}.{part}.weight"] = matrix.clone()
    return apart


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def write_weights(folder, tensors, shards):
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        return
    groups, weight_map = [{} for _ in range(shards)], {}
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        groups[index * shards // len(tensors)][name] = tensor
    for index, group in enumerate(groups):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        save_file(group, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(group, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder, "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})


def write_tokenizer(folder, rule, in_config):
    tokenizer = bpe.make(rule, 320)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    special, plain = bpe.added(rule)
    end, text_end = bpe.ends(rule)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
              "bos_token": bpe.first(rule), "eos_token": end, "pad_token": text_end,
              "clean_up_tokenization_spaces": False, "model_max_length": 1024,
              "added_tokens_decoder": {
                  str(tokenizer.token_to_id(text)): {
                      "content": text, "lstrip": False, "rstrip": False, "single_word": False,
                      "normalized": False, "special": text in special}
                  for text in special + plain}}
    if bpe.first(rule):
        config["add_bos_token"] = True
    if in_config:
        config["chat_template"] = bpe.chat_template(rule)
    else:
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(bpe.chat_template(rule))
    write_json(folder, "tokenizer_config.json", config)
    return tokenizer


def tokenizer_reference(folder, tokenizer):
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 7 + 5?"},
                {"role": "assistant", "content": "<think>\neasy\n</think>\n\n12"},
                {"role": "user", "content": "Und auf Deutsch?"}]
    chats = []
    for options in ({}, {"enable_thinking": False}):
        text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        ids = fast(text, add_special_tokens=False)["input_ids"]
        chats.append({"options": options, "text": text, "ids": ids})
    texts = [{"text": text, "ids": tokenizer.encode(text).ids} for text in bpe.PROBES]
    for probe in texts:
        assert fast(probe["text"])["input_ids"] == probe["ids"], probe
        probe["decoded"] = fast.decode(probe["ids"], skip_special_tokens=True)
    return {"encode": texts, "messages": messages, "chat": chats}


def build(name, config, seed, dtype):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER)
    model.eval()
    randomise(model, seed)
    model.tie_weights()
    if dtype == "bf16":  # the reference runs in f32 on weights that bf16 holds exactly
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(tensor.bfloat16().float())
    return model


def find_seed(name, config, dtype, stops, varied):
    prompts = [("short", SHORT), ("long", long_prompt(name, LONG_LENGTH[name]))]
    for seed in range(200):
        model = build(name, config, seed, dtype)
        runs = []
        for key, prompt in prompts:
            run = prefill_and_decode(model, prompt, STEPS)
            if not acceptable(run, stops, varied):
                break
            runs.append((key, prompt, run))
        else:
            return seed, model, runs
    raise SystemExit(f"{name}: no seed of 200 gives varied text without near-ties")


def make(name):
    config, rule, layout = MODELS[name]
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    dtype = layout.get("dtype", "f32")
    tokenizer = write_tokenizer(folder, rule, layout.get("template_in_config", False))
    end, text_end = map(tokenizer.token_to_id, bpe.ends(rule))
    config.eos_token_id, config.bos_token_id, config.pad_token_id = text_end, None, None
    config.dtype = "bfloat16" if dtype == "bf16" else "float32"
    seed, model, runs = find_seed(name, config, dtype, {end, text_end},
                                  layout.get("varied", (60, 20)))

    tensors = {n: t.detach().clone() for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    described = config.to_dict()
    described["architectures"] = [type(model).__name__]
    described["transformers_version"] = transformers.__version__
    described.pop("_name_or_path", None)
    described.pop("chunk_size_feed_forward", None)
    if layout.get("legacy_config"):
        described = legacy(described)
    if layout.get("multimodal"):
        described, tensors = multimodal(described, tensors)
    if dtype == "bf16":
        # These stay f32, so that one file mixes types.
        tensors = {n: t if n.endswith(("A_log", "linear_attn.norm.weight")) else t.bfloat16()
                   for n, t in tensors.items()}
    write_json(folder, "config.json", described)
    write_json(folder, "generation_config.json",
               {"do_sample": True, "eos_token_id": [end, text_end], "pad_token_id": text_end,
                "temperature": 0.7, "top_k": 20, "top_p": 0.8,
                "transformers_version": transformers.__version__})
    tensors = by_expert(tensors) if layout.get("experts_apart") else tensors
    write_weights(folder, tensors, layout.get("shards", 1))

    expected = {"seed": seed, "vocab_size": config.vocab_size, "prompts": described_runs(runs),
                "tokenizer": tokenizer_reference(folder, tokenizer)}
    write_json(folder, "expected.json", expected)
    write_values(name)
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    gaps = [p["smallest_greedy_gap"] for p in expected["prompts"].values()]
    kinds = [len(set(p["greedy"])) for p in expected["prompts"].values()]
    print(f"{name}: seed {seed}, {size} bytes, smallest gaps {gaps}, distinct tokens {kinds}", flush=True)


def folder_of(name):
    scratch = MODELS[name][2].get("scratch")
    return os.path.join(os.environ.get("KOZUE_SCRATCH", "/tmp") if scratch else os.path.join(HERE, "tiny"), name)


def write_values(name):
    """expected.safetensors, from what lies on disk; the f32 model must not be far from it."""
    folder = folder_of(name)
    kind = AutoModelForCausalLM
    if MODELS[name][2].get("multimodal"):
        from transformers.models.qwen3_5 import Qwen3_5ForCausalLM as kind
    model = kind.from_pretrained(folder, dtype=torch.float32, **EAGER)
    with open(os.path.join(folder, "expected.json"), encoding="utf-8") as file:
        prompts = json.load(file)["prompts"]
    tensors = values(model, prompts)
    prompt = prompts["long"]
    with torch.no_grad():
        rows = model(torch.tensor([prompt["prompt"]])).logits[0, prompt["logit_positions"]]
    error = (rows - tensors["long.prompt_logits"]).abs().max().item()
    assert error < 1e-3, (folder, error)
    save_file(tensors, os.path.join(folder, "expected.safetensors"))
    print(f"{name}: transformers in f32 differs by {error:.2e}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:]
    only_values = names[:1] == ["--values"]
    names = names[only_values:] or [n for n in MODELS if not (only_values and n == "llama-256")]
    for chosen in names:
        if chosen not in MODELS:
            raise SystemExit(f"no tiny model {chosen!r}; known: {', '.join(MODELS)}")
        (write_values if only_values else make)(chosen)
