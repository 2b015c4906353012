"""`oneround diagnose` prints every finding with its evidence and advice, and always ends well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.cli import app

RUNS = Path(__file__).parents[1] / "compat" / "runs"


def command(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diagnose", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_findings_come_with_evidence_and_advice_once() -> None:
    findings = diagnose(RUNS / "rails").findings
    code, output = command(RUNS / "rails")
    assert code == 0 and "3 to 4 of 4 epochs; 8 findings" in output
    assert "problem exploding-lambda" in output and len(findings) == 8
    for each in findings:
        line = f"{each.where}: {each.evidence}" if each.where else each.evidence
        assert " ".join(line.split()) in output
    exploding = [each.advice for each in findings if each.rule == "exploding-lambda"]
    assert len(exploding) == 2 and output.count(exploding[0]) == 1


def test_a_run_without_findings_says_what_was_looked_for() -> None:
    code, output = command(RUNS / "fp32")
    assert code == 0 and "2 of 2 epochs; no findings" in output
    assert "looked for never-learned" in output and "found nothing" in output
    assert "unstable-sigma (no learned σ)" in output and "effective rank" not in output


def test_deep_measures_every_encoder(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "fp32", tmp_path / "run")
    code, output = command(tmp_path / "run", "--deep")
    assert code == 0 and "effective rank" in output
    assert all(f"client_00{number}" in output for number in range(3))


def test_json_has_every_field_of_every_finding() -> None:
    done = CliRunner().invoke(app, ["diagnose", str(RUNS / "rails"), "--json"])
    content = json.loads(done.output, parse_constant=pytest.fail)
    fields = {"rule", "severity", "client", "epoch", "value", "threshold", "evidence", "advice", "about"}
    assert len(content["findings"]) == 8 and all(each.keys() == fields for each in content["findings"])
    assert content["clients"] == {"client_000": 4, "client_001": 3, "client_002": 4}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert command(tmp_path)[0] != 0
