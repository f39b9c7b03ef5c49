"""Tokenizer training and token shards.

A shard is a file of little-endian uint16 token ids, xz or npy; documents end with <|endoftext|> (id 0).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kozue_train.data.chat import SPECIAL, TEMPLATE

# Letters, single digits, punctuation, line ends and spaces apart; a word takes one space before it.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` entries, the special ones first."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def save_tokenizer(tok: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "mask_token": "<|mask|>", "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def encode(tok: Tokenizer, texts: Iterable[str], batch: int = 512) -> Iterator[np.ndarray]:
    """Token arrays (uint16) of batches of documents, each document ended by id 0."""
    chunk: list[str] = []

    def flush() -> np.ndarray:
        ids: list[int] = []
        for e in tok.encode_batch_fast(chunk):
            ids += e.ids
            ids.append(0)
        return np.array(ids, dtype=np.uint16)

    for t in texts:
        chunk.append(t)
        if len(chunk) == batch:
            yield flush()
            chunk = []
    if chunk:
        yield flush()


def write_shard(path: Path, tokens: np.ndarray) -> int:
    """Writes one shard (.xz: compressed, .npy: as it is); returns its size in bytes."""
    if path.suffix == ".npy":
        np.save(path, tokens.astype("<u2"))
        return int(tokens.nbytes)
    raw = tokens.astype("<u2").tobytes()
    # lc=0 lp=1 pb=1: positions alternate between low and high byte of a token.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 4, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 24}]
    data = lzma.compress(raw, format=lzma.FORMAT_XZ, filters=filters)
    path.write_bytes(data)
    return len(data)


def read_shard(path: Path) -> np.ndarray:
    """The tokens of one shard (uint16)."""
    if path.suffix == ".npy":
        return np.load(path)
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(np.uint16)
