"""Fast generation for targets of the llama and qwen2 families: one token a step for many slots, each at its own position.

A slot takes its prompt token by token and then its own choices; when its answer has ended, the next prompt takes its
place. So every step has the same shapes (one CUDA graph) and no slot waits for the longest answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kozue_train.model.dflash import rotary

SLOTS = 1024
CHECK_EVERY = 16


def is_llama(config: Any) -> bool:
    """True for a transformers configuration that `Slots` computes: llama or qwen2 with plain RoPE and full attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return config.model_type in ("llama", "qwen2") and rope.get("rope_type", "default") == "default" and not getattr(config, "use_sliding_window", False)


class Slots:
    """State and step function. `text` [S, T] holds prompt and answer, `at` the position that is computed next."""

    def __init__(self, model: Any, slots: int, length: int, new_tokens: int, stops: tuple[int, ...]) -> None:
        c = self.config = model.config
        self.w: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
        self.head = model.get_output_embeddings().weight.detach()
        self.theta = float(c.rope_parameters["rope_theta"])
        self.kv, self.d = c.num_key_value_heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.new_tokens, self.length = new_tokens, length
        device, dtype = self.head.device, self.head.dtype
        self.keys, self.values = (torch.zeros(c.num_hidden_layers, slots, self.kv, length, self.d, device=device, dtype=dtype) for _ in "kv")
        self.rows, self.places = torch.arange(slots, device=device), torch.arange(length, device=device)
        self.text = torch.zeros(slots, length, dtype=torch.long, device=device)
        self.at, self.prompt, self.size = (torch.zeros(slots, dtype=torch.long, device=device) for _ in range(3))
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(slots, 1, device=device)
        self.stops = torch.tensor(stops, device=device)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float()
        return self.w[name] * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(x.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def _attention(self, x: Tensor, i: int) -> Tensor:
        p = f"model.layers.{i}.self_attn."
        q, k, v = (self._linear(x, f"{p}{n}_proj").view(len(x), -1, 1, self.d) for n in "qkv")
        where = self.at[:, None]
        q, k = rotary(q, where, self.theta), rotary(k, where, self.theta)
        keys, values = self.keys[i], self.values[i]
        keys[self.rows, :, self.at], values[self.rows, :, self.at] = k.squeeze(2), v.squeeze(2)
        scores = (q.view(len(x), self.kv, -1, self.d) @ keys.transpose(-1, -2)).float() * self.d**-0.5
        scores = scores.masked_fill(self.places > self.at[:, None, None, None], float("-inf"))
        o = scores.softmax(-1).to(x.dtype) @ values
        return self._linear(o.reshape(len(x), -1), p + "o_proj")

    def logits(self) -> Tensor:
        """Consumes the token at `at` of every slot; logits [S, V] of the next one, float32."""
        x = self.w["model.embed_tokens.weight"][self.text[self.rows, self.at]]
        for i in range(self.config.num_hidden_layers):
            p = f"model.layers.{i}."
            x = x + self._attention(self._norm(x, p + "input_layernorm.weight"), i)
            h = self._norm(x, p + "post_attention_layernorm.weight")
            x = x + self._linear(F.silu(self._linear(h, p + "mlp.gate_proj")) * self._linear(h, p + "mlp.up_proj"), p + "mlp.down_proj")
        return (self._norm(x, "model.norm.weight") @ self.head.t()).float()

    def step(self) -> None:
        """One token for every slot that is alive: the prompt's next one, or the chosen one (greedy where the temperature is 0)."""
        z = self.logits()
        noise = -torch.log(-torch.log(torch.rand_like(z).clamp(1e-9, 1 - 1e-7)))
        chosen = (z + self.temperature * noise).argmax(-1)
        place = (self.at + 1).clamp(max=self.length - 1)
        own = self.alive & (place >= self.prompt)
        token = torch.where(own, chosen, self.text[self.rows, place])
        self.text[self.rows, place] = token
        self.at.copy_(torch.where(self.alive, place, self.at))
        self.size.copy_(torch.where(self.alive, place + 1, self.size))
        full = (place + 1 - self.prompt >= self.new_tokens) | (place + 1 >= self.length)
        self.alive &= ~(own & ((token[:, None] == self.stops).any(-1) | full))

    def put(self, slots: Tensor, prompts: list[list[int]], temperatures: list[float]) -> None:
        """Begins prompts in slots that are free."""
        longest = max(map(len, prompts))
        device = self.text.device
        self.text[slots, :longest] = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        self.prompt[slots] = torch.tensor([len(p) for p in prompts], device=device)
        self.temperature[slots] = torch.tensor(temperatures, device=device).unsqueeze(1)
        self.at[slots], self.alive[slots] = 0, True


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as a CUDA graph; on a CPU the step itself. It is run twice before, so call this while every slot is free."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], new_tokens: int, temperatures: list[float], stops: tuple[int, ...], slots: int = SLOTS) -> list[list[int]]:
    """Continuations (without prompt, the stop token included) of all prompts, in their order."""
    length = -(-(max(map(len, prompts)) + new_tokens) // 64) * 64
    state = Slots(model, min(slots, len(prompts)), length, new_tokens, stops)
    step = recorded(state.step, state.text.device)
    results: list[list[int]] = [[] for _ in prompts]
    owner, following = [-1] * len(state.rows), 0
    while True:
        alive = state.alive.tolist()
        ended = [s for s, n in enumerate(owner) if n >= 0 and not alive[s]]
        if ended:
            index = torch.tensor(ended, device=state.text.device)
            for s, row, size in zip(ended, state.text[index].tolist(), state.size[index].tolist()):
                results[owner[s]] = row[len(prompts[owner[s]]) : size]
                owner[s] = -1
        free = [s for s, n in enumerate(owner) if n < 0][: len(prompts) - following]
        if free:
            fresh = list(range(following, following + len(free)))
            state.put(torch.tensor(free, device=state.text.device), [prompts[n] for n in fresh], [temperatures[n] for n in fresh])
            for s, n in zip(free, fresh):
                owner[s] = n
            following += len(free)
        if all(n < 0 for n in owner):
            return results
        for _ in range(CHECK_EVERY):
            step()
