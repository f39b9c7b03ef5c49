"""Fast generation against transformers, and questions that a model asks itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kozue_train.model import llama
from kozue_train.stages import ask
from kozue_train.stages.generate import Texts

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def toy(family: str, vocab: int) -> torch.nn.Module:
    torch.manual_seed(0)
    name = {"llama": "Llama", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, name + "Config")(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=family == "llama", eos_token_id=None, pad_token_id=None,
    )
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    for n, p in model.named_parameters():
        if n.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    return model


def continued(model: torch.nn.Module, prompt: list[int], tokens: int, stops: tuple[int, ...]) -> list[int]:
    """Greedy text without any cache."""
    row = list(prompt)
    while len(row) < len(prompt) + tokens:
        with torch.no_grad():
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] in stops:
            break
    return row[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_slots_give_each_prompt_what_it_gets_alone(family: str) -> None:
    model = toy(family, 61)
    assert llama.is_llama(model.config)
    gen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 61, (1 + 5 * i % 13,), generator=gen).tolist() for i in range(9)]
    alone = [continued(model, p, 20, ()) for p in prompts]
    stops = (alone[0][7], alone[3][2])  # so that some answers end early and their slots go on with another prompt
    wanted = [continued(model, p, 20, stops) for p in prompts]
    assert {len(w) for w in wanted} != {20}
    assert llama.generate(model, prompts, 20, [0.0] * 9, stops, slots=4) == wanted
    assert llama.generate(model, prompts, 20, [0.0] * 9, stops, slots=64) == wanted


def test_slots_sample_from_the_models_distribution() -> None:
    model = toy("llama", 12)
    with torch.no_grad():
        p = (model(torch.tensor([[3, 5]])).logits[0, -1] / 2.0).softmax(-1).numpy()
    drawn = llama.generate(model, [[3, 5]] * 6000, 1, [2.0] * 6000, (), slots=600)
    share = np.bincount([d[0] for d in drawn], minlength=12) / 6000
    assert np.abs(share - p).max() < 4 * (0.25 / 6000) ** 0.5
    assert llama.generate(model, [[3, 5]] * 2, 1, [0.0, 0.0], ()) == [[int(p.argmax())]] * 2


def test_other_families_are_left_to_transformers() -> None:
    assert not llama.is_llama(transformers.Qwen3Config())
    assert not llama.is_llama(transformers.LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))


def test_a_model_asks_itself(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tok = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    folder = tmp_path / "m"
    toy("llama", tok.get_vocab_size()).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=TEMPLATE, eos_token="<|im_end|>").save_pretrained(folder)
    end = tok.token_to_id("<|im_end|>")
    asked: list[list[list[int]]] = []
    says = ["Why is the sky blue?", "why is the sky  blue", "What did the test ask?", "no end", "", "What is two and two?"]

    def answers(self: object, prompts: list[list[int]], *rest: object) -> list[list[int]]:
        asked.append(prompts)
        return [tok.encode(s).ids + ([] if s == "no end" else [end]) for s in says]

    monkeypatch.setattr("kozue_train.frozen.HfTarget.generate", answers)
    avoid = tmp_path / "eval.json"
    avoid.write_text(json.dumps({"chat": ["<|im_start|>user\nwhat did the test ask?<|im_end|>\n<|im_start|>assistant\n"]}))
    options = ask.AskOptions(target=folder, out=tmp_path / "own.json", count=6, avoid=(avoid,), device="cpu")
    made = ask.run(options)
    assert made == [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in ("Why is the sky blue?", "What is two and two?")]
    assert json.loads((tmp_path / "own.json").read_text()) == {"own": made}
    assert [tok.decode(p, skip_special_tokens=False) for p in asked[0]] == ["<|im_start|>user\n"] * 6

    rows = [np.array(tok.encode(made[0] + a).ids) for a in ("It scatters.<|im_end|>", "It is cut short")]
    Texts(rows, np.array([4, 4]), ["own", "own"], np.zeros(2)).save(tmp_path / "t.npz")
    says[:] = ["Says who?"]
    later = ask.run(ask.AskOptions(target=folder, out=tmp_path / "more.json", count=6, after=tmp_path / "t.npz", device="cpu"))
    assert later == [made[0] + "It scatters.<|im_end|>\n<|im_start|>user\nSays who?<|im_end|>\n<|im_start|>assistant\n"]

    other = tmp_path / "other"
    toy("qwen2", tok.get_vocab_size()).save_pretrained(other)
    changed = "[system]{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=changed).save_pretrained(other)
    avoid.write_text(json.dumps({"chat": ["[system][user]WHAT is two and two[assistant]"]}))
    borrowing = ask.AskOptions(target=other, out=tmp_path / "lent.json", count=6, borrow=tmp_path / "own.json", borrow_from=folder, avoid=(avoid,), device="cpu")
    assert ask.run(borrowing) == ["[system][user]Why is the sky blue?[assistant]"]
    assert set(json.loads((tmp_path / "lent.json").read_text())) == {"borrowed"}
    with pytest.raises(ValueError, match="both --borrow and --borrow-from"):
        ask.run(dataclasses.replace(borrowing, borrow_from=None))
    Texts(rows[1:], np.array([4]), ["own"], np.zeros(1)).save(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="no finished answer within 320 tokens"):
        ask.run(ask.AskOptions(target=folder, out=tmp_path / "x.json", count=6, after=tmp_path / "none.npz", device="cpu"))
