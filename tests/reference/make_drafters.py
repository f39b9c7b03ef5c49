#!/usr/bin/env python3
"""Make the tiny random drafters in drafters/ and what their formulas give in f64.

    python tests/reference/make_drafters.py

Needs torch, transformers==5.24.0, safetensors (CPU is enough). The targets are
checkpoints of make_tiny.py. The formulas are written out here row by row and head by
head, from the papers and the reference implementations' behaviour; where training/
has the same network, both must agree.
"""

import json
import math
import os
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from make_tiny import in_double

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "tiny")
DRAFTERS = os.path.join(HERE, "drafters")
sys.path.insert(0, os.path.join(HERE, "..", "..", "training"))

PROMPT = 20
ACCEPTED = [0, 4, 7]  # drafted tokens kept in each round; one more token is committed with them
COMMITTED = [PROMPT] + [kept + 1 for kept in ACCEPTED]
TOKENS = [301, 12, 77, 5]  # the newest token of each round

# name: (target, DFlash settings)
DFLASH = {
    # First generation: full attention throughout, block_size beside the model's settings.
    "dflash-qwen3": ("qwen3", {
        "num_hidden_layers": 2, "block_size": 8, "rope_theta": 1e6, "rope_scaling": None,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}}),
    # Later: causal sliding layers before a full one, since nothing says is_causal. The window is
    # shorter than a block with its context, and the taps are not in order.
    "dflash-qwen3_5": ("qwen3_5", {
        "num_hidden_layers": 3, "attention_bias": True, "sliding_window": 11, "use_sliding_window": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "dflash_config": {"block_size": 8, "mask_token_id": 319, "target_layer_ids": [3, 1]}}),
    # Windows on both sides, narrower than the block.
    "dflash-symmetric": ("qwen3_5", {
        "num_hidden_layers": 1, "sliding_window": 5, "layer_types": ["sliding_attention"], "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "dflash_config": {"block_size": 8, "mask_token_id": 319, "target_layer_ids": [2]}}),
}

# name: (DFlash drafter, Weaver settings, generation)
WEAVER = {
    "weaver-learned": ("dflash-qwen3", {"num_layers": 2, "num_heads": 2, "mlp_dim": 48, "K": 7}, 1),
    # Fewer depths than the drafter proposes.
    "weaver-rotary": ("dflash-qwen3_5", {"num_layers": 2, "num_heads": 4, "mlp_dim": 40, "K": 5, "rope_base": 1e4}, 2),
}
RANK, POOL = 32, 16
# Parent of every node, and how many are expanded at a time: a branching top and one long path.
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 7, 4]
BATCHES = [1, 3, 3, 3]


def double(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


class Target:
    """A tiny checkpoint's embedding and head, and its hidden states."""

    def __init__(self, name):
        kind = AutoModelForCausalLM
        if "multimodal" in name:
            from transformers.models.qwen3_5 import Qwen3_5ForCausalLM as kind
        self.model = kind.from_pretrained(os.path.join(TINY, name), dtype=torch.float32, attn_implementation="eager")
        self.config = self.model.config
        self.embedding = self.model.get_input_embeddings().weight.detach().double()
        self.head = self.model.get_output_embeddings().weight.detach().double()

    def states(self, tokens):
        """Residual streams after each layer [layers, n, hidden], and the normed last one [n, hidden]."""
        kept = []

        def keep(module, inputs, out):
            kept.append(out[0] if isinstance(out, tuple) else out)

        hooks = [part.register_forward_hook(keep) for part in [*self.model.model.layers, self.model.model.norm]]
        with in_double(self.model), torch.no_grad():
            self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        kept = [state.reshape(len(tokens), -1).double() for state in kept]
        return torch.stack(kept[:-1]), kept[-1]


def rms(x, weight, eps, bias=None):
    out = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    return out if bias is None else out + bias


def rotate(x, position, theta, width=None):
    """The first `width` values of a head [d] in pairs (i, i + width / 2)."""
    width = width or x.shape[-1]
    out = x.clone()
    for i in range(width // 2):
        angle = position * theta ** (-2.0 * i / width)
        a, b = x[i], x[i + width // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attend(q, keys, values):
    """One query [d] on keys and values, lists of [d]."""
    scores = torch.stack([q @ k for k in keys]) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, 0) @ torch.stack(values)


def swiglu(x, gate, up, down):
    hidden = x @ gate.T
    return (hidden * torch.sigmoid(hidden) * (x @ up.T)) @ down.T


# DFlash

def dflash_config(target, settings):
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": target.config.vocab_size,
        "hidden_size": target.config.hidden_size, "intermediate_size": 80, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 512,
        "num_target_layers": target.config.num_hidden_layers, "dtype": "bfloat16", **settings,
    }


def dflash_weights(config, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(std, *shape, mean=0.0):
        return (torch.randn(shape, generator=generator) * std + mean).bfloat16()

    def matrix(name, outputs, inputs, gain=1.0, bias=False):
        tensors[f"{name}.weight"] = random(gain / inputs ** 0.5, outputs, inputs)
        if bias:
            tensors[f"{name}.bias"] = random(0.4, outputs)

    tensors = {}
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    matrix("fc", hidden, hidden * len(config["dflash_config"]["target_layer_ids"]))
    tensors["hidden_norm.weight"] = random(0.3, hidden, mean=1.0)
    tensors["norm.weight"] = random(0.3, hidden, mean=1.0)
    for layer in range(config["num_hidden_layers"]):
        at, bias = f"layers.{layer}", config["attention_bias"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = random(0.3, hidden, mean=1.0)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{name}.weight"] = random(0.3, dim, mean=1.4)
        matrix(f"{at}.self_attn.q_proj", queries, hidden, bias=bias)
        matrix(f"{at}.self_attn.k_proj", keys, hidden, bias=bias)
        matrix(f"{at}.self_attn.v_proj", keys, hidden, bias=bias)
        matrix(f"{at}.self_attn.o_proj", hidden, queries, gain=2.0, bias=bias)
        matrix(f"{at}.mlp.gate_proj", inner, hidden)
        matrix(f"{at}.mlp.up_proj", inner, hidden)
        matrix(f"{at}.mlp.down_proj", hidden, inner, gain=1.5)
    return tensors


def dflash_forward(config, w, target, features, token):
    """Rows 1.. of the block that follows the tokens of `features` [n, taps x hidden]."""
    draft, eps = config["dflash_config"], config["rms_norm_eps"]
    block = draft.get("block_size") or config["block_size"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    seen = features.shape[0]
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = target.embedding[[token] + [draft["mask_token_id"]] * (block - 1)]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        attn = at + "self_attn."

        def project(name, x):
            return x @ w[f"{attn}{name}.weight"].T + w.get(f"{attn}{name}.bias", 0.0)

        kind = config.get("layer_types", ["full_attention"] * 9)[layer]
        window = config["sliding_window"] if kind == "sliding_attention" else None
        causal = config.get("is_causal", kind == "sliding_attention")
        inside = rms(x, w[at + "input_layernorm.weight"], eps)
        # The context is not normed by the layer, and makes no queries.
        both = torch.cat([context, inside])
        q = project("q_proj", inside).view(block, heads, dim)
        k = project("k_proj", both).view(seen + block, kv_heads, dim)
        v = project("v_proj", both).view(seen + block, kv_heads, dim)
        rotated = [[rotate(rms(k[i, h], w[attn + "k_norm.weight"], eps), i, theta) for h in range(kv_heads)]
                   for i in range(seen + block)]
        mixed = torch.zeros(block, heads * dim, dtype=torch.float64)
        for row in range(block):
            at_row = seen + row
            visible = [j for j in range(seen + block)
                       if not (causal and j > at_row) and not (window and abs(at_row - j) >= window)]
            for h in range(heads):
                query = rotate(rms(q[row, h], w[attn + "q_norm.weight"], eps), at_row, theta)
                kv = h // (heads // kv_heads)
                mixed[row, h * dim:(h + 1) * dim] = attend(
                    query, [rotated[j][kv] for j in visible], [v[j, kv] for j in visible])
        x = x + project("o_proj", mixed)
        inside = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        x = x + swiglu(inside, *(w[f"{at}mlp.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")))
    return rms(x, w["norm.weight"], eps)[1:]


def in_training_dflash(folder, target, features, token, seen):
    from kozue_train.model.dflash import load_dflash
    model = load_dflash(folder).double()
    with in_double(model), torch.no_grad():
        # Features past the anchor are there and must not be seen.
        rows = model(features[None], torch.tensor([[token]]), torch.tensor([[seen]]), target.embedding)
    return rows[0, 0, 1:].double()


def make_dflash(name):
    target_name, settings = DFLASH[name]
    target = Target(target_name)
    folder = os.path.join(DRAFTERS, name)
    os.makedirs(folder)
    config = dflash_config(target, settings)
    weights = dflash_weights(config, sum(name.encode()))
    write(folder, config, weights)
    w = double(weights)

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 310, (sum(COMMITTED),), generator=generator).tolist()
    layers, final = target.states(tokens)
    features = torch.cat([layers[tap] for tap in config["dflash_config"]["target_layer_ids"]], -1)
    # What the engine is given, to the bit.
    features, final = features.float().double(), final.float().double()
    expected, seen, rows = {"features": features}, 0, None
    # training/ has its angles in f32, hence 1e-5.
    for turn, (more, token) in enumerate(zip(COMMITTED, TOKENS)):
        seen += more
        rows = dflash_forward(config, w, target, features[:seen], token)
        if "layer_types" not in config:
            other = in_training_dflash(folder, target, features, token, seen)
            assert (rows - other).abs().max() < 1e-5, (name, turn)
        expected[f"hidden.{turn}"] = rows
        expected[f"logits.{turn}"] = rows @ target.head.T
    described = {"target": target_name, "tokens": tokens, "committed": COMMITTED, "newest": TOKENS}
    finish(folder, described, expected)
    return target, final[seen - 1], rows.float().double()


# Weaver

def weaver_weights(config, generation, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(std, *shape, mean=0.0):
        return (torch.randn(shape, generator=generator) * std + mean).bfloat16()

    def matrix(name, outputs, inputs, gain=1.0, bias=False):
        tensors[f"{name}.weight"] = random(gain / inputs ** 0.5, outputs, inputs)
        if bias:
            tensors[f"{name}.bias"] = random(0.3, outputs)

    def norm(name, width):
        tensors[f"{name}.weight"] = random(0.3, width, mean=1.0)
        tensors[f"{name}.bias"] = random(0.3, width)

    tensors = {}
    hidden, rank, inner = config["d_model"], config["d_rank"], config["mlp_dim"]
    norm("embed_norm", hidden), norm("output_norm", hidden), norm("out_norm", rank)
    matrix("token_in", rank, hidden, bias=True)
    matrix("proposal_in", rank, hidden, bias=True)
    matrix("lm_head_query_in", hidden, rank, gain=0.5)
    for block in range(config["num_layers"]):
        at = f"blocks.{block}"
        norm(f"{at}.norm_attn", rank), norm(f"{at}.norm_mlp", rank)
        matrix(f"{at}.o_proj", rank, rank, gain=1.5)
        if generation == 1:
            for name in ("q_proj", "k_proj", "v_proj"):
                matrix(f"{at}.{name}", rank, rank, gain=1.5)
            matrix(f"{at}.fc1", inner, rank, bias=True)
            matrix(f"{at}.fc2", rank, inner, gain=1.5, bias=True)
        else:
            matrix(f"{at}.qkv_proj", 3 * rank, rank, gain=1.5)
            matrix(f"{at}.gate_up_proj", 2 * inner, rank, bias=True)
            matrix(f"{at}.down_proj", rank, inner, gain=1.5, bias=True)
    if generation == 1:
        tensors["pos_emb"] = random(0.5, config["K"], rank)
    return tensors


def weaver_block(config, w, block, x, position, seen):
    """One row [rank] through a block; `seen` are the keys and values of earlier rows it sees.
    Returns the row and its own key and value, [heads, d] each."""
    at, rank, heads = f"blocks.{block}.", config["d_rank"], config["num_heads"]
    normed = rms(x, w[at + "norm_attn.weight"], 1e-6, w[at + "norm_attn.bias"])
    if at + "qkv_proj.weight" in w:
        q, k, v = (w[at + "qkv_proj.weight"] @ normed).view(3, heads, -1)
    else:
        q, k, v = ((w[f"{at}{name}.weight"] @ normed).view(heads, -1) for name in ("q_proj", "k_proj", "v_proj"))
    if "pos_emb" not in w:
        q, k = (torch.stack([rotate(head, position, config["rope_base"]) for head in part]) for part in (q, k))
    rows = [*seen, (k, v)]
    mixed = torch.cat([attend(q[h], [k[h] for k, _ in rows], [v[h] for _, v in rows]) for h in range(heads)])
    x = x + w[at + "o_proj.weight"] @ mixed
    normed = rms(x, w[at + "norm_mlp.weight"], 1e-6, w[at + "norm_mlp.bias"])
    if at + "fc1.weight" in w:
        inner = w[at + "fc1.weight"] @ normed + w[at + "fc1.bias"]
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner ** 3)))
        x = x + w[at + "fc2.weight"] @ inner + w[at + "fc2.bias"]
    else:
        gate, up = (w[at + "gate_up_proj.weight"] @ normed + w[at + "gate_up_proj.bias"]).chunk(2)
        x = x + w[at + "down_proj.weight"] @ (gate * torch.sigmoid(gate) * up) + w[at + "down_proj.bias"]
    assert x.shape == (rank,)
    return x, (k, v)


def weaver_queries(config, w, target, final, proposals, tokens, parents):
    """The query [hidden] of every node."""
    layers = range(config["num_layers"])
    prefix = [[] for _ in layers]
    for position, row in enumerate([final, *proposals[:config["K"]]]):
        x = w["proposal_in.weight"] @ rms(row, w["output_norm.weight"], 1e-6, w["output_norm.bias"]) + w["proposal_in.bias"]
        if "pos_emb" in w and position > 0:
            x = x + w["pos_emb"][position - 1]
        for block in layers:
            x, kv = weaver_block(config, w, block, x, position, prefix[block])
            prefix[block].append(kv)
    queries, own, paths = [], [], []
    for token, parent in zip(tokens, parents):
        path = [] if parent < 0 else [*paths[parent], parent]
        paths.append(path)
        depth = len(path)
        x = w["token_in.weight"] @ rms(target.embedding[token], w["embed_norm.weight"], 1e-6, w["embed_norm.bias"]) + w["token_in.bias"]
        if "pos_emb" in w:
            x = x + w["pos_emb"][depth]
        kvs = []
        for block in layers:
            x, kv = weaver_block(config, w, block, x, depth + 1, prefix[block] + [own[node][block] for node in path])
            kvs.append(kv)
        own.append(kvs)
        queries.append(w["lm_head_query_in.weight"] @ rms(x, w["out_norm.weight"], 1e-6, w["out_norm.bias"]))
    return torch.stack(queries), [len(path) for path in paths]


def in_training_weaver(config, weights, target, final, proposals, tokens, parents):
    """The same from training/, path by path."""
    from kozue_train.model.weaver import Weaver, WeaverConfig
    model = Weaver(WeaverConfig(**config))
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    states = torch.stack([final, *proposals[:config["K"]]])[None]
    queries = []
    with in_double(model), torch.no_grad():
        for node in range(len(tokens)):
            path = []
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            queries.append(model(states, target.embedding[path][None])[0, -1].double())
    return torch.stack(queries)


def make_weaver(name, drafted):
    drafter, settings, generation = WEAVER[name]
    target, final, proposals = drafted[drafter]
    hidden = target.config.hidden_size
    config = {"d_model": hidden, "d_embed": hidden, "d_rank": RANK, "candidate_pool_size": POOL, **settings}
    folder = os.path.join(DRAFTERS, name)
    os.makedirs(folder)
    weights = weaver_weights(config, generation, sum(name.encode()))
    write(folder, config, weights)
    w = double(weights)

    top = (proposals @ target.head.T).topk(POOL)
    candidates = top.indices
    tokens, parents, rank = [TOKENS[-1]], PARENTS, {}
    for parent in parents[1:]:
        depth, at = 0, parent
        while at > 0:
            depth, at = depth + 1, parents[at]
        rank[parent] = rank.get(parent, -1) + 1
        tokens.append(candidates[depth, rank[parent]].item())
    queries, depths = weaver_queries(config, w, target, final, proposals, tokens, parents)
    assert max(depths) < config["K"], "a node too deep to be expanded"
    if generation == 2:
        other = in_training_weaver(config, weights, target, final, proposals, tokens, parents)
        assert (queries - other).abs().max() < 1e-5, name
    scores = torch.stack([top.values[depth] + target.head[candidates[depth]] @ query
                          for query, depth in zip(queries, depths)])
    described = {"drafter": drafter, "tokens": tokens, "parents": parents, "batches": BATCHES,
                 "candidates": candidates.tolist()}
    finish(folder, described, {"final": final, "proposals": proposals, "queries": queries, "scores": scores})


# The MTP head of Qwen3.5

def mtp_step(config, w, target, hidden, token, position, cache):
    """The head's normed output for one pair of a hidden state and the token after it."""
    eps, dim, heads, kv_heads = config.rms_norm_eps, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    rope = config.rope_parameters
    width, theta = int(dim * rope["partial_rotary_factor"]), rope["rope_theta"]

    def norm(x, name):
        return rms(x, 1.0 + w[f"{name}.weight"], eps)

    both = torch.cat([norm(target.embedding[token], "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")])
    x = w["fc.weight"] @ both
    normed = norm(x, "layers.0.input_layernorm")
    attn = "layers.0.self_attn."
    query_gate = (w[attn + "q_proj.weight"] @ normed).view(heads, 2 * dim)
    k = (w[attn + "k_proj.weight"] @ normed).view(kv_heads, dim)
    v = (w[attn + "v_proj.weight"] @ normed).view(kv_heads, dim)
    cache.append((torch.stack([rotate(norm(head, attn + "k_norm"), position, theta, width) for head in k]), v))
    mixed = []
    for h in range(heads):
        q, gate = query_gate[h].chunk(2)
        kv = h // (heads // kv_heads)
        out = attend(rotate(norm(q, attn + "q_norm"), position, theta, width),
                     [k[kv] for k, _ in cache], [v[kv] for _, v in cache])
        mixed.append(out * torch.sigmoid(gate))
    x = x + w[attn + "o_proj.weight"] @ torch.cat(mixed)
    x = x + swiglu(norm(x, "layers.0.post_attention_layernorm"),
                   *(w[f"layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")))
    return norm(x, "norm")


def make_mtp(name, target_name):
    """Chains drafted after each of several commits; the weights are the target's own `mtp.` tensors."""
    target = Target(target_name)
    source = os.path.join(TINY, target_name)
    tensors = {}
    for file in sorted(os.listdir(source)):
        if file.startswith("model") and file.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(source, file)))
    w = double({n.removeprefix("mtp."): t for n, t in tensors.items() if n.startswith("mtp.")})
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 310, (sum(COMMITTED) + 1,), generator=generator).tolist()
    _, final = target.states(tokens[:-1])
    final = final.float().double()
    expected, seen, cache = {"final": final}, 0, []
    drafts = []
    for turn, more in enumerate(COMMITTED):
        # Position p pairs the hidden state of token p with token p + 1.
        for position in range(seen, seen + more):
            out = mtp_step(target.config, w, target, final[position], tokens[position + 1], position, cache)
        seen += more
        chain, rows, forked = [], [], list(cache)
        while True:
            rows.append(target.head @ out)
            chain.append(rows[-1].argmax().item())
            if len(chain) == 4:
                break
            # The head's own normed output takes the place of the target's hidden state.
            out = mtp_step(target.config, w, target, out, chain[-1], seen + len(chain) - 1, forked)
        expected[f"logits.{turn}"] = torch.stack(rows)
        gap = min((row.topk(2).values.diff().abs().item() for row in rows))
        assert gap > 1e-3, f"a near-tie: {gap}"
        drafts.append(chain)
    folder = os.path.join(DRAFTERS, name)
    os.makedirs(folder)
    finish(folder, {"target": target_name, "tokens": tokens, "committed": COMMITTED, "drafts": drafts}, expected)


def write(folder, config, weights):
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
        file.write("\n")
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def finish(folder, described, tensors):
    """expected.json and expected.safetensors, beside the weights if there are any."""
    with open(os.path.join(folder, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(described, file)
        file.write("\n")
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()},
              os.path.join(folder, "expected.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    size = sum(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))
    print(f"{os.path.basename(folder)}: {size} bytes", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    shutil.rmtree(DRAFTERS, ignore_errors=True)
    drafted = {name: make_dflash(name) for name in DFLASH}
    for name in WEAVER:
        make_weaver(name, drafted)
    make_mtp("mtp-qwen3_5", "qwen3_5-multimodal")
