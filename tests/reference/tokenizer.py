"""Small BPE tokenizers, trained on the sentences below: byte-level ones, and ones of
SentencePiece's kind (pieces with spaces as marks, bytes for what has no piece)."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Every token is one row of the embedding matrix; every row has the same length.",
    "It's easy to read, isn't it? They're sure we've tested what you'll run.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "fn main() {\n    let mut total = 0;\n    for n in 1..=100 { total += n; }\n    println!(\"{total}\");\n}\n",
    "In 1969 the first message had 2 letters; 3.14159 is not 22/7.",
    "Grüße aus Köln, où l'été est déjà passé. Привет, мир! 你好,世界。",
    "the cat sat on the mat and the rat ran from the hat that the man had on",
    "{\"name\": \"value\", \"list\": [1, 2, 3], \"nested\": {\"key\": null}}\n",
]

# The split rules of the families, as their tokenizer.json files state them.
# Qwen2.5/Qwen3; Qwen3.5 keeps combining marks with their letter; Llama 3 takes
# digits in threes; SmolLM2 splits digits and then uses GPT-2's rule.
SPLIT = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS = "<|endoftext|>"
PLAIN_ADDED = ["<think>", "</think>"]  # added, but not special: shown when decoding

# Rules of SentencePiece's kind: special tokens (the first ids), which of them begins and ends a
# text, which ends a turn.
PIECES = {
    "mistral": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "<s>", "</s>", "</s>"),
    "gemma": (["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
              "<bos>", "<eos>", "<end_of_turn>"),
}
MARK = "\u2581"  # SentencePiece's space


def added(rule):
    """Texts of the special tokens, and of those that are shown when decoding."""
    return (PIECES[rule][0], []) if rule in PIECES else (SPECIAL, PLAIN_ADDED)


def first(rule):
    """The token before every text, or None."""
    if rule in PIECES:
        return PIECES[rule][1]
    return BOS if rule == "llama-bpe" else None


def ends(rule):
    """The tokens at the end of a turn and of a text."""
    return (PIECES[rule][3], PIECES[rule][2]) if rule in PIECES else ("<|im_end|>", "<|endoftext|>")


def make_pieces(rule, vocab_size):
    """A tokenizer of SentencePiece's kind: special tokens, 256 bytes, then pieces."""
    special, begin, _, _ = PIECES[rule]
    vocabulary = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", MARK)
    trained.pre_tokenizer = pre_tokenizers.Split(MARK, behavior="merged_with_next")
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=vocab_size - len(vocabulary), limit_alphabet=30, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocabulary += sorted(model["vocab"], key=model["vocab"].get)
    tokenizer = Tokenizer(models.BPE(
        vocab={piece: id for id, piece in enumerate(vocabulary)},
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    decoding = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rule == "mistral":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", MARK)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def make(rule, vocab_size):
    """A tokenizer of exactly vocab_size tokens; of a byte-level one the five added ones are last."""
    if rule in PIECES:
        return make_pieces(rule, vocab_size)
    tokenizer = Tokenizer(models.BPE())
    if rule.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    if rule == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT[rule]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(PLAIN_ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if rule == "llama-bpe":  # Llama 3 puts a first token before every text
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# A first system message goes into the first or last turn of the user, as these families' own
# templates have it; turns that do not alternate are refused.
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA_TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


def chat_template(rule):
    return {"mistral": MISTRAL_TEMPLATE, "gemma": GEMMA_TEMPLATE}.get(rule, CHAT_TEMPLATE)


# Texts whose token ids are recorded, chosen where split rules differ.
PROBES = [
    "The quick brown fox",
    "  two  spaces, tabs\t\tand\n\n\nlines  \n",
    "It'S we'VE don't I'll",
    "123456 3.14 1,000,000",
    "Grüße, мир! 你好 🦙🚀 é é",  # the last is e + combining acute
    "<|im_start|>user\nhi<|im_end|><think>x</think>",
    "हिन्दी ខ្មែរ",
    "",
]
