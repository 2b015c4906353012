"""docs/claims.md once `oneround reproduce` has measured: the page with records of the named studies, run on digits in small."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import answers
import claims
import studied
from bank_pairs import EPOCHS
from oneround.runs.archive import find_runs, keep
from oneround.studies.named_study import NamedStudy, Variant, cells, read_study
from oneround.studies.reproduce import reproduce

SMALL: dict[str, Any] = {
    "data": "digits", "model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "training.batch_size": 64, "training.learning_rate": 0.05,
    "snapshots": 0, "local.workers": 1, "partition.alpha": 1.0,
}  # fmt: skip
TEACHER = {"fusion.0.teacher": {"encoder": {"kind": "cnn", "width": 8}, "epochs": 1, "batch_size": 32}}
CHOSEN = {
    "anchors": ["V4", "V5", "V7", "V9", "V10"], "family": ["V4", "V6", "V12"], "v10-repairs": ["V10", "rate of σ × 0.01"],
    "explosion": ["V12", "V12 with γ/σ² (V13)"], "aligned": ["V4", "turned by the cosine"], "rerun-noise": ["V4"],
    "label-skew": ["FAFI", "feature vote", "dynamic prototypes", "queue"], "transfer": ["2 blocks", "9 blocks"],
    "later-run": ["FAFI", "from features"], "mergenet": ["averaging", "MergeNet", "pooled images"],
}  # fmt: skip
"""Study → variants that are measured."""


def small(name: str) -> NamedStudy:
    """A named study on digits, with a small network and few epochs; the variants and settings keep their names."""
    study = read_study(name)
    if name not in CHOSEN:
        return study
    changes: dict[str, dict[str, Any]] = {
        "MergeNet": TEACHER,
        "V6": {"objective.stages.0.share": 0.5, "training.epochs": 2},
    }
    variants = {
        key: each.model_copy(update={"set": {**each.set, **changes.get(key, {})}})
        for key, each in study.variants.items()
    }
    sets = {**study.set, **SMALL}
    if name == "mergenet":
        sets["rounds"] = 3
    if name == "explosion":
        sets["training.epochs"] = 2
    if name == "transfer":  # the network has four blocks
        sets["fusion"] = ["iffi", {"kind": "split", "chosen": 1}, {"kind": "split", "chosen": 3}]
        variants |= {
            f"{blocks} blocks": Variant(method="fafi", rule=f"split chosen={depth}")
            for blocks, depth in ((2, 1), (9, 3))
        }
    settings = {}
    for key, each in study.settings.items():
        own = {**each.set, **({"training.epochs": 2} if "training.epochs" in each.set else {})}
        chosen = [variant for variant in each.variants or variants if variant in CHOSEN[name]]
        if chosen and key not in ("Fashion-MNIST", "half public", "α = 100"):
            settings[key] = each.model_copy(update={"set": own, "variants": chosen})
    partitions = [1] if study.training_seeds else [1, 2, 3]
    return study.model_copy(update={"set": sets, "settings": settings, "variants": variants, "partitions": partitions})


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of all these studies."""
    folder = tmp_path_factory.mktemp("records")
    for name in CHOSEN:
        known = [folder / "anchors.json"] if name in ("family", "v10-repairs", "aligned", "rerun-noise") else []
        progress = reproduce(cells(small(name)), folder / f"{name}.json", folder / "runs", known=known)
        assert not progress.failed and not progress.left, name
    return folder


@pytest.fixture()
def on_digits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let the page take records from a folder."""

    def clear() -> None:
        studied.progress_of.cache_clear()
        studied.study_rows.cache_clear()

    def use(folder: Path) -> None:
        clear()
        monkeypatch.setattr(studied, "RECORDS", folder)
        monkeypatch.setattr(studied, "read_study", small)

    yield use
    monkeypatch.undo()
    clear()


def accuracies(folder: Path, study: str, rule: str, **keys: Any) -> list[float]:
    """In percent, by partition: of the runs that have these keys (`__` for a dot), read from the file itself."""
    runs = json.loads((folder / f"{study}.json").read_text())["runs"]
    wanted = {key.replace("__", "."): value for key, value in keys.items()}
    mine = [run for run in runs if all(run["keys"].get(key) == value for key, value in wanted.items())]
    mine.sort(key=lambda run: run["keys"]["seeds.partition"])
    return [100 * run["rules"][rule] for run in mine]


def shown(
    folder: Path, one: tuple[str, str, dict[str, Any]], other: tuple[str, str, dict[str, Any]], mode: str = ""
) -> str:
    """`+3.2`: the mean difference of two groups of runs."""
    ours, theirs = (accuracies(folder, study, rule + mode, **keys) for study, rule, keys in (one, other))
    assert len(ours) == len(theirs) == 3
    return f"{mean(a - b for a, b in zip(ours, theirs, strict=True)):+.1f}"


def test_rows_rest_on_the_studies_and_say_what_their_records_say(records: Path, on_digits: Any) -> None:
    on_digits(records)
    rows = {(note, row.number): row for note in claims.notes() for row in claims.rows_of(note)}
    clean: dict[str, Any] = {"label_noise.clients": None}
    contrasts = {
        ("001", 1): (("label-skew", "iffi", {"method": "fafi+queue"}), ("label-skew", "iffi", {"method": "fafi", **clean})),
        ("001", 3): (("anchors", "iffi", {"method": "bank"}), ("anchors", "iffi", {"method": "fafi"})),
        ("001", 4): (("label-skew", "feature-vote", {"method": "fafi", **clean}), ("label-skew", "iffi", {"method": "fafi", **clean})),
        ("001", 12): (
            ("transfer", "split chosen=1", {"partition.alpha": 0.05}),
            ("transfer", "split chosen=3", {"partition.alpha": 0.05}),
        ),
        ("002", 29): (("v10-repairs", "iffi", {"method": "etf-uncertainty-slow"}), ("v10-repairs", "iffi", {"method": "etf-uncertainty"})),
        ("002", 32): (("anchors", "iffi", {"method": "etf-entropy"}), ("anchors", "iffi", {"method": "etf"})),
        ("003", 1): (("mergenet", "average", {"method": "mergenet"}), ("mergenet", "average", {"method": "fedavg", "rounds": 3})),
        ("004", 11): (("explosion", "iffi", {"method": "etf-guarded-raw"}), ("explosion", "iffi", {"method": "etf-attenuated-raw"})),
    }  # fmt: skip
    assert sum(shown(records, *each) != "+0.0" for each in contrasts.values()) > 4
    for key, (one, other) in contrasts.items():
        row = rows[key]
        assert row.answer.evidence == f"results/{one[0]}.json", key
        assert row.answer.evaluation.startswith(shown(records, one, other)), key
        assert row.answer.evaluation.endswith("(n = 3)"), key
        if key != ("004", 11):
            assert row.answer.transductive.startswith(shown(records, one, other, ", transductive")), key
    v6, v5 = (
        mean(accuracies(records, study, "iffi", method=method))
        for study, method in (("family", "two-stage"), ("anchors", "bank"))
    )
    assert rows["000", 21].answer.evidence == "results/family.json" and rows["000", 21].answer.evaluation.startswith(
        f"{v6 - v5:+.1f}"
    )
    assert "with clean clients" in rows["001", 17].why and "wrong labels: " in rows["001", 17].answer.evaluation
    assert "on digits, in a setting chosen to show it: +41.5" in rows["004", 11].why
    assert rows["002", 23].why.startswith("not on the note's partition; minus V7")
    assert rows["003", 3].answer.evidence == "results/mergenet.json", "against clients that train as long alone"
    alone = json.loads((records / "mergenet.json").read_text())["runs"]
    assert any(run["keys"]["rounds"] == 1 and run["keys"]["partition.clients"] == 5 for run in alone)


def test_the_page_names_studies_with_their_cells_seconds_and_spread(records: Path, on_digits: Any) -> None:
    before = claims.page()
    on_digits(records)
    page = claims.page()
    assert page != before == claims.PAGE.read_text(encoding="utf-8")
    assert re.search(
        r"\*\*Rows that rest on a \[study\]\(reproduce.md\):\*\* [\d, -]+ on \[`anchors`\]", page.replace("\n", " ")
    )
    runs = json.loads((records / "label-skew.json").read_text())["runs"]
    text = " ".join(page.split())
    assert len(runs) == 9
    assert f"18 of 18 cells, 3 partitions, both modes, {mean(run['seconds'] for run in runs):.1f} s a run" in text
    assert "FAFI on one partition with 5 training seeds has a standard deviation of" in text
    assert "turned by the cosine " in text and "minus V4" in text


def test_a_changed_record_is_another_page(records: Path, on_digits: Any, tmp_path: Path) -> None:
    on_digits(records)
    page = claims.page().splitlines()
    for file in records.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    changed = json.loads((tmp_path / "label-skew.json").read_text())
    (one, *_) = [run for run in changed["runs"] if run["keys"]["method"] == "fafi+queue"]
    one["rules"]["iffi"] += 0.03
    one["curves"]["iffi"]["1"] += 0.03
    (tmp_path / "label-skew.json").write_text(json.dumps(changed))
    on_digits(tmp_path)
    different = [(old, new) for old, new in zip(page, claims.page().splitlines(), strict=True) if old != new]
    assert [old[:21] for old, _ in different] == ["| 1 | A local queue o"]


def test_a_study_with_fewer_pairs_than_the_older_record_does_not_replace_it(
    records: Path, on_digits: Any, tmp_path: Path
) -> None:
    content = json.loads((records / "anchors.json").read_text())
    content["runs"] = [run for run in content["runs"] if run["keys"]["seeds.partition"] < 3]
    (tmp_path / "anchors.json").write_text(json.dumps(content))
    before = {note: claims.rows_of(note) for note in claims.notes()}
    on_digits(tmp_path)
    assert {note: claims.rows_of(note) for note in claims.notes()} == before
    on_digits(records)
    assert {note: claims.rows_of(note) for note in claims.notes()} != before


def test_source_note_000_keeps_the_older_record_until_the_study_has_a_pair_at_every_alpha(tmp_path: Path) -> None:
    assert answers.record_of_000(tmp_path) == "cifar10_note_000", "no record"
    study = read_study("note-000")
    every = [
        cell
        for cell in cells(study, {**SMALL, "training.epochs": 2}, partitions=[1])
        if cell.setting.startswith("shared")
    ]
    of_one = [cell for cell in every if cell.setting == "shared, α = 0.5"]
    reproduce(of_one, tmp_path / "note-000.json", tmp_path / "runs")
    runs = find_runs([tmp_path / "note-000.json"])
    curves = {rule: dict.fromkeys(EPOCHS, max(curve.values())) for rule, curve in runs[0].curves.items()}
    longer = [replace(run, measurements=replace(run.measurements, curves=curves)) for run in runs]
    keep(longer, tmp_path / "note-000.json")
    assert answers.record_of_000(tmp_path) == "cifar10_note_000", "one α of four"
    whole = [replace(run, keys={**run.keys, "partition.alpha": alpha}) for run in longer for alpha in answers.ALPHAS]
    keep(whole, tmp_path / "note-000.json")
    assert answers.record_of_000(tmp_path) == "note-000"
