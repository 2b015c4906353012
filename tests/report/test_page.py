"""The report: what it shows is what was measured, and nothing from outside gets through."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oneround.analysis.comparison import compare
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.cli import app
from oneround.errors import RecipeError, RunError
from oneround.report import report
from oneround.runs.archive import find_runs
from reports import HOSTILE, Page


def test_numbers_are_those_of_the_result(reported_run: Path) -> None:
    result = json.loads((reported_run / "result.json").read_text())
    page = Page(report([reported_run]))
    for name, score in result["rules"].items():
        shown = [f"{100 * value:.2f}" if value is not None else "–" for value in score["per_class"]]
        assert page.rows(name, f"{100 * score['accuracy']:.2f}", *shown)
    matrices = [_matrix(table) for table in page.tables if table[0][0].startswith("true class")]
    assert matrices == [
        result["rules"]["iffi"]["confusion"],
        *(score["confusion"] for score in result["clients"].values()),
    ]
    assert page.row("down (broadcasts)")[1] == f"{result['bytes_down']:,}"
    assert page.row("up (uploads)")[1] == f"{result['bytes_up']:,}"
    counts = json.loads((reported_run / "partition.json").read_text())["class_counts"]
    for number, row in enumerate(counts):
        assert page.row(f"client_00{number}", *map(str, row))


def _matrix(table: list[list[str]]) -> list[list[int]]:
    return [[int(cell) for cell in row[1:]] for row in table[1:]]


def test_every_part_is_there_and_every_chart_has_words_and_data(reported_run: Path) -> None:
    page = Page(report([reported_run]))
    for heading in ("Result", "Findings", "Who holds what", "Accuracy over local training", "Weight of alignment λ", "Loss terms",
                    "Gradient cosines", "Classes: fused model and clients", "Communication", "Environment and how to repeat it"):  # fmt: skip
        assert heading in page.texts
    figures = page.count("figure")
    assert figures > 15
    assert page.count("desc") == page.count("figcaption") == figures
    assert page.count("h1") == 1
    for text in ("Schedule s(p)", "Loss terms of client_002", "Confusion of client_000", "The resolved recipe"):
        assert text in page.texts
    assert len(report([reported_run])) < 1_500_000


def test_what_comes_from_files_is_escaped(reported_run: Path) -> None:
    text = report([reported_run])
    assert "<script" not in text
    assert HOSTILE in Page(text).text
    assert "script" not in {name for name, _ in Page(text).tags}
    assert "http" not in re.sub("http-equiv", "", text), "no address of anything"


def test_a_run_that_is_not_finished_says_so(reported_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "half"
    shutil.copytree(reported_run, run_dir)
    (run_dir / "result.json").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if json.loads(line)["epoch"] < 3) + '\n{"torn'
    )
    page = Page(report([run_dir]))
    assert "Not finished" in page.texts
    assert f"oneround run {run_dir} --resume" in page.texts
    assert "Classes: fused model and clients" not in page.texts
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(reported_run / "recipe.yaml", bare)
    assert "Not finished" in Page(report([bare])).texts


def test_a_sweep_has_the_verdicts_of_compare(reported_sweep: Path) -> None:
    page = Page(report([reported_sweep], "plain"))
    (group,) = compare(find_runs([reported_sweep]), "plain")
    verdict = group.comparisons["better · iffi"].verdict(1.0)
    assert "better by" in verdict
    assert page.row("better")[-1] == verdict
    assert f" against plain: {verdict}" in page.texts
    assert page.row("plain")[-1] == "baseline"
    assert any("Shown in full: 2 of 8 runs" in text for text in page.texts)
    for name in ("a1", "b4"):
        assert any("finished" in row for row in page.rows(name))


def test_a_sweep_of_one_method_compares_its_rules(reported_sweep: Path) -> None:
    page = Page(report([reported_sweep / "a1", reported_sweep / "a2"]))
    assert "typicality-gated" in {row[0].split(" · ")[-1] for table in page.tables for row in table}
    assert any(row[-1] == "baseline" for table in page.tables for row in table)


def test_a_sweep_under_way_is_reported(reported_sweep: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "under_way"
    shutil.copytree(reported_sweep, run_dir)
    (run_dir / "b3" / "result.json").unlink()
    page = Page(report([run_dir]))
    assert any("epoch 3 of 3" in row for row in page.rows("b3"))
    assert any("only partitions that all have are compared" in text for text in page.texts)
    for name in ("a1", "a2", "b4"):
        (run_dir / name / "result.json").unlink()
    assert Page(report([run_dir / "a3", run_dir / "b1"])), "nothing in common is no reason to fail"


def test_mistakes_are_one_line(reported_sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="no run in"):
        report([tmp_path])
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(RunError, match=r"kept\.json: a file; a report needs run folders"):
        report([tmp_path / "kept.json"])
    with pytest.raises(RecipeError, match="--baseline nobody"):
        report([reported_sweep], "nobody")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("result.json", "rules", value) for value in ([], {}, {"iffi": {}})),
        *(("result.json", "rules.iffi.accuracy", value) for value in (math.nan, "0.5", 7)),
        ("result.json", "rules.iffi.confusion", "x"),
        ("result.json", "rules.iffi.confusion", [[1]]),
        ("result.json", "clients.client_000.per_class", None),
        ("result.json", "remarks", None),
        ("result.json", "partition", 3),
        ("environment.json", "packages", None),
        *(("partition.json", "class_counts", value) for value in ([[1]], "abc", [], [[1, 2], [3]])),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(reported_run: Path, tmp_path: Path, name: str, key: str, value: Any) -> None:
    shutil.copytree(reported_run, tmp_path / "run")
    content = json.loads((tmp_path / "run" / name).read_text())
    *path, last = key.split(".")
    node = content
    for step in path:
        node = node[step]
    node[last] = value
    (tmp_path / "run" / name).write_text(json.dumps(content))
    assert name in refusal("report", tmp_path / "run")
    assert (name in refusal("compare", tmp_path / "run")) == (name != "partition.json")
    assert diagnose(tmp_path / "run").run.counts.keys() == diagnose(reported_run).run.counts.keys()


def refusal(command: str, run_dir: Path) -> str:
    """What a command refuses a folder with: one line that names the file, what is wrong and what to do."""
    done = CliRunner().invoke(app, [command, str(run_dir), "--out", str(run_dir / "out.md")])
    if done.exit_code == 0:
        return ""
    assert isinstance(done.exception, RunError), done.exception
    assert re.fullmatch(r"\S+\.json: damaged \(.*\); remove it( and make it again with .*)?", str(done.exception))
    return str(done.exception)


def test_damaged_lines_of_the_log_are_skipped(reported_run: Path, tmp_path: Path) -> None:
    shutil.copytree(reported_run, tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    _, *lines = [json.loads(line) for line in log.read_text().splitlines()]  # the first is lost
    without = {
        "epoch": ["event", "client", "epoch", "gradients"],
        "client": ["client"],
        "snapshot": ["accuracy", "rule"],
    }
    for kind, keys in without.items():
        whole = [line for line in lines if line.get("event") == kind and set(keys) <= line.keys()]
        for key, line in zip(keys, whole, strict=False):
            line.pop(key)
    next(line for line in lines if "gradients" in line)["gradients"] = {"features": {}}
    next(line for line in lines if "lambda_raw" in line)["lambda_raw"] = "much"
    log.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + b"\xff\xfe\n[]\n3\n")
    for words in (
        ["report"],
        ["compare"],
        *(["compare", "--layout", layout] for layout in ("lambda", "rounds", "peaks", "gradients")),
    ):
        done = CliRunner().invoke(app, [*words, str(tmp_path / "run"), "--out", str(tmp_path / "out.md")])
        assert done.exit_code == 0, (words, done.exception)
    assert diagnose(tmp_path / "run").applied == diagnose(reported_run).applied
    log.write_text("")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "out.md")]).exit_code == 0
