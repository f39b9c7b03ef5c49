#!/usr/bin/env python3
"""Write gguf_sentencepiece.json: a small BPE model made by SentencePiece (package sentencepiece
0.2), with the ids that SentencePiece itself gives a few texts."""

import io
import json
import pathlib

import sentencepiece

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Every token is one row of the embedding matrix; every row has the same length.",
    "It's easy to read, isn't it? They're sure we've tested what you'll run.",
    "In 1969 the first message had 2 letters; 3.14159 is not 22/7.",
    "Grüße aus Köln, où l'été est déjà passé. Привет, мир!",
    "the cat sat on the mat and the rat ran from the hat that the man had on",
    "def add(a, b):    return a + b        for i in range(10):            print(add(i, 1))",
]
TEXTS = SENTENCES + [
    "", " ", "a", "  two  spaces ", "      six", "aaaaaaa", "then that than the them",
    "unseen: 你好 🦙 \n\n\ttabs", "thethethe cat", "x = add(1, 2)  # done", "éèê", "22/7.22/7",
]

model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(SENTENCES), model_writer=model, model_type="bpe", vocab_size=420,
    byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True, character_coverage=1.0, minloglevel=2,
)
piece = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
size = piece.vocab_size()
kind = lambda i: 2 if piece.is_unknown(i) else 3 if piece.is_control(i) else 6 if piece.is_byte(i) else 1
out = {
    "tokens": [piece.id_to_piece(i) for i in range(size)],
    "scores": [piece.get_score(i) for i in range(size)],
    "types": [kind(i) for i in range(size)],
    "texts": [[text, piece.encode(text)] for text in TEXTS],
}
target = pathlib.Path(__file__).with_suffix(".json")
target.write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")
