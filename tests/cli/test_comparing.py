"""compare and sweep as commands: every layout and format, records, limits that are no numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from commands import bad, good

HEADS = {
    "methods": "mean ± 95 %",
    "rounds": "Δ etf-entropy",
    "lambda": "client_000",
    "peaks": "peak",
    "goals": "50 %",
    "gradients": "mean cosine",
}


@pytest.mark.parametrize("words", [("--interest", "nan"), ("--goal", "nan"), ("--interest", "inf")])
def test_what_is_no_number_is_no_limit(finished: Path, words: tuple[str, str]) -> None:
    assert f"{' '.join(words)}: must be a number" in bad("compare", str(finished), *words)


@pytest.mark.parametrize("layout", HEADS)
def test_every_layout_has_its_columns(layout: str, grid: Path, tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    assert f"written to {target}" in good("compare", str(grid), "--layout", layout, "--out", str(target))
    heads = next(csv.reader(target.read_text().splitlines()))
    assert any(HEADS[layout] in head for head in heads), heads


@pytest.mark.parametrize(
    ("suffix", "text"), [(".md", "|---"), (".tex", r"\toprule"), (".csv", "method,"), (".json", "[")]
)
def test_the_format_follows_the_name(suffix: str, text: str, grid: Path, tmp_path: Path) -> None:
    good("compare", str(grid), "--out", str(tmp_path / f"table{suffix}"))
    assert text in (tmp_path / f"table{suffix}").read_text()


def test_a_format_nobody_knows_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    assert "table.doc: must end in .md, .csv, .tex, .json" in bad(
        "compare", "nowhere", "--out", "table.doc", cwd=tmp_path
    )


def test_options_choose_baseline_methods_and_rule(grid: Path, tmp_path: Path) -> None:
    def rows(*options: str) -> list[dict[str, object]]:
        good("compare", str(grid), "--out", str(tmp_path / "t.json"), *options)
        sheets = json.loads((tmp_path / "t.json").read_text())
        return [row for sheet in sheets for row in sheet["rows"]]

    by_method = {row["method"]: row for row in rows("--baseline", "v9")}
    assert "difference" in by_method["fafi"] and "difference" not in by_method["etf-entropy"]
    assert {row["rule"] for row in rows("--rule", "average")} == {"average"}
    assert {row["method"] for row in rows("--method", "fafi")} == {"fafi"}


def test_a_kept_record_compares_like_its_runs(grid: Path, tmp_path: Path) -> None:
    record = tmp_path / "kept.json"
    first = good("compare", str(grid), "--keep", str(record))
    assert "6 runs kept" in first
    assert good("compare", str(record)).split() == first.replace(f"6 runs kept in {record}", "").split()


def test_a_sweep_asks_for_values_it_can_read(tmp_path: Path) -> None:
    for words, message in (
        (("--partitions", "5-1"), "partitions"),
        (("--alpha", "many"), "alpha"),
        (("--grid", "training.epochs"), "--grid training.epochs"),
        (("--grid", "training.epohcs=1,2"), "did you mean"),
    ):
        assert message in bad("sweep", "fafi", *words, "--out", str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()
