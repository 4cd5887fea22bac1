"""The byte-level tokenizer of `examples.grpo_arithmetic`, with tokens for tools and thinking, and a template for both.

Six of its spare ids get names, so the vocabulary has the same size. They are added tokens but no special ones, as in
Qwen3's tokenizer: they stay in decoded text, where verl's parser and the reward look for them.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.grpo_arithmetic.tokenizer import IM_END, MAX_POSITIONS, PAD, SPECIALS

NAMED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOKENS = (*SPECIALS[: -len(NAMED)], *NAMED)

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
{{ m['content'] }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""What an assistant message called is part of its content here: verl never renders one that the policy sampled."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: no merges, pad ``<|pad|>``, end of text ``<|im_end|>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate((*TOKENS, *alphabet))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, normalized=False) for token in NAMED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=IM_END,
        bos_token=None,
        additional_special_tokens=[t for t in TOKENS if t not in (PAD, IM_END, *NAMED)],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
