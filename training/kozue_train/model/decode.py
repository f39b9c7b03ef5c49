"""Batched generation: one token a step for all sequences, prompts fed the same way, CUDA graph on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kozue_train.model.gated_delta import recurrent_gated_delta
from kozue_train.model.qwen3_5 import Target, l2_norm, rms_norm, rope_table


class Decoder:
    """State and step function for a fixed batch. Every sequence starts at position 0."""

    def __init__(self, model: Target, batch: int, length: int, dtype: torch.dtype) -> None:
        c = self.config = model.config
        device = next(model.parameters()).device
        self.w = {n: p.detach().to(dtype if p.ndim >= 2 else torch.float32) for n, p in model.named_parameters()}
        self.dtype, self.batch, self.length, self.device = dtype, batch, length, device
        self.cos, self.sin = rope_table(length, c.rotary_dim, c.rope_theta, device)
        self.slots = torch.arange(length, device=device)
        self.state: dict[str, Tensor] = {}
        for i, kind in enumerate(c.layer_types):
            if kind == "linear_attention":
                self.state[f"{i}.s"] = torch.zeros(batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim, device=device)
                self.state[f"{i}.c"] = torch.zeros(batch, c.linear_conv_kernel_dim - 1, c.conv_dim, device=device, dtype=dtype)
            else:
                for kv in "kv":
                    self.state[f"{i}.{kv}"] = torch.zeros(batch, c.num_key_value_heads, length, c.head_dim, device=device, dtype=dtype)
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch, 1, device=device)
        self.chosen = torch.zeros(batch, dtype=torch.long, device=device)

    def _linear(self, x: Tensor, i: int) -> Tensor:
        c, w, p = self.config, self.w, f"model.layers.{i}.linear_attn."
        hk, hv, dk, dv = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        mixed = x @ w[p + "in_proj_qkv.weight"].t()
        window = torch.cat((self.state[f"{i}.c"], mixed.unsqueeze(1)), 1)
        self.state[f"{i}.c"].copy_(window[:, 1:])
        mixed = F.silu((window.float() * w[p + "conv1d.weight"].float().squeeze(1).t()).sum(1)).to(x.dtype)
        q, k, v = mixed.split((hk * dk, hk * dk, hv * dv), -1)
        q = (l2_norm(q.view(-1, hk, dk)) * dk**-0.5).repeat_interleave(hv // hk, 1)
        k = l2_norm(k.view(-1, hk, dk)).repeat_interleave(hv // hk, 1)
        beta = (x @ w[p + "in_proj_b.weight"].t()).float().sigmoid()
        g = -w[p + "A_log"].exp() * F.softplus((x @ w[p + "in_proj_a.weight"].t()).float() + w[p + "dt_bias"])
        o, new = recurrent_gated_delta(q, k, v.view(-1, hv, dv).float(), g, beta, self.state[f"{i}.s"])
        self.state[f"{i}.s"].copy_(new)
        z = (x @ w[p + "in_proj_z.weight"].t()).view(-1, hv, dv)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * w[p + "norm.weight"] * F.silu(z.float())
        return o.to(x.dtype).reshape(-1, hv * dv) @ w[p + "out_proj.weight"].t()

    def _attention(self, x: Tensor, i: int) -> Tensor:
        c, w, p = self.config, self.w, f"model.layers.{i}.self_attn."
        h, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        cos, sin = self.cos[self.position], self.sin[self.position]

        def turn(t: Tensor, norm: Tensor) -> Tensor:
            t = rms_norm(t, norm, c.rms_norm_eps)
            r = cos.shape[-1]
            a, rest = t[..., :r].float(), t[..., r:]
            half = torch.cat((-a[..., r // 2 :], a[..., : r // 2]), -1)
            return torch.cat(((a * cos + half * sin).to(t.dtype), rest), -1)

        q, gate = (x @ w[p + "q_proj.weight"].t()).view(-1, h, 2 * d).chunk(2, -1)
        q = turn(q, w[p + "q_norm.weight"]).reshape(-1, kv, h // kv, d)
        k = turn((x @ w[p + "k_proj.weight"].t()).view(-1, kv, d), w[p + "k_norm.weight"])
        v = (x @ w[p + "v_proj.weight"].t()).view(-1, kv, d)
        keys, values = self.state[f"{i}.k"], self.state[f"{i}.v"]
        keys.index_copy_(2, self.position, k.unsqueeze(2))
        values.index_copy_(2, self.position, v.unsqueeze(2))
        scores = (q @ keys.transpose(-1, -2)).float() * d**-0.5
        scores = scores.masked_fill(self.slots > self.position, float("-inf"))
        o = scores.softmax(-1).to(x.dtype) @ values
        return (o.reshape(-1, h * d) * gate.reshape(-1, h * d).sigmoid()) @ w[p + "o_proj.weight"].t()

    def logits(self) -> Tensor:
        """One step: consumes `token` at `position`, updates the state, returns logits [B, V] in float32."""
        w, eps = self.w, self.config.rms_norm_eps
        x = w["model.embed_tokens.weight"][self.token]
        for i, kind in enumerate(self.config.layer_types):
            p = f"model.layers.{i}."
            h = rms_norm(x, w[p + "input_layernorm.weight"], eps)
            x = x + (self._linear(h, i) if kind == "linear_attention" else self._attention(h, i))
            h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
            x = x + (F.silu(h @ w[p + "mlp.gate_proj.weight"].t()) * (h @ w[p + "mlp.up_proj.weight"].t())) @ w[p + "mlp.down_proj.weight"].t()
        x = rms_norm(x, w["model.norm.weight"], eps)
        return (x @ w["model.embed_tokens.weight"].t()).float()

    def step(self) -> None:
        """`chosen` becomes the sampled next token (greedy where the temperature is 0)."""
        z = self.logits()
        noise = -torch.log(-torch.log(torch.rand_like(z).clamp(1e-9, 1 - 1e-7)))
        self.chosen.copy_((z + self.temperature * noise).argmax(-1))
        self.position.add_(1)


@torch.no_grad()
def generate(
    model: Target, prompts: list[list[int]], new_tokens: int, temperatures: list[float], stops: tuple[int, ...] = (0, 2),
    dtype: torch.dtype = torch.bfloat16, length: int | None = None,
) -> list[list[int]]:
    """Continuations (without prompt, the stop token included) of all prompts at once."""
    longest = max(map(len, prompts))
    length = length or longest + new_tokens
    dec = Decoder(model, len(prompts), length, dtype)
    device = dec.device
    dec.temperature.copy_(torch.tensor(temperatures, device=device).unsqueeze(1))
    forced = torch.full((len(prompts), length), -1, dtype=torch.long)
    for i, p in enumerate(prompts):
        forced[i, : len(p)] = torch.tensor(p)
    forced = forced.to(device)
    sizes = torch.tensor([len(p) for p in prompts], device=device)
    out = torch.zeros((len(prompts), length), dtype=torch.long, device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    stop_ids = torch.tensor(stops, device=device)
    graph = None
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                dec.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dec.step()
        for s in dec.state.values():
            s.zero_()
        dec.position.zero_()
    dec.token.copy_(forced[:, 0])
    out[:, 0] = forced[:, 0]
    for t in range(1, length):
        if graph is not None:
            graph.replay()
        else:
            dec.step()
        given = forced[:, t]
        token = torch.where(given >= 0, given, torch.where(alive, dec.chosen, torch.zeros_like(dec.chosen)))
        out[:, t] = token
        dec.token.copy_(token)
        ended = (given < 0) & torch.isin(token, stop_ids)
        alive &= ~ended & (t + 1 - sizes < new_tokens)
        if t % 32 == 0 and not bool(alive.any()):
            break
    rows = out.cpu().tolist()
    results = []
    for p, row in zip(prompts, rows):
        tail = row[len(p) : len(p) + new_tokens]
        for j, token in enumerate(tail):
            if token in stops:
                tail = tail[: j + 1]
                break
        results.append(tail)
    return results
