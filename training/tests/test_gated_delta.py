"""The chunked layer against the recurrence, and the model against transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kozue_train.model import gated_delta as plain
from kozue_train.model.config import TargetConfig
from kozue_train.model.decode import Decoder, generate
from kozue_train.model.qwen3_5 import Target

TOY = TargetConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)


def toy_model(seed: int = 0) -> Target:
    model = Target(TOY)
    model.initialise(seed)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=gen) * 0.05)
    return model


def layer_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    q = F.normalize(torch.randn(shape, generator=gen, dtype=dtype), dim=-1) * shape[-1] ** -0.5
    k = F.normalize(torch.randn(shape, generator=gen, dtype=dtype) + 0.7, dim=-1)  # correlated keys: the hard case for the inverse
    v = torch.randn(shape, generator=gen, dtype=dtype)
    g = -torch.rand(shape[:-1], generator=gen, dtype=dtype) * 0.4
    beta = torch.rand(shape[:-1], generator=gen, dtype=dtype)
    return [q, k, v, g, beta]


def test_chunks_equal_recurrence_forward_and_backward() -> None:
    b, h, n, c, d = 2, 2, 3, 8, 16
    exact = [t.requires_grad_() for t in layer_inputs((b, h, n, c, d), torch.float64)]
    q, k, v, g, beta = (t.reshape(b, h, n * c, *t.shape[4:]) for t in exact)
    state = torch.zeros(b, h, d, d, dtype=torch.float64)
    outs = []
    for t in range(n * c):
        o, state = plain.recurrent_gated_delta(q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t], state)
        outs.append(o)
    want = torch.stack(outs, 2).reshape(b, h, n, c, d)
    do = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    want_grads = torch.autograd.grad(want, exact, do)
    ours = [t.detach().float().requires_grad_() for t in exact]
    got = plain.chunk_gated_delta(*ours)
    assert (got - want).abs().max() < 2e-6
    for a, w in zip(torch.autograd.grad(got, ours, do.float()), want_grads):
        assert (a - w).norm() / w.norm() < 2e-6


def test_model_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = toy_model()
    fields = {k: v for k, v in TOY.to_hf().items() if k not in ("architectures", "model_type", "dtype")}
    hf = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**fields)).float().eval()
    problems = hf.load_state_dict(model.state_dict(), strict=False)
    assert problems.missing_keys == ["lm_head.weight"] and not problems.unexpected_keys
    ids = torch.randint(0, 97, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = hf(ids, output_hidden_states=True)
        hidden, taps = model(ids, taps=[0, 2])
    assert (want.logits - model.logits(hidden)).abs().max() < 1e-4
    assert (want.hidden_states[1] - taps[0]).abs().max() < 1e-4
    assert (want.hidden_states[3] - taps[1]).abs().max() < 1e-4


def test_decoder_equals_forward_and_greedy_generation() -> None:
    model = toy_model()
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(2))
    dec = Decoder(model, 2, 30, torch.float32)
    with torch.no_grad():
        want = model.logits(model(ids)[0])
        for t in range(30):
            dec.token.copy_(ids[:, t])
            got = dec.logits()
            dec.position.add_(1)
            assert (got - want[:, t]).abs().max() < 1e-4
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13]]
    for prompt, answer in zip(prompts, generate(model, prompts, 8, [0.0, 0.0], dtype=torch.float32)):
        row = list(prompt)
        for token in answer:
            with torch.no_grad():
                assert token == int(model.logits(model(torch.tensor([row]))[0])[0, -1].argmax())
            row.append(token)
        assert len(answer) == 8 or answer[-1] in (0, 2)
