"""Shape of the target: the part of transformers' Qwen3_5TextConfig that we train."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetConfig:
    """A text-only Qwen3.5 model with tied embeddings (names are transformers')."""

    vocab_size: int = 16384
    hidden_size: int = 768
    intermediate_size: int = 1792
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 128
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 4096
    full_attention_interval: int = 4
    eos_token_id: list[int] = field(default_factory=lambda: [0, 2])
    pad_token_id: int = 0

    @property
    def layer_types(self) -> list[str]:
        """`linear_attention` or `full_attention` for every layer."""
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The config.json that transformers' Qwen3_5ForCausalLM loads."""
        own = asdict(self)
        own.pop("full_attention_interval")
        theta, partial = own.pop("rope_theta"), own.pop("partial_rotary_factor")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **own,
            "layer_types": self.layer_types,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": partial,
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": dtype,
        }

    @staticmethod
    def from_hf(path: Path) -> TargetConfig:
        """Reads config.json; raises KeyError where a needed field is missing."""
        raw = json.loads(Path(path).read_text())
        rope = raw["rope_parameters"]
        names = {k: raw[k] for k in asdict(TargetConfig()) if k in raw}
        interval = raw["layer_types"].index("full_attention") + 1
        names.update(
            rope_theta=rope["rope_theta"],
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            full_attention_interval=interval,
        )
        return TargetConfig(**names)
