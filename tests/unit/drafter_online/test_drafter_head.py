from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_target import HIDDEN, VOCABULARY, head, model, sample, target
from reference_samples import logits as logits_of
from safetensors.torch import load_file, save_file

from drafter_online import architecture
from drafter_online import head as heads
from drafter_online.errors import HeadError
from drafter_online.model import Eagle3
from drafter_online.packing import pack


def states_equal(a: object, b: object) -> bool:
    x, y = a.state_dict(), b.state_dict()  # type: ignore[attr-defined]
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_a_fresh_head_is_finite_and_holds_nothing_of_the_target(tiny_target: Path, tmp_path: Path) -> None:
    h = head(tiny_target)
    assert all(bool(t.isfinite().all()) for t in h.state_dict().values())
    file = load_file(heads.save(h, tmp_path, torch.bfloat16) / "model.safetensors")
    assert not [n for n in file if "embed" in n or "verifier" in n or "lm_head" in n]
    assert file["fc.weight"].shape == (HIDDEN, 3 * HIDDEN) and file["fc.weight"].dtype == torch.bfloat16
    again = heads.load(heads.save(h, tmp_path), tiny_target)
    assert states_equal(h, again) and again.config.drafter_online == h.config.drafter_online
    assert states_equal(head(tiny_target), h)


def test_a_fresh_head_starts_as_the_targets_last_layer(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h = head(tiny_target, layers=2)
    assert h.config.drafter_online["starts_as_layers"] == [2, 3]
    file = load_file(tiny_target / "model.safetensors")
    for i, at in enumerate((2, 3)):
        own = dict(h.layers[i].named_parameters())
        for name in ("mlp.down_proj.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight"):
            assert torch.equal(own[name], file[f"model.layers.{at}.{name}"])
        q = file[f"model.layers.{at}.self_attn.q_proj.weight"]
        if i == 0:  # it reads an embedding beside each hidden state
            torch.testing.assert_close(own["self_attn.q_proj.weight"], torch.cat([q, q], 1) * 0.5**0.5)
        else:
            assert torch.equal(own["self_attn.q_proj.weight"], q)
    states = torch.randn(3, 3 * HIDDEN)
    assert torch.equal(h.fc(states), states[:, -HIDDEN:]), "the last auxiliary hidden state goes in as it is"
    assert torch.equal(h.norm.weight, file["model.norm.weight"])
    # A target whose layers are called otherwise, or that has too few of them: random, and said.
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    save_file({n.replace("mlp.down_proj", "mlp.down"): t for n, t in file.items()}, other / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="drafter_online.head"):
        random = head(other)
    assert random.config.drafter_online["starts_as_layers"] == [] and "starts random" in caplog.text
    assert not states_equal(random, head(other, seed=1)) and states_equal(random, head(other))
    assert head(tiny_target, layers=5).config.drafter_online["starts_as_layers"] == []
    name = "model.layers.3.mlp.up_proj.weight"  # quantized: its scale is elsewhere
    save_file({**file, name: file[name].to(torch.float8_e4m3fn)}, other / "model.safetensors")
    assert head(other).config.drafter_online["starts_as_layers"] == []


def test_the_configuration_says_all_that_an_engine_reads(tiny_target: Path, tmp_path: Path) -> None:
    config = json.loads((heads.save(head(tiny_target), tmp_path) / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "eagle3" and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert layer["model_type"] == "llama" and layer["vocab_size"] == VOCABULARY and layer["head_dim"] == 16
    assert layer["rms_norm_eps"] == 1e-6 and layer["rope_parameters"]["rope_theta"] == 10000.0
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny_target)
    assert config["draft_vocab_size"] == VOCABULARY and not config["norm_before_residual"]


def test_a_pruned_vocabulary_keeps_the_frequent_tokens(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {t: 100 - t for t in range(20)}
    with caplog.at_level(logging.INFO, logger="drafter_online.head"):
        h = head(tiny_target, draft_vocab_size=10, counts=counts)
    share = sum(100 - t for t in range(10)) / sum(counts.values())
    assert "10 of 40 tokens" in caplog.text and f"{share:.4f}" in caplog.text
    assert h.config.drafter_online["vocabulary_coverage"] == pytest.approx(share, abs=1e-6)
    assert h.t2d.sum() == 10 and bool(h.t2d[:10].all()) and h.d2t.tolist() == [0] * 10
    whole = load_file(tiny_target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(h.lm_head.weight, whole[:10]) and torch.equal(h.verifier_lm_head.weight, whole[:10])
    again = heads.load(heads.save(h, tmp_path))
    assert states_equal(again, h)
    assert Eagle3(again).to_draft.tolist() == [*range(10), *[-1] * 30]  # type: ignore[union-attr]


def test_speculators_reads_what_we_write(tiny_target: Path, tmp_path: Path) -> None:
    from speculators import SpeculatorModel

    h = head(tiny_target, draft_vocab_size=10, counts={t: 1 for t in range(10)})
    theirs = SpeculatorModel.from_pretrained(str(heads.save(h, tmp_path)))
    # The rest belongs to the target. (speculators 0.9.0 leaves an embedding that is in no file uninitialised at times.)
    ours = heads.own_weights(h)
    assert all(torch.equal(t, ours[n]) for n, t in heads.own_weights(theirs).items())


def specforge(h: Any, folder: Path, dtype: Any = None, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Writes a head as SpecForge does; the weights that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = h.config.transformer_layer_config
    mine = heads.own_weights(h, dtype).items()
    weights = {n.replace("layers.0.", "midlayer."): t.contiguous() for n, t in mine} | more
    save_file(weights, folder / "model.safetensors")
    plain = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": h.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        **{
            n: getattr(layer, n)
            for n in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
            )
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(plain))
    return weights


@pytest.mark.parametrize("pruned", [False, True])
def test_specforge_layout_is_read(tiny_target: Path, tmp_path: Path, pruned: bool) -> None:
    h = head(tiny_target, **({"draft_vocab_size": 10, "counts": {1: 1}} if pruned else {}))
    specforge(h, tmp_path, **{"embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN)})
    with pytest.raises(HeadError, match="give the target"):
        heads.load(tmp_path)
    again = heads.load(tmp_path, tiny_target)
    assert states_equal(again, h)  # the target's embedding, not the file's
    batch = pack([sample(tiny_target)], steps=2)
    for a, b in zip(logits_of(Eagle3(again), batch, 2), logits_of(Eagle3(h), batch, 2), strict=True):
        assert torch.equal(a, b)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="no safetensors file"):  # pickled files are not opened
        heads.load(tmp_path, tiny_target)


def test_a_head_made_elsewhere_is_converted(tiny_target: Path, tmp_path: Path) -> None:
    h = head(tiny_target)
    embed = h.embed_tokens.weight.detach().bfloat16()
    specforge(h, tmp_path / "same", torch.bfloat16, **{"embed_tokens.weight": embed})
    assert heads.convert(tmp_path / "same", tiny_target, tmp_path / "a") == [], "the target's, rounded"
    written = load_file(tmp_path / "a" / "model.safetensors")
    assert written.keys() == heads.own_weights(h).keys() and written["fc.weight"].dtype == torch.bfloat16
    more = {"embed_tokens.weight": embed + 1, "lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}
    specforge(h, tmp_path / "own", **more)
    assert heads.convert(tmp_path / "own", tiny_target, tmp_path / "b") == list(more)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["drafter_online"]["replaced"] == list(more)
    assert states_equal(heads.load(tmp_path / "b"), h)


def test_what_cannot_be_a_head_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    good = heads.save(head(tiny_target), tmp_path / "good")
    weights = load_file(good / "model.safetensors")
    config = json.loads((good / "config.json").read_text())

    def broken(name: str, w: dict[str, torch.Tensor], **change: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(w, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        return folder

    layer = {**config["transformer_layer_config"], "hidden_size": 64}
    without = {n: t for n, t in weights.items() if n != "fc.weight"}
    for folder, says in (
        (tmp_path / "nothing", "not a readable head"),
        (broken("a", without), "lacks fc.weight"),
        (broken("b", {**weights, "x": torch.ones(1)}), "has x, which"),
        (broken("c", {**weights, "norm.weight": torch.ones(3)}), r"norm.weight of shape \[3\]"),
        (broken("d", weights, transformer_layer_config=layer), "hidden_size 64, but its target"),
        (broken("e", weights, eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"\[1, 2, 9\] do not fit"),
    ):
        with pytest.raises(HeadError, match=says):
            heads.load(folder)
    (good / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-20])
    with pytest.raises(HeadError, match="not a readable head"):
        heads.load(good)
    with pytest.raises(HeadError, match="not a model"):
        heads.fresh(tmp_path / "nothing")
    with pytest.raises(HeadError, match="counts has token 99"):
        heads.fresh(tiny_target, draft_vocab_size=5, counts={99: 1})


def test_auxiliary_layers_fit_the_target() -> None:
    assert architecture.aux_layers(36) == [2, 18, 33] and architecture.aux_layers(4) == [1, 2, 3]
    for n in range(2, 80):
        architecture.check_aux_layers(architecture.aux_layers(n), n)
    for bad in ([1], [2, 1, 3], [1, 1, 2], [0, 5], [-1, 2]):
        with pytest.raises(HeadError, match="auxiliary layers"):
            architecture.check_aux_layers(bad, 4)


def test_the_base_names_the_architecture_and_not_the_weights(tiny_target: Path) -> None:
    config = architecture.target_config(tiny_target)
    base = architecture.base_of(config)
    assert base.startswith("qwen3-l4-h32-v40-") and architecture.base_of(config.to_dict()) == base
    assert architecture.base_of({**config.to_dict(), "vocab_size": 41}) != base


def test_the_targets_weights_can_be_refreshed(tiny_target: Path) -> None:
    """An LM head of the target's rows follows them, and one that somebody trained does not."""
    h = head(tiny_target, draft_vocab_size=10, counts={t: 1 for t in range(30, 40)})
    lm_head, norm, embed = torch.randn(VOCABULARY, HIDDEN), torch.randn(HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    heads.refresh(h, embed=embed, norm=norm, lm_head=lm_head)
    assert torch.equal(h.verifier_lm_head.weight, lm_head[30:]) and torch.equal(h.verifier_norm.weight, norm)
    assert torch.equal(h.embed_tokens.weight, embed) and torch.equal(h.lm_head.weight, lm_head[30:])
    own = torch.randn(10, HIDDEN)
    h.lm_head.weight.data.copy_(own)
    heads.refresh(h, lm_head=lm_head + 1, counts={t: 10_000 for t in range(10)})
    assert torch.equal(h.verifier_lm_head.weight, lm_head[30:] + 1) and torch.equal(h.lm_head.weight, own)
    heads.fit_vocabulary(h, "nowhere", {t: 10_000 for t in range(10)})  # its target is not read
    assert bool(h.t2d[30:].all())


def test_a_head_drafts_what_is_said(tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The vocabulary's first tokens while nothing is known; then those that the target says, in what is saved too."""
    h = head(tiny_target, draft_vocab_size=10)
    ours = getattr(h.config, heads.OURS)
    assert bool(h.t2d[:10].all()) and ours["vocabulary_coverage"] is None
    lm_head = torch.randn(VOCABULARY, HIDDEN)
    few, said = {t: 10 for t in range(30, 40)}, {**{t: 1000 for t in range(32, 40)}, 3: 500, 5: 1, 31: 2}
    heads.refresh(h, lm_head=lm_head, counts=few)
    assert bool(h.t2d[:10].all()), "too few to go by"
    drafter = Eagle3(h)
    with caplog.at_level(logging.INFO):
        heads.refresh(h, lm_head=lm_head, counts=said)
    assert "drafts other 10 of 40 tokens, 0.9999 of the target's text; it was 0.0589" in caplog.text
    wanted = [3, 31, *range(32, 40)]
    assert h.t2d.nonzero()[:, 0].tolist() == wanted == (h.d2t + torch.arange(10)).tolist()
    assert torch.equal(h.lm_head.weight, lm_head[wanted]) and torch.equal(h.verifier_lm_head.weight, lm_head[wanted])
    assert drafter.to_draft is not None and drafter.to_draft[3] == 0 and drafter.to_draft[39] == 9
    heads.refresh(h, lm_head=lm_head, counts={**said, 6: 3})
    assert h.t2d.nonzero()[:, 0].tolist() == wanted, "too little to gain"
    h = head(tiny_target, draft_vocab_size=10)
    heads.fit_vocabulary(h, "nowhere", few)  # nothing to do, nothing to read
    heads.fit_vocabulary(h, tiny_target, said)
    assert h.t2d.nonzero()[:, 0].tolist() == wanted and h.lm_head.weight.equal(h.verifier_lm_head.weight)
    assert h.lm_head.weight.equal(model(tiny_target).get_output_embeddings().weight[wanted])
    again = heads.load(heads.save(h, tmp_path), tiny_target)
    assert torch.equal(again.t2d, h.t2d) and torch.equal(again.d2t, h.d2t)


def test_targets_are_the_targets_own_logits(tiny_target: Path) -> None:
    s = sample(tiny_target)
    with torch.no_grad():
        logits = model(tiny_target)(s.input_ids[None]).logits[0]
    for drafter, rows in (
        (Eagle3(head(tiny_target)), slice(None)),
        (Eagle3(head(tiny_target, draft_vocab_size=10, counts={t: 1 for t in range(10)})), slice(0, 10)),
    ):
        torch.testing.assert_close(
            drafter.targets(s.verifier_last_hidden_states[1:]), logits[1:, rows], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("d2t", lambda t: t.index_fill(0, torch.tensor([9]), 60), "d2t makes draft token 9 the target's 69"),
        ("d2t", lambda t: t.index_fill(0, torch.tensor([0]), -1), "d2t makes draft token 0 the target's -1"),
        ("d2t", lambda t: t.index_fill(0, torch.tensor([3]), int(t[2]) - 1), "is not after that of token 2"),
        ("t2d", lambda t: t.roll(1), "t2d marks other tokens than the 10 that d2t names"),
    ],
)
def test_a_vocabulary_map_that_does_not_fit_is_refused(
    name: str, change: Any, says: str, tiny_target: Path, tmp_path: Path
) -> None:
    heads.save(head(tiny_target, draft_vocab_size=10, counts={t: 1 for t in range(20, 30)}), tmp_path)
    assert heads.load(tmp_path, tiny_target).draft_vocab_size == 10
    weights = load_file(tmp_path / heads.MODEL)
    save_file({**weights, name: change(weights[name])}, tmp_path / heads.MODEL)
    with pytest.raises(HeadError, match="the vocabulary map of") as error:
        heads.load(tmp_path, tiny_target)
    assert says in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_target_fixture_is_shared(tiny_target: Path) -> None:
    assert target(tiny_target.parent) == tiny_target
