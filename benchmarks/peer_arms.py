"""The arms of `rollspec bench peers`: every published method that one engine can run, by name.

Adding one is a line in `PEERS`: most are the preset of their name. What an installation does not have is listed as such
and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engines import Arm
from benchmarks.harness import text_config
from benchmarks.options import names
from rollspec.errors import ConfigError
from rollspec.head.checkpoint_resolver import BLOCK, NO_MAPPING, PARALLEL

NONE, OURS = "none", "rollspec"
"""What every other arm is compared with; both run beside all the others."""

HEAD = "proposal.head"


@dataclass(frozen=True)
class Peer:
    """One method.

    Attributes:
        what: for the page.
        rollspec: preset and overrides by dotted name. speculative: vLLM's `speculative_config`, of its own methods.
        heads: how many heads (`--head`) it cannot do without. takes: whether it starts from a head where one is given.
        small: whether it drafts with a small language model, which a `--head` may be, too.
        own: whether it drafts with a layer that the target has to have.
        first: whether it runs in vLLM's first model runner, as its second one does not have it.
        needs: a module that vLLM asks for, and the package that has it; empty: none.
        only: workloads that it has anything to do in; empty: all. lossy: its samples do not follow the policy.
        refused: why it runs in no engine here.
    """

    what: str
    rollspec: Mapping[str, Any] | None = None
    speculative: Mapping[str, Any] | None = None
    heads: int = 0
    takes: bool = False
    small: bool = False
    own: bool = False
    first: bool = False
    needs: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    lossy: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Chosen:
    """The arms that run, in their order, and why the others do not."""

    arms: dict[str, Arm]
    left: dict[str, str] = field(default_factory=dict)


def _lookup(k: int) -> Peer:
    method = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": k}
    return Peer(f"vLLM's own prompt lookup, {k} tokens", speculative=method)


def _suffix(k: int) -> Peer:
    return Peer(f"vLLM's own suffix decoding, {k} tokens at most, in its first model runner: the second has none",
                speculative={"method": "suffix", "num_speculative_tokens": k}, first=True,
                needs=("arctic_inference", "arctic-inference==0.1.1"))  # fmt: skip


def _frozen(k: int) -> Peer:
    return Peer(f"vLLM's own EAGLE-3 with the given head, {k} tokens, never trained",
                speculative={"method": "eagle3", "num_speculative_tokens": k, "disable_eagle_block_drop": True},
                heads=1)  # fmt: skip


PEERS: dict[str, Peer] = {
    NONE: Peer("no speculation"),
    OURS: Peer("rollspec's default preset", {"preset": "default"}),
    "rollspec+head": Peer(
        "the default preset with the given head beside its suffix drafts",
        {"preset": "default", "proposal.drafters": ["suffix", "eagle3"]},
        heads=1,
        takes=True,
    ),
    "rollspec+training": Peer(
        "the same, and the head is trained while the engine idles", {"preset": "long_tail"}, takes=True, heads=1
    ),
    "rollspec+trainer": Peer(
        "the same, and the head is trained in a process of its own",
        {"preset": "long_tail", "drafter.mode": "dedicated"},
        takes=True,
        heads=1,
    ),
    "rollspec+leap": Peer(
        "training as above, versions extrapolated as Leap+Verify does",
        {"preset": "long_tail", "drafter.training": {"recipe": "leap"}},
        takes=True,
        heads=1,
    ),
    "rollspec+pays": Peer(
        "training as above, rounds only where they pay: SpecBlock's rule",
        {"preset": "long_tail", "drafter.train_when": "pays"},
        takes=True,
        heads=1,
    ),
    "osd+model": Peer(
        "Online Speculative Decoding with a small draft model, as in the paper",
        {"preset": "osd", "proposal.drafters": ["draft_model"]},
        small=True,
    ),
    "dflash": Peer("vLLM's DFlash", refused=f"not wrapped: {BLOCK}"),
    "mtp": Peer("the target's own MTP layer drafts", {"preset": "default", "proposal.drafters": ["mtp"]}, own=True),
    "pard": Peer("PARD's parallel heads", refused=PARALLEL),
    "vocabularies": Peer("a draft model with another vocabulary", refused=NO_MAPPING),
    "ngram K=2": _lookup(2),
    "ngram K=4": _lookup(4),
    "ngram K=8": _lookup(8),
    "suffix K=4": _suffix(4),
    "suffix K=8": _suffix(8),
    "suffix K=16": _suffix(16),
    "eagle3 K=1": _frozen(1),
    "eagle3 K=2": _frozen(2),
    "eagle3 K=4": _frozen(4),
} | {
    name: Peer(what, {"preset": name}, **more)
    for name, what, more in (  # presets of their own name
        ("das", "DAS", {}),
        ("seer", "Seer's grouped speculation", {}),
        ("rhymerl", "RhymeRL's HistoSpec", {}),
        ("spec_rl", "SPEC-RL, **lossy**", {"only": ("epochs",), "lossy": True}),
        ("tlt", "TLT: BEG-MAB, idle training", {"takes": True}),
        (
            "respec",
            "ReSpec: lengths solved from a profile, reward-weighted training beside the engine",
            {"takes": True},
        ),
        ("aurora", "Aurora: chains of 5, trained on what was rejected", {"takes": True}),
        ("osd", "Online Speculative Decoding: chains of 5, distilled where it was wrong", {"takes": True}),
        ("smartspec", "SmartSpec's length by batch", {}),
        ("banditspec", "BanditSpec's UCBSpec", {}),
        ("exp3spec", "BanditSpec's EXP3Spec", {}),
        ("eesd", "EESD: Thompson sampling, token by token", {}),
        ("disco", "DISCO: a classifier stops the draft", {}),
        ("svip", "SVIP's entropy bound", {}),
        ("specdec++", "SpecDec++'s threshold", {}),
        ("tetris", "TETRIS: the likeliest tokens of the batch, as many as a capacity", {}),
        ("taps", "TAPS: of two heads the surer one drafts", {"heads": 2, "takes": True}),
        ("token_recycling", "Token Recycling: an adjacency matrix of candidate tokens", {}),
        ("stand", "STAND: stochastic adaptive n-grams", {}),
        ("consensus", "siblings vote on the next tokens", {}),
        ("hierarchy", "Hierarchy Drafting: databases by temporal locality", {}),
    )
}


def asked(text: str | None) -> tuple[str, ...]:
    """Names of arms in the table's order, with those that always run; `ngram` is all of `ngram K=...`.

    Raises:
        RollspecError: there is no such arm.
    """
    families = {name.partition(" ")[0] for name in PEERS}
    found = {NONE, OURS, *names("--arms", text, (*PEERS, *sorted(families - set(PEERS))))}
    return tuple(name for name in PEERS if name in found or name.partition(" ")[0] in found)


def configuration(name: str, heads: Sequence[Path]) -> dict[str, Any] | None:
    """rollspec's configuration of an arm, to be resolved; None where it runs without rollspec."""
    peer = PEERS[name]
    if peer.rollspec is None:
        return None
    found = dict(peer.rollspec)
    heads, models = _split(heads)
    if peer.small:
        found[f"{HEAD}.model"] = str(models[0].resolve())
    if peer.takes and heads:
        found[f"{HEAD}.model"] = str(heads[0].resolve())
    if peer.heads > 1:
        found[f"{HEAD}.specialists"] = {f"head{i}": str(h.resolve()) for i, h in enumerate(heads[1:], 2)}
    return found


def _split(heads: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Heads, and language models among them."""
    from drafter_online.architecture import is_draft_model

    models = [h for h in heads if h.is_dir() and is_draft_model(h)]
    return [h for h in heads if h not in models], models


def arm(name: str, heads: Sequence[Path], model: Path | None = None) -> Arm | str:
    """The arm, or the reason why it does not run with `model` (None: the demo's policy)."""
    from rollspec.config import RollspecConfig

    peer = PEERS[name]
    if peer.refused:
        return peer.refused
    if peer.own and not (model and text_config(model).get("num_nextn_predict_layers")):
        return "needs a --model with a layer that predicts further tokens (num_nextn_predict_layers)"
    if peer.needs and find_spec(peer.needs[0]) is None:
        return f"needs a package that is not installed; pip install {peer.needs[1]}"
    given, models = _split(heads)
    if peer.small and not models:
        return "needs --head with the folder of a small language model"
    if len(given) < peer.heads:
        return "needs --head" if peer.heads == 1 else f"needs --head {peer.heads} times"
    if peer.speculative is not None:
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if peer.first else {}
        model_of = {"model": str(given[0].resolve())} if peer.heads else {}
        return Arm(name, speculative={**peer.speculative, **model_of}, environment=runner)
    source = configuration(name, heads)
    if source is None:
        return Arm(name)
    try:
        resolved = RollspecConfig.load(source, env={})
    except ConfigError as e:
        return f"not there ({' '.join(str(e).removeprefix('rollspec: ').partition(';')[0].split())})"
    return Arm(name, rollspec=resolved.to_dict())


def chosen(text: str | None, heads: Sequence[Path], model: Path | None = None) -> Chosen:
    """The arms of `--arms`.

    Raises:
        RollspecError: there is no such arm.
    """
    found = {name: arm(name, heads, model) for name in asked(text)}
    return Chosen(
        {name: a for name, a in found.items() if isinstance(a, Arm)},
        {name: a for name, a in found.items() if isinstance(a, str)},
    )


def trains(one: Arm) -> bool:
    """Whether the arm trains a head, and needs idle time to do so."""
    return isinstance(one.rollspec, dict) and one.rollspec["drafter"]["mode"] in ("idle", "dedicated")
