"""The byte-level tokenizer of `examples.grpo_arithmetic`, with tokens for tools and thinking, and a template for both.

Six of its spare ids get names, so the vocabulary has the same size. They are added tokens but no special ones, as in
Qwen3's tokenizer: they stay in decoded text, where verl's parser and the reward look for them.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from examples.grpo_arithmetic import tokenizer as byte_level

NAMED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'tool' %}<|im_start|>user
<tool_response>
{{ m['content'] }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}
{%- for c in m['tool_calls'] or [] %}
<tool_call>
{{ c['function'] | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""What an assistant message called is part of its content where a trainer does not parse it, as verl does not."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer."""
    return byte_level.build_tokenizer(NAMED, CHAT_TEMPLATE)
