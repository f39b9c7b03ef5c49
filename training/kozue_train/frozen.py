"""A frozen target: kozue-nano through the fast model, anything else through transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kozue_train.checkpoint import load_hf
from kozue_train.model import llama


@dataclass
class Features:
    """What a drafter may see of a text: tapped residuals [B, T, n*D], final hidden [B, T, D]."""

    taps: Tensor
    hidden: Tensor


class Frozen(Protocol):
    """The parts of a target that training needs."""

    layers: int
    hidden_size: int
    embedding: Tensor
    head: Tensor

    def features(self, ids: Tensor, taps: list[int]) -> Features: ...

    def generate(self, prompts: list[list[int]], new_tokens: int, temperatures: list[float], stops: tuple[int, ...]) -> list[list[int]]: ...


class OwnTarget:
    """A folder of ours (model_type qwen3_5_text)."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.model = load_hf(folder, dtype).to(device).requires_grad_(False)
        self.dtype = dtype
        self.layers, self.hidden_size = self.model.config.num_hidden_layers, self.model.config.hidden_size
        self.embedding = self.head = self.model.get_parameter("model.embed_tokens.weight").detach().to(dtype)

    @torch.no_grad()
    def features(self, ids: Tensor, taps: list[int]) -> Features:
        wanted = sorted(set(taps))
        hidden, tapped = self.model(ids, taps=wanted)
        return Features(torch.cat([tapped[wanted.index(t)] for t in taps], -1), hidden)

    def generate(self, prompts: list[list[int]], new_tokens: int, temperatures: list[float], stops: tuple[int, ...]) -> list[list[int]]:
        from kozue_train.model.decode import generate

        return generate(self.model, prompts, new_tokens, temperatures, stops, dtype=self.dtype)


class HfTarget:
    """Any causal model that transformers loads."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.layers, self.hidden_size = self.model.config.num_hidden_layers, self.model.config.hidden_size
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()
        self.device = device

    @torch.no_grad()
    def features(self, ids: Tensor, taps: list[int]) -> Features:
        out = self.model.base_model(input_ids=ids, output_hidden_states=True)
        return Features(torch.cat([out.hidden_states[t + 1] for t in taps], -1), out.last_hidden_state)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int, temperatures: list[float], stops: tuple[int, ...]) -> list[list[int]]:
        if llama.is_llama(self.model.config):
            return llama.generate(self.model, prompts, new_tokens, temperatures, stops)
        if len(set(temperatures)) > 1:
            out: list[list[int]] = [[] for _ in prompts]
            for t in set(temperatures):
                chosen = [i for i, x in enumerate(temperatures) if x == t]
                for i, row in zip(chosen, self.generate([prompts[i] for i in chosen], new_tokens, [t] * len(chosen), stops)):
                    out[i] = row
            return out
        longest = max(map(len, prompts))
        ids = torch.tensor([[stops[0]] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        sampled = {"do_sample": True, "temperature": temperatures[0], "top_k": 0, "top_p": 1.0} if temperatures[0] > 0 else {"do_sample": False}
        rows = self.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=list(stops), pad_token_id=stops[0], **sampled)
        results = []
        for row in rows[:, longest:].tolist():
            end = next((j + 1 for j, x in enumerate(row) if x in stops), len(row))
            results.append(row[:end])
        return results


class Remembered:
    """A target that keeps the features of every batch it has seen: for small sets of texts on slow machines."""

    def __init__(self, inner: Frozen) -> None:
        self.inner, self.kept = inner, dict[tuple[bytes, tuple[int, ...]], Features]()
        self.layers, self.hidden_size, self.embedding, self.head = inner.layers, inner.hidden_size, inner.embedding, inner.head
        self.generate = inner.generate

    def features(self, ids: Tensor, taps: list[int]) -> Features:
        key = ids.cpu().numpy().tobytes(), tuple(taps)
        if key not in self.kept:
            self.kept[key] = self.inner.features(ids, taps)
        return self.kept[key]


def product_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU; else what the name says (bfloat16 pays on a CPU with matrix units for it)."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def load_frozen(folder: Path, device: torch.device, dtype: torch.dtype) -> Frozen:
    """Chooses by config.json; raises FileNotFoundError where there is none."""
    config = Path(folder) / "config.json"
    if not config.exists():
        raise FileNotFoundError(f"{config}: not there; give a folder with a transformers checkpoint")
    kind = json.loads(config.read_text()).get("model_type")
    return OwnTarget(folder, device, dtype) if kind == "qwen3_5_text" else HfTarget(folder, device, dtype)
