"""The chat format: messages to text, as the model's chat template writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>", "<|reserved_4|>", "<|reserved_5|>",
]
MASK_ID = SPECIAL.index("<|mask|>")
END_OF_TEXT, IM_END = 0, 2


@dataclass
class Chat:
    """Turns of (question, answer); `thought` is the reasoning before the last answer, if any."""

    turns: list[tuple[str, str]]
    thought: str | None = None
    system: str | None = None
    tags: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The training text. Earlier answers carry no thought, the last an empty one where there is none."""
        out = f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system else ""
        for i, (question, answer) in enumerate(self.turns):
            out += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            if i + 1 == len(self.turns):
                out += f"<think>\n{self.thought}\n</think>\n\n" if self.thought else "<think>\n\n</think>\n\n"
            out += f"{answer}<|im_end|>\n"
        return out


def prompt_text(question: str, think: bool = False) -> str:
    """A one-turn prompt up to where the model continues."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" + ("<think>\n" if think else "<think>\n\n</think>\n\n")


TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'assistant' and loop.last and not add_generation_prompt and '</think>' not in message.content %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' and not loop.last else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}
{{- '<think>\\n' }}
{%- else %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
