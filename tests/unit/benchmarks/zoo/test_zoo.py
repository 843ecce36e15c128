"""`tessera-bench zoo`: its lists, its record, its table, and one model from end to end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cli import main
from benchmarks.device.report.page import update_page
from benchmarks.report.options import UsageError
from benchmarks.zoo import build, pruning
from benchmarks.zoo.names import QUICK, STOCK, ZOO, find_models
from benchmarks.zoo.outcome import ZooOutcome, read_outcomes, write_outcomes
from benchmarks.zoo.page import BEGIN, render_table, zoo_figures
from benchmarks.zoo.run import try_model

DONE = ZooOutcome(
    "timm/resnet10t",
    "abc",
    parameters=4_926_079,
    traced=True,
    share=0.251,
    pruned_share=0.249,
    trace_s=1.4,
    compiled=True,
    compile_s=3.6,
    graph_bytes=123_456,
    graphs=3,
    right=True,
    error=3e-7,
    torch_error=2e-7,
)
REFUSED = ZooOutcome("timm/vgg11_bn", "abc", pruning_failed="KeyError").failed("a | b\n  c")


def test_lists_have_the_stated_lengths() -> None:
    counts = Counter(model.source for model in ZOO.values())
    assert counts == {"own": 6, "torchvision": 17, "timm": 60, "transformers": 5}
    assert (len(QUICK), len(STOCK)) == (6, 82)


def test_models_are_found_by_name_and_source() -> None:
    assert find_models(("bert", "own/mobile", "bert")) == ("transformers/bert", "own/mobile")
    assert len(find_models(("timm", "timm/resnet10t"))) == 60
    with pytest.raises(UsageError, match="no model of the zoo is called 'resnet9000'"):
        find_models(("resnet9000",))


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    assert read_outcomes(path) == {}
    write_outcomes(path, [DONE, REFUSED])
    assert list(read_outcomes(path).values()) == [DONE, REFUSED]
    with path.open("a") as file:
        file.write('{"key": "timm/xcit')
    assert len(read_outcomes(path)) == 2
    path.write_text('{"no": "outcome"}\n\n')
    with pytest.raises(UsageError, match="line 1 is no outcome of the zoo"):
        read_outcomes(path)


def test_table_and_figures() -> None:
    outcomes = {each.key: each for each in (DONE, REFUSED, replace(DONE, key="timm/x", raw=True))}
    lines = render_table(outcomes).splitlines()
    assert lines[0] == ("**timm**: 2 of 3 trace, compile and train right. 57 more were not tried.")
    assert lines[4] == "| resnet10t | 4.93 M | 0.25 | – | 0.25 | 1 s | 4 s | 123 KB | 1.5 | yes |"
    assert lines[5] == "| vgg11_bn | – | – | – | fails | – | – | – | – | no: a \\| b c |"
    other = replace(DONE, key="timm/y", code="abd", layer_norm="submodel")
    text = render_table({**outcomes, other.key: other})
    assert (
        "| y | 4.93 M | – | 0.25 | 0.25 | 1 s | 4 s | 123 KB | 1.5 | yes, as `submodel` |" in text
    )
    assert "found by 2 versions of the code" in text
    figures = {each.name: each for each in zoo_figures(outcomes)}
    assert figures["zoo.timm.passed"].value == 2
    assert figures["zoo.timm.passed"].target is None  # not all sixty were tried
    assert figures["zoo.raw_tracebacks"].met is False
    own = {key: replace(DONE, key=key) for key in QUICK}
    (aim,) = (each for each in zoo_figures(own) if each.name == "zoo.own.passed")
    assert aim.met is True
    mobile = replace(DONE, key="torchvision/mobilenet_v2", compile_s=6.0)
    (slow, _) = (each for each in zoo_figures({mobile.key: mobile}) if "zoo.torch" not in each.name)
    assert (slow.name, slow.value, slow.met) == ("zoo.compile_s.mobilenet_v2", 6.0, False)


def test_page_and_record_agree(tmp_path: Path) -> None:
    docs = Path(__file__).parents[4] / "docs"
    page = tmp_path / "models.md"
    page.write_text((docs / "models.md").read_text(encoding="utf-8"), encoding="utf-8")
    update_page(page, render_table(read_outcomes(docs / "models.jsonl")), BEGIN)
    assert page.read_text(encoding="utf-8") == (docs / "models.md").read_text(encoding="utf-8")


def test_model_without_its_package_is_skipped_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    outcome = try_model("timm/resnet10t", 1)
    assert outcome.reason == "not tried: timm is not installed; pip install 'tessera-fl[zoo]'"
    assert not outcome.raw
    with pytest.raises(UsageError, match="needs timm: pip install"):
        build.build(ZOO["timm/resnet10t"])


def test_missing_torch_pruning_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "find_spec", lambda name: None)
    share, why = pruning.pruned_share(torch.nn.Linear(2, 2), torch.ones(1, 2))
    outcome = replace(DONE, pruned_share=share, pruning_failed=why)
    assert "| 0.25 | – | – | 1 s |" in render_table({outcome.key: outcome})


def test_one_model_from_end_to_end_and_then_from_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, report, page = tmp_path / "zoo.jsonl", tmp_path / "zoo.json", tmp_path / "models.md"
    page.write_text(f"# Models\n{BEGIN}\nold\n<!-- end -->\n")
    arguments = ["zoo", "--models", "own/generator", "--record", str(record)]
    assert main([*arguments, "--json", str(report), "--update", str(page)]) == 0
    (outcome,) = json.loads(report.read_text())["models"]
    assert outcome["traced"]
    assert outcome["compiled"]
    assert outcome["right"]
    assert outcome["reason"] == ""
    assert 0.4 < outcome["share"] < 0.6
    assert outcome["submodel_share"] < outcome["share"]
    assert 0 < outcome["error"] <= 2 * outcome["torch_error"] + 1e-6
    assert "| generator |" in page.read_text()
    assert "zoo own/generator" in capsys.readouterr().err
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "zoo own/generator" not in printed.err  # nothing is left to do
    assert "1 of 1 trace" in printed.out


def test_page_without_a_place_is_refused_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "models.md"
    page.write_text("# Models\n")
    assert main(["zoo", "--quick", "--update", str(page)]) == 2
    assert "has no place for the table" in capsys.readouterr().err
