"""docs/claims.md: a row for every claim of the source notes, made of the records, and verdicts that say no more than these do."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from dataclasses import replace

import pytest

import answers
import claims
import studied
from oneround.analysis.statistics import REFUTED, REPRODUCED, Summary, compare_paired
from oneround.config.load import load, parse_override
from oneround.runs.log import Measurements
from oneround.runs.record import RunRecord
from oneround.studies.named_study import cells, read_study
from oneround.studies.outcome import rows_of
from oneround.studies.reproduce import Progress
from test_readme import ROOT

CLAIMS = {"000": 21, "001": 18, "002": 32, "003": 8, "004": 11}
"""How many claims each source note makes; they are numbered from 1."""


@pytest.fixture(scope="module")
def rows() -> dict[str, list[claims.Row]]:
    return {note: claims.rows_of(note) for note in answers.notes()}


def test_the_page_is_what_the_records_say() -> None:
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page(), "run python benchmarks/claims.py"


def test_every_claim_has_a_row(rows: dict[str, list[claims.Row]]) -> None:
    assert {note: [row.number for row in each] for note, each in rows.items()} == {
        note: list(range(1, number + 1)) for note, number in CLAIMS.items()
    }
    page = claims.PAGE.read_text(encoding="utf-8").split("## Source note ")[1:]
    shown = {part[:3]: [int(number) for number in re.findall(r"^\| (\d+) \|", part, re.MULTILINE)] for part in page}
    assert shown == {note: list(range(1, number + 1)) for note, number in CLAIMS.items()}


def test_a_verdict_has_evidence_and_an_open_row_a_way_to_decide_it(rows: dict[str, list[claims.Row]]) -> None:
    later = {
        (note, number)
        for _, by_note in claims.left_open(rows)
        for note, numbers in by_note.items()
        for number in numbers
    }
    for note, each in rows.items():
        for row in each:
            where = f"{note}, claim {row.number}: {row.verdict}"
            if row.verdict == answers.NOT_MEASURED or row.verdict.startswith("undecidable"):
                assert row.open or (note, row.number) in later, f"{where}, and no command"
            else:
                assert row.verdict in (REPRODUCED, REFUTED), where
                assert (note, row.number) not in later, f"{where}, and a command that would decide it"
            assert row.answer.evidence or row.verdict == answers.NOT_MEASURED, where
            assert "{" not in row.why and "nan" not in row.why, where


def test_named_tests_are_there() -> None:
    sources = (ROOT / "tests").rglob("test_*.py")
    known = {
        node.name
        for path in sources
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    page = claims.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) >= 3 and named <= known
    assert all((ROOT / path).is_file() for path in re.findall(r"tests/[\w/]+\.py", page))


def commands() -> list[str]:
    own = [
        claim["command"] for note in answers.notes().values() for claim in note["claims"].values() if "command" in claim
    ]
    return list(dict.fromkeys([*own, *(entry["command"] for entry in answers.listed()["more"])]))


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_is_there(command: str) -> None:
    program, *words = shlex.split(command.removeprefix("for seed in 2 3; do ").replace("; done", ""))
    sets = [parse_override(words[at + 1]) for at, word in enumerate(words) if word == "--set"]
    if program == "python":
        assert (ROOT / words[0]).is_file()
        if words[0].endswith("explosion.py"):
            spec = importlib.util.spec_from_file_location("explosion", ROOT / words[0])
            assert spec is not None and spec.loader is not None
            example = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(example)
            load("v12", (example.overrides("etf-attenuated", 1) | dict(sets)).items())
        return
    assert program == "oneround"
    verb, *rest = words
    methods = rest[: next(at for at, word in enumerate(rest) if word.startswith("--"))]
    if verb == "reproduce":
        assert (
            len(
                cells(
                    read_study(rest[0]),
                    sets,
                    variants=[word for at, word in enumerate(rest) if rest[at - 1] == "--variant"],
                )
            )
            > 1
        )
        return
    assert verb in ("run", "sweep") and methods
    grid = [words[at + 1].partition("=") for at, word in enumerate(words) if word == "--grid"]
    varied = [parse_override(f"{key}={value}") for key, _, values in grid for value in values.split(",")]
    for method in methods:
        if method.endswith(".yaml"):
            assert (ROOT / method).is_file()
            continue
        for change in varied or [None]:
            load(method, [*sets, *([change] if change else [])])


def test_a_variant_of_a_preset_is_not_taken_for_the_preset() -> None:
    run = answers.runs_of(answers.FAMILY, answers.LEARNED)[0]
    assert answers.is_preset(run)
    for key, value in (("alignment.weight.rate", 0.01), ("alignment.weight.clip", True)):
        assert key in run.keys and not answers.is_preset(replace(run, keys={**run.keys, key: value}))


def test_a_transductive_score_stands_beside_that_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers.transductive(answers.FAMILY, "v9", "v7") == "–", "its runs were scored in evaluation mode only"

    def scored(run: RunRecord) -> RunRecord:
        assert run.result is not None
        rules = run.result["rules"]
        transductive = {"accuracy": rules["iffi"]["accuracy"] + (0.1 if run.method == "etf-entropy" else 0.0)}
        return replace(run, result={**run.result, "rules": {**rules, answers.TRANSDUCTIVE: transductive}})

    runs = tuple(scored(run) if run.partition_seed < 3 else run for run in answers.runs(answers.FAMILY))
    monkeypatch.setattr(answers, "runs", lambda name: runs)
    evaluation = [answers.contrast(answers.FAMILY, "v9", "v7", "iffi").values[at] for at in (0, 1)]
    assert answers.contrast(answers.FAMILY, "v9", "v7", answers.TRANSDUCTIVE).values == pytest.approx(
        [value + 10 for value in evaluation]
    )
    shown = answers.contrasted(answers.FAMILY, "v9", "v7", "better")
    assert shown.evaluation.endswith("(n = 3)") and shown.transductive.endswith("(n = 2)")


def test_the_study_of_source_note_002_decides_once_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = [16.7670, 22.1632, 4.5188, 17.3472, 11.2946]
    before = answers.learned(0, noted), answers.scored(answers.LEARNED)
    assert [answer.verdict for answer in before] == ["not measured", "not measured"]
    study, runs = read_study("note-002"), {}
    every = cells(study)
    for cell in every:
        accuracy = {"iffi": 0.3, "iffi, transductive": 0.46 + cell.seed / 1000}
        weights = {f"client_{at}": {1: {"lambda_raw": value * 1.2}, 50: {}} for at, value in enumerate(noted)}
        measured = Measurements(curves={rule: {50: value} for rule, value in accuracy.items()}, epochs=weights)
        result = {
            "rules": {rule: {"accuracy": value} for rule, value in accuracy.items()},
            "partition": "",
            "clients": {},
        }
        runs[cell] = RunRecord(answers.ROOT, keys=cell.keys, measurements=measured, result=result)
    rows = rows_of(study, Progress(every, runs))
    monkeypatch.setattr(studied, "study_rows", lambda name: rows if name == "note-002" else {})
    learned, scored = answers.learned(0, noted), answers.scored(answers.LEARNED)
    assert (learned.verdict, learned.evidence) == ("reproduced", "results/note-002.json")
    assert (
        "20 %; 5 training seeds" in learned.why
        and answers.learned(0, [value / 2 for value in noted]).verdict == REFUTED
    )
    (test,) = scored.tests
    assert test.of_figure and test.difference.values == pytest.approx([-0.25, -0.15, -0.05, 0.05, 0.15])
    assert claims.verdict_of([test], claims.corrected([test])) == REPRODUCED
    assert (scored.evaluation, scored.transductive) == ("30.0 ± 0.0 (n = 5)", "46.3 ± 0.2 (n = 5)")


def verdict(*values: float, of_figure: bool = False, others: int = 0) -> str:
    tests = [answers.Test(Summary(values), of_figure), *[answers.Test(Summary((1.0, -1.0, 0.5)))] * others]
    return claims.verdict_of(tests[:1], claims.corrected(tests)[:1])


def test_verdicts_need_three_pairs_and_a_difference() -> None:
    assert verdict(5.0, 5.1, 5.2) == "reproduced"
    assert verdict(-5.0, -5.1, -5.2) == "refuted"
    assert verdict(5.0, -4.0, 6.0) == "undecidable with 3 pairs"
    assert verdict(5.0, 5.0001) == "undecidable with 2 pairs", "however small p is"
    assert verdict(-30.0) == "undecidable with 1 pair"


def test_a_figure_is_refuted_by_a_difference_either_way_and_reproduced_only_by_a_narrow_interval() -> None:
    assert verdict(5.0, 5.1, 5.2, of_figure=True) == verdict(-5.0, -5.1, -5.2, of_figure=True) == "refuted"
    assert verdict(0.5, -0.4, 0.1, of_figure=True) == "reproduced"
    assert verdict(9.0, -8.0, 1.0, of_figure=True) == "undecidable with 3 pairs"


def test_the_tests_of_a_note_are_corrected_together() -> None:
    values = (2.0, 3.0, 4.0)
    (alone,) = compare_paired([Summary(values)])
    assert alone.p is not None and 0.025 < alone.p < 0.05
    assert verdict(*values) == "reproduced" and verdict(*values, others=1) == "undecidable with 3 pairs"
