"""The target's own probabilities: the same checkpoint in Hugging Face transformers, float32.

One forward pass for several responses to a prompt (`CHUNK_BYTES`). It shares no kernel, cache, batch or sampler with
the engine, which is the point of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollspec.audit.engine import Progress
from rollspec.audit.evidence import AuditError, Evidence, Samples
from rollspec.audit.noise import Witness
from rollspec.audit.statistics import Floats

CHUNK_BYTES = 256 << 20  # of float32 logits in memory at once
BLOCK_BYTES = 1 << 20  # of log-probabilities: each is read some fifteen times, four times as slowly outside the cache


class Reference:
    """The target model. `device` is "cpu", "cuda" or "auto" (a GPU where there is one)."""

    def __init__(self, model: str | Path, temperature: float, device: str = "auto") -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        logging.disable_progress_bar()  # the audit shows its own
        self.temperature = temperature
        self.device = device
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        except (OSError, ValueError) as e:
            raise AuditError(
                f"rollspec: the reference model {str(model)!r} cannot be loaded ({' '.join(str(e).split())[:300]}); "
                "give a folder or name of a causal language model in Hugging Face format."
            ) from e
        self.vocab = int(self.model.config.get_text_config().vocab_size)

    def _logits(self, prompt: tuple[int, ...], responses: list[list[int]]) -> Any:
        """[batch, longest response, V] logits of the token at each response position. Shorter responses are padded at
        the end, which a causal model cannot see.
        """
        import torch

        longest = max(map(len, responses))
        ids = torch.tensor([[*prompt, *r, *[0] * (longest - len(r))] for r in responses], device=self.device)
        with torch.inference_mode():
            # One more than the response: the logits at a position are of the next token; the last ones are dropped.
            return self.model(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1].float()

    def fill(
        self, evidence: Evidence | Witness, prompts: tuple[tuple[int, ...], ...], progress: Progress | None = None
    ) -> None:
        """Give `evidence` the probabilities of all its samples; `progress` gets (tokens done, tokens in all)."""
        samples = evidence.samples
        done = 0
        for batch in _batches(samples, self.vocab):
            responses = [samples.tokens[s].tolist() for s in batch]
            logits = self._logits(prompts[int(samples.prompt[batch[0]])], responses)
            for row, s in enumerate(batch):
                n = len(responses[row])
                step = max(1, BLOCK_BYTES // (4 * self.vocab))
                for first in range(0, n, step):
                    part = logits[row, first : min(first + step, n)]  # [<= step, V] float32
                    evidence.add(s, (part / self.temperature).log_softmax(-1).cpu().numpy(), first)
                done += n
            if progress is not None:
                progress(done, samples.n_tokens)

    def log_probs(self, prompt: Sequence[int], response: list[int], temperature: float | None = None) -> Floats:
        """[tokens, V] log-probabilities of the token at each position of one response; None: at the audit's own."""
        logits = self._logits(tuple(prompt), [response])[0].double()
        out: Floats = (logits / (temperature or self.temperature)).log_softmax(-1).cpu().numpy()
        return out

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Floats:
        """[tokens] log-probabilities of a response's tokens at temperature 1, as an engine scores a prompt."""
        tokens = list(response)
        out: Floats = self.log_probs(prompt, tokens, temperature=1.0)[range(len(tokens)), tokens]
        return out

    def gap(self, prompt: tuple[int, ...], response: list[int], a: int, b: int) -> float:
        """Logit of `a` less that of `b` after `response`."""
        logits = self._logits(prompt, [[*response, a]])[0, -1]
        return float(logits[a] - logits[b])


def _batches(samples: Samples, vocab: int) -> Iterator[list[int]]:
    """Sequences of one prompt, as many as `CHUNK_BYTES` of logits allow; empty responses are left out."""
    lengths = np.array([len(t) for t in samples.tokens], dtype=np.int64)
    for prompt in np.unique(samples.prompt):
        of_prompt = np.flatnonzero((samples.prompt == prompt) & (lengths > 0)).tolist()
        size = max(1, CHUNK_BYTES // (4 * vocab * (int(lengths.max()) + 1)))
        yield from (of_prompt[at : at + size] for at in range(0, len(of_prompt), size))
