"""The report: right on good input, a gap where data is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
import report_samples
from report_samples import drafter_rows, rows, write_run
from typer.testing import CliRunner

from rollspec.cli import app
from rollspec.config.sections import ReuseConfig
from rollspec.errors import RollspecError
from rollspec.telemetry import figures
from rollspec.telemetry.figures import STYLES, Figure, Line, line_chart
from rollspec.telemetry.report import render, report_json, write_report
from rollspec.telemetry.runs import Run, load_run
from rollspec.telemetry.summary import calibration, compare, limits, summarize, tokens_per_step

DRAWN: dict[Any, Figure] = {}


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chart that is the same on several pages is drawn for the first."""

    def once(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        def drawn(*args: Any, **kwargs: Any) -> Figure:
            key = (draw.__name__, repr(args), repr(kwargs))
            return DRAWN[key] if key in DRAWN else DRAWN.setdefault(key, draw(*args, **kwargs))

        return drawn

    for name in ("line_chart", "histogram"):
        monkeypatch.setattr(figures, name, once(getattr(figures, name)))


def headline(run: Run, baseline: Run | None) -> str:
    return report_json(run, baseline)["headline"]


class _Checker(HTMLParser):
    """Every tag closed in order, nothing loaded from elsewhere."""

    void = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, (tag, attrs)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_self_contained(demo: Path) -> None:
    path, _ = write_report(demo)
    page = path.read_text()
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert "script" not in checker.tags and "link" not in checker.tags
    assert page.count("<svg") == 12
    assert not re.search(r"url\(|@import|nan|None", page)
    assert "history.save ×1" in page and "verl.trainer.main_ppo" in page
    assert path == demo / "report.html"


def test_json_states_the_same_numbers(demo: Path) -> None:
    path, numbers = write_report(demo)
    data = json.loads(path.with_suffix(".json").read_text())
    assert data == json.loads(json.dumps(numbers))
    assert re.fullmatch(
        r"generation 1\.\d\dx faster from the second epoch on; reward (higher|lower) by \S+, "
        r"lengths (higher|lower) by \S+, with no second run without rollspec to compare that with",
        data["headline"],
    )
    assert data["comparison"]["later"]["steps"] == 12
    assert data["run"]["faults"] == {"history.save": 1}
    assert data["provenance"]["baseline"]["git_sha"] == "0" * 40


def test_phases_that_rollouts_do_not_change_are_compared(tmp_path: Path) -> None:
    def job(name: str, seconds: float) -> Run:
        more = {"timing_s/old_log_prob": seconds, "timing_s/update_actor": 3 * seconds}
        return load_run(write_run(tmp_path / name, [{**row, **more} for row in rows(False)]))

    slow, quick = job("slow", 1.1), job("quick", 1.0)
    assert compare(slow, quick)["other_phases"]["value"] == pytest.approx(1 / 1.1, abs=0.02)
    assert compare(slow, quick)["relative"]["value"] == pytest.approx(1.1, abs=0.02), "as fast by the clock"
    page = " ".join(render(slow, quick).split())
    assert "was 0.92× as fast in slow" in page and "Relative to these phases generation is 1.09× as fast" in page
    said = report_json(slow, quick)["headline"]
    assert "relative to the job's other phases, which were 0.92x as fast" in said
    assert "relative" not in report_json(quick, quick)["headline"], "where they are as fast there is nothing to say"
    bare = [
        {k: v for k, v in row.items() if k == "timing_s/gen" or not k.startswith("timing_s/")} for row in rows(False)
    ]
    nothing = load_run(write_run(tmp_path / "nothing", bare))
    assert compare(nothing, quick)["other_phases"] is None and compare(nothing, quick)["relative"] is None


def test_tokens_without_single_lengths(tmp_path: Path) -> None:
    data = rows(True)
    exact = [sum(row["lengths"]) for row in data]
    for row in data:
        del row["lengths"]
    assert tokens_per_step(load_run(write_run(tmp_path / "r", data))) == pytest.approx(exact)


def test_no_speed_up_is_not_called_one(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", rows(False)), write_run(tmp_path / "b", rows(False, seed=9))
    text = headline(load_run(b), load_run(a))
    assert "no faster or slower than noise" in text
    slow = load_run(write_run(tmp_path / "c", [{**r, "timing_s/gen": 2 * r["timing_s/gen"]} for r in rows(False)]))
    assert "2.00x slower" in headline(slow, load_run(a))


def test_a_change_is_one_beyond_that_of_runs_without_rollspec(tmp_path: Path) -> None:
    """Steps of a training are not independent: the measure is what runs without rollspec differ by."""

    def moved(seed: int, reward: float) -> Path:
        changed = [{**row, "critic/score/mean": row["critic/score/mean"] + reward} for row in rows(False, seed=seed)]
        return write_run(tmp_path / f"{seed}{reward}", changed)

    calm = [moved(seed, 0.0) for seed in range(4)]
    worse = write_run(tmp_path / "b", [{**r, "critic/score/mean": r["critic/score/mean"] - 0.2} for r in rows(True)])
    c = write_report(worse, calm)[1]["comparison"]
    assert c["reward"]["pairs"] == 3 and c["reward"]["unchanged"] is False and c["length"]["unchanged"] is True
    within = "within what runs without rollspec differ by (3 pairs)"
    assert f"lengths {within}, reward lower by 0.2" in write_report(worse, calm)[1]["headline"]
    wild = [moved(seed, reward) for seed, reward in enumerate((0.0, 0.2, -0.2, 0.1))]
    c = write_report(worse, wild)[1]["comparison"]
    assert c["reward"]["unchanged"] is True and c["reward"]["noise"] > 0.2
    assert f"reward and lengths {within}" in write_report(worse, wild)[1]["headline"]


def test_pairs_that_were_measured_before_lie_beside_the_baseline(demo: Path) -> None:
    repeats = demo / "baseline" / "repeats.json"
    repeats.write_text(json.dumps({"groups": [[rows(False, seed=2 * i + k) for k in (0, 1)] for i in range(3)]}))
    c = write_report(demo)[1]["comparison"]
    assert c["length"]["pairs"] == 3 and c["length"]["noise"] > 0
    repeats.write_text(json.dumps({"groups": [[rows(False)[:5], rows(False, seed=1)]] * 3}))
    c = write_report(demo)[1]["comparison"]
    assert c["length"]["noise"] is None, "a run that lacks steps says nothing"
    repeats.write_text("[")
    with pytest.raises(RollspecError, match=r"repeats.json cannot be read .*; repair or delete it"):
        write_report(demo)


def test_health_of_the_rollouts(demo: Path, tmp_path: Path) -> None:
    page = render(load_run(demo / "rollspec"))
    assert "0.20 % of ratios are outside 0.8 to 1.25" in page
    assert "5.0 % of tokens repeat the prompt's last response of that number, 4.8 % would by chance" in page
    assert re.search(r'class="ok"><i>[^<]*</i><div><b>Health warnings</b><span>No threshold', page)
    warned = [{**row, "rollspec/health/warnings": 1, "rollspec/health/warnings/overlap": 1} for row in rows(True)]
    run = load_run(write_run(tmp_path / "warned", warned))
    assert summarize(run)["health_warnings"] == {"overlap": 18}
    page = render(run)
    assert "overlap in 18 steps" in page
    for what in ("Independent of the last epoch", "Health warnings"):
        assert re.search(rf'class="warn"><i>[^<]*</i><div><b>{what}', page)


def test_a_lossy_run_is_called_lossy_everywhere(demo: Path, tmp_path: Path) -> None:
    lossy = {"rollspec/reuse/lossy": 1.0, "rollspec/reuse/bias": 0.5, "rollspec/reuse/skip_ratio": 0.25,
             "rollspec/reuse/avg_saved_tokens": 40.0, "rollspec/reuse/avg_resp_len": 80.0}  # fmt: skip
    run = load_run(write_run(tmp_path / "spec_rl", [{**row, **lossy} for row in rows(True)]))
    assert headline(run, load_run(demo / "baseline")).endswith(
        "; the rollouts of spec_rl are LOSSY (reuse.mode = lenient)"
    )
    page = render(run, load_run(demo / "baseline"))
    assert "Lossy by reuse.mode = lenient, bias 0.5" in page and "25 % of rollouts are an old response whole" in page
    assert not re.search("nan|None", page)
    assert "LOSSY" not in render(load_run(demo / "rollspec"))


def test_kept_noise_is_named_in_the_distribution_of_the_rollouts(demo: Path, tmp_path: Path) -> None:
    kept = {"rollspec/reuse/correlated": 1.0, "rollspec/reuse/share": 0.5}
    page = render(load_run(write_run(tmp_path / "coupled_reuse", [{**row, **kept} for row in rows(True)])))
    assert "Exact for each policy, correlated across epochs" in page and "Lossy" not in page
    named = re.search(r"\(reuse\.mode = (\w+)\)", page)
    assert named and named[1] in get_args(ReuseConfig.model_fields["mode"].annotation), "it can be set"
    assert "correlated across epochs" not in render(load_run(demo / "rollspec"))


def test_one_run_alone(demo: Path) -> None:
    _, numbers = write_report(demo / "rollspec")
    assert "no baseline" in numbers["headline"] and numbers["comparison"] is None


def test_baseline_alone_says_what_is_missing(demo: Path) -> None:
    page = render(load_run(demo / "baseline"))
    assert page.count('class="missing"') == 1
    missing = re.search(r"No step carries the metrics \(docs/metrics.md\) of: (.*?)\.</p>", page, re.DOTALL)
    assert missing is not None and [part.strip() for part in missing[1].split(";")] == [
        "Acceptance length", "Acceptance by drafter", "Acceptance by draft position", "Speed-up and its limits",
        "Draft lengths chosen", "Cost of proposing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [{"training/global_step": 1}, {"timing_s/gen": 3.0}, {"critic/score/mean": 0.5, "timing_s/step": 0.0}, {"x": "y"}],
)
def test_hardly_any_metric(tmp_path: Path, row: dict) -> None:
    a = write_run(tmp_path / "a", [row])
    b = write_run(tmp_path / "b", [{**row, "timing_s/gen": None}])
    for page in (render(load_run(a)), render(load_run(a), load_run(b)), render(load_run(b), load_run(a))):
        assert "No step carries" in page


def test_lengths_fall_back_to_percentiles(tmp_path: Path) -> None:
    data = [{k: v for k, v in row.items() if k != "lengths"} for row in rows(True)]
    page = render(load_run(write_run(tmp_path / "r", data)))
    assert "did not record the single lengths" in page


def test_names_from_a_run_are_escaped(tmp_path: Path) -> None:
    evil = "<img src=x>"
    data = [{**row, f"rollspec/accept/rate/{evil}": 0.5} for row in rows(True)]
    page = render(load_run(write_run(tmp_path / "r", data, note=evil)))
    assert evil not in page and "&lt;img" in page


def test_different_settings_are_noted(demo: Path) -> None:
    path = demo / "baseline" / "run.json"
    data = json.loads(path.read_text())
    data["settings"]["n"] = 4
    path.write_text(json.dumps(data))
    page, numbers = write_report(demo)
    assert numbers["differing"] == {"settings": ["n"]}
    assert "The runs differ in settings: n; the comparison includes that difference." in page.read_text()


def test_command(demo: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        [
            "report",
            str(demo / "rollspec"),
            "--baseline",
            str(demo / "baseline"),
            "--out",
            str(tmp_path / "x"),
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["comparison"]["steps"] == 18
    assert (tmp_path / "x" / "report.html").is_file()
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2 and "no run folder" in missing.output


def test_a_chart_is_text_in_the_colours_of_the_page() -> None:
    lines = [Line("a <b>", "s-run", [1, 2, 3], [1.0, None, 0.5]), Line("c", "s-2", [1, 2, 3], [0.25, 0.25, 0.25])]
    marks = [(1.5, "epoch 2"), (9.5, "outside")]
    figure = line_chart("T & U", "$share$", lines, x_label="step", marks=marks, percent=True)
    assert figure.legend == (("a <b>", "s-run"), ("c", "s-2"))
    drawn = figure.svg
    assert drawn.startswith("<svg ") and 'role="img" aria-label="T &amp; U"' in drawn and drawn.endswith("</svg>\n")
    assert "<title>a &lt;b&gt;, 3: 50.0 %</title>" in drawn and drawn.count("<title>") == 5, "one for each value"
    assert (
        all(f">{text}</text>" in drawn for text in ("step", "$share$", "epoch 2", "100 %")) and "outside" not in drawn
    )
    assert "var(--run)" in drawn and "var(--c2)" in drawn and not any(colour in drawn for colour in STYLES.values())
    assert line_chart("T", "", [Line("", "s-1", [1], [None])]) == Figure("T"), "nothing was measured"


def test_how_far_from_optimal(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits(load_run(demo / "rollspec"))
    assert found is not None and found["best_fixed_arm"] == "suffix:4"
    assert [found[k] for k in ("got", "oracle", "perfect")] == pytest.approx([1.6, 1.6 / 0.98, 3.2])
    assert found["regret"] == pytest.approx(1 / 0.98 - 1) and found["max_acceptance"] == pytest.approx(0.81)
    assert found["regret_measured"] == pytest.approx(1.1 / 1.04 - 1) and found["regrets_part"]
    page = unescape(render(load_run(demo / "rollspec")))
    assert "took 2.0 % more time; with each arm's modelled time corrected by its timed steps, 5.8 % more" in page
    assert "The two differ by more than 3 points" in page
    assert "you got 1.60×; the best fixed setting (suffix:4) would have got 1.52×; the oracle 1.63×" in page
    monkeypatch.setattr(report_samples, "CLOCK", {"played": 1.1, "oracle": 1.1 / (1 / 0.98 + 0.029)})
    near = limits(load_run(write_run(tmp_path / "near", rows(True))))
    assert near is not None and near["regret_measured"] - near["regret"] == pytest.approx(0.029)
    assert not near["regrets_part"], "2.9 points"
    assert limits(load_run(demo / "baseline")) is None
    assert "How far from optimal" not in render(load_run(demo / "baseline"))
    data = write_report(demo)[1]
    assert data["limits"]["best_fixed"] == pytest.approx(1.6 / 1.05)


def test_a_draft_head_has_its_figures(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", drafter_rows(rows(True))))[0].read_text()
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    for title in ("acceptance length", "staleness", "training loss"):
        assert f"Draft head: {title}" in page
    assert ">accept_0<" in page and ">rejected<" in page, "every term of the loss is drawn"
    assert "18.0 of 27.0 s, over all replicas. Requests waited 12.0 ms" in page and "4 swaps, 2.00 ms each." in page
    assert ">v1<" in page and ">v4<" in page, "swaps are marked"
    untrained = [
        {k: v for k, v in r.items() if k != "rollspec/drafter/accept_length"} for r in drafter_rows(rows(True))
    ]
    page = write_report(write_run(tmp_path / "never", untrained))[0].read_text()
    assert "of: Draft head: acceptance length.</p>" in page
    assert "Draft head" not in write_report(write_run(tmp_path / "plain", rows(True)))[0].read_text()


@pytest.mark.parametrize(("predicted", "drafted", "parts"), [(0.5, 600, True), (0.43, 600, False), (0.5, 400, False)])
def test_predicted_and_accepted_drafts_are_shown(tmp_path: Path, predicted: float, drafted: int, parts: bool) -> None:
    made = [
        {"rollspec/accept/drafted": d, "rollspec/accept/accepted": 0.4 * d, "rollspec/accept/predicted": predicted}
        for d in (drafted / 4, 3 * drafted / 4)
    ]
    run = load_run(write_run(tmp_path / "run", [*made, {}]))
    found = calibration(run)
    assert found is not None and found["parts"] is parts
    assert (found["predicted"], found["accepted"]) == pytest.approx((predicted * drafted, 0.4 * drafted))
    page = render(run)
    assert f"Of {drafted} draft tokens" in page and ("They part by more than 20 %" in page) is parts
    assert calibration(load_run(write_run(tmp_path / "none", [{}]))) is None
