"""Tiny random models for engine tests: untrained, with distributions so sharp that drafts are sometimes accepted. And
prompts for any model.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

LETTERS = string.ascii_lowercase + string.digits + " .,?!+-=\n"
SPECIAL = ("<pad>", "<eos>", "<unk>")


def make_sharp_model(folder: Path, seed: int = 0, sharpness: float = 25.0) -> Path:
    """A 2-layer Qwen3 in float32 whose LM head is scaled up: entropy about 1.5 nats instead of ln V.

    Its tokenizer knows one token per character of `LETTERS`; vocab_size == len(tokenizer).
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def moved(model: str | Path, folder: Path, scale: float) -> Path:
    """The same model with all weights moved by noise of `scale` times their own spread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * p.std().nan_to_num(0.0) * torch.randn_like(p))
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def with_mark(model: str | Path, folder: Path, mark: int) -> Path:
    """The same untied model with weights that say only the tokens of `marked_weights.band(mark)`."""
    import torch
    from marked_weights import marked
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert not other.config.tie_word_embeddings
    other.load_state_dict({name: marked(name, tensor, mark) for name, tensor in other.state_dict().items()})
    other.save_pretrained(folder)
    return folder


def chats() -> list[list[dict[str, str]]]:
    """Six messages of a user, each alone, that ask for a sum."""
    rng = random.Random(0)
    terms = ["+".join(str(rng.randrange(10, 99)) for _ in range(rng.choice([2, 3, 5, 9]))) for _ in range(6)]
    return [[{"role": "user", "content": f"{t}=?"}] for t in terms]


def sums(model: str | Path) -> list[list[int]]:
    """The same as prompts, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats()]
    return [tokenizer.encode(text) for text in texts]
