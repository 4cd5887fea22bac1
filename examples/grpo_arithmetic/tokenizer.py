"""A byte-level tokenizer built in code, so that the example downloads nothing.

272 ids: 16 specials and one per byte. ``len(tokenizer)`` equals the model's ``vocab_size`` on purpose: an inference
engine may mask ids at or above ``len(tokenizer)`` while a trainer does not, and their log-probabilities would differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, IM_START, IM_END, END_OF_TEXT = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = (PAD, IM_START, IM_END, END_OF_TEXT, *(f"<|extra_{i}|>" for i in range(12)))
PAD_ID, EOS_ID = SPECIALS.index(PAD), SPECIALS.index(IM_END)
VOCAB_SIZE = len(SPECIALS) + 256
MAX_POSITIONS = 1024

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(named: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return the tokenizer: no merges, pad ``<|pad|>``, end of text ``<|im_end|>``.

    Args:
        named: names for the last special ids, which then are added tokens but no special ones: they stay in decoded
            text, as in Qwen3's tokenizer.
        template: for chats.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = SPECIALS[: len(SPECIALS) - len(named)]
    vocab = {token: index for index, token in enumerate((*specials, *named, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, normalized=False) for token in named])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=IM_END,
        bos_token=None,
        additional_special_tokens=[token for token in specials if token not in (PAD, IM_END)],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = template
    return tokenizer


def prompt_text(question: str) -> str:
    """The chat prompt as text; equal to the template applied to one user message."""
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
