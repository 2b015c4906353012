"""Named studies: each is a set of recipes that can be run and compared, and a mistake in a file of one's own is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from named_studies import STUDY, study_file
from oneround.acts import resolve
from oneround.config.load import change
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.runs.record import RunRecord, keys_of
from oneround.studies.named_study import Cell, cells, keys_today, names, read_study, seeds_of
from oneround.studies.reproduce import trainings
from oneround.studies.sweep import part_of

DEALT = ("data.", "partition.", "public", "validation", "label_noise", "seeds.")
"""Keys that say who holds which sample."""


@pytest.mark.parametrize("name", names())
def test_every_variant_of_a_study_is_a_recipe_and_has_the_others_partitions(name: str) -> None:
    study = read_study(name)
    found = cells(study)
    assert len({cell.name for cell in found}) == len(found) > 1 and study.question.endswith("?")
    by_unit: dict[tuple[str, int, int], set[str]] = {}
    for cell in found:
        assert cell.recipe.evaluation.transductive == 256, f"{cell.name} is scored in both modes"
        dealt = {key: value for key, value in cell.keys.items() if key.startswith(DEALT)}
        unit = cell.setting, cell.partition, cell.seed
        by_unit.setdefault(unit, set()).add(json.dumps(dealt, sort_keys=True))
    assert all(len(each) == 1 for each in by_unit.values())
    learned = {(json.dumps(dict(cell.keys), sort_keys=True), cell.rule) for cell in found}
    assert len(learned) == len(found), "no two cells are the same rule of the same run"


def test_the_page_lists_the_studies_and_its_example_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/reproduce.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == names()
    (example,) = re.findall(r"```yaml\n(.+?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example, encoding="utf-8")
    assert len(cells(read_study(str(tmp_path / "mine.yaml")))) == 8


def test_the_page_s_estimates_are_those_of_the_studies_and_no_call_is_longer_than_nine_minutes() -> None:
    page = (Path(__file__).parents[2] / "docs/reproduce.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(row[0] for row in rows) == names()
    anchors = [cell.keys for cell in cells(read_study("anchors"))]
    for name, *numbers, calls in rows:
        study, longest, measured = read_study(name), 0.0, set[Cell]()
        runs, epochs, seconds = (int(number.replace(",", "")) for number in numbers)
        for call in re.findall(r"`([^`]+)`", calls):
            every = int(call.rpartition("/")[2]) if "--part " in call else 1
            chosen = seeds_of(call.split("--partitions ")[1]) if "--partitions" in call else ()
            together = trainings(cells(study, partitions=chosen))
            for number in range(every):
                mine = part_of(together, f"{number + 1}/{every}")
                if "--known" in call:
                    mine = [each for each in mine if each[0].keys not in anchors]
                longest = max(longest, sum(1.0 if each[0].first is None else 2.0 for each in mine))
                measured |= {each[0] for each in mine}
        firsts = [cell.first for cell in measured if cell.first is not None]
        recipes = [*(cell.recipe for cell in measured), *firsts]
        assert (runs, epochs) == (len(recipes), sum(recipe.epochs for recipe in recipes)), name
        assert name == "mergenet" or seconds == round(1.1 * epochs + 8 * runs), name
        slowest = 251 if name == "mergenet" else seconds / runs * (1.7 if name == "note-000" else 1.0)
        assert longest * slowest <= 9 * 60, name


def test_studies_that_share_cells_write_them_alike() -> None:
    anchors = [cell.keys for cell in cells(read_study("anchors"))]
    for name, shared in (
        ("rerun-noise", {"V4"}),
        ("aligned", {"V4", "V7"}),
        ("family", {"V4"}),
        ("v10-repairs", {"V10"}),
    ):
        found = {cell.variant for cell in cells(read_study(name)) if cell.keys in anchors}
        assert found == shared, name


def test_cells_come_partition_by_partition_and_can_be_chosen(tmp_path: Path) -> None:
    study = read_study(str(study_file(tmp_path)))
    assert [cell.name for cell in cells(study)] == [
        "plain: V4, partition 1", "plain: V7, partition 1", "unnormalised: V7, partition 1",
        "plain: V4, partition 2", "plain: V7, partition 2", "unnormalised: V7, partition 2", "wrong labels: V4, partition 2",
    ]  # fmt: skip
    chosen = cells(study, variants=["V4"], settings=["plain"], partitions=[7, 9])
    assert [cell.name for cell in chosen] == ["plain: V4, partition 7", "plain: V4, partition 9"]
    assert all(chosen[0].keys[f"seeds.{purpose}"] == 7 for purpose in ("partition", "initialisation", "training"))
    repeats = cells(read_study(str(study_file(tmp_path, training_seeds="4-5"))), settings=["plain"], variants=["V4"])
    assert [(cell.keys["seeds.initialisation"], cell.keys["seeds.training"]) for cell in repeats] == [
        (1, 4), (1, 5), (2, 4), (2, 5),
    ]  # fmt: skip
    assert cells(study, {"training.epochs": 9})[0].recipe.training.epochs == 9
    for chosen_by, says in (
        ({"variants": ["V5"]}, "--variant V5: not in"),
        ({"settings": ["plan"]}, "did you mean 'plain'"),
    ):
        with pytest.raises(RecipeError, match=says):
            cells(study, **chosen_by)


def test_a_rule_that_a_variant_is_not_fused_by_is_one_line(tmp_path: Path) -> None:
    study = read_study(str(study_file(tmp_path, variants={"V4": {"method": "fafi", "rule": "avrage"}, "V7": "etf"})))
    with pytest.raises(
        RecipeError, match=r"^rule = avrage: fafi is not fused by it; did you mean 'average'\? \(iffi, average\)$"
    ):
        cells(study)
    assert {cell.rule for cell in cells(study, variants=["V7"])} == {None}


def test_seeds_on_the_command_line() -> None:
    assert seeds_of("1-3") == [1, 2, 3] and seeds_of("2,7") == [2, 7] and seeds_of("4") == [4]
    for text in ("x", "3-1", "1,1"):
        with pytest.raises(RecipeError, match="--partitions"):
            seeds_of(text)


def test_a_run_is_of_the_cell_whose_keys_it_has(digits: Dataset, tmp_path: Path) -> None:
    raw = {**STUDY["set"]}
    del raw["model.encoder"]
    study = read_study(str(study_file(tmp_path, set=raw)))
    plain, v7, unnormalised, *_, noisy = cells(study)
    for cell in (plain, v7, unnormalised, noisy):
        run = RunRecord(tmp_path, keys=keys_of(resolve(cell.recipe, digits).plain()))
        assert [other.name for other in cells(study) if other.has_keys(keys_today(run))] == [cell.name]
    for key, value in (("training.epochs", 4), ("fusion", ["iffi"]), ("seeds.training", 5)):
        run = RunRecord(tmp_path, keys=keys_of(change(resolve(plain.recipe, digits), {key: value}).plain()))
        assert not plain.has_keys(keys_today(run)), key
    wide = Cell("", "", 1, 1, change(plain.recipe, {"model.encoder": {"kind": "cnn", "width": 6}}))
    run = RunRecord(tmp_path, keys=keys_of(resolve(plain.recipe, digits).plain()))
    assert plain.has_keys(keys_today(run)) and not wide.has_keys(keys_today(run))


@pytest.mark.parametrize("name", names())
def test_a_run_is_found_again_when_recipes_have_more_options_than_its_record(name: str, tmp_path: Path) -> None:
    newer = {"alignment.initial": "random", "alignment.anchors.norm": "one", "training.factor": 0.2, "trace.every": 50}
    for cell in cells(read_study(name), partitions=[1]):
        older = {key: value for key, value in cell.keys.items() if newer.get(key) != value}
        run = RunRecord(
            tmp_path, keys=keys_of({"alignment.initial": "random", **older} if "alignment" in older else older)
        )
        assert cell.has_keys(keys_today(run)), cell.name
    assert older.keys() < cell.keys.keys() and older.keys() < keys_today(run).keys()
    gone = {**older, "alignment.gone": 1}
    assert keys_today(RunRecord(tmp_path, keys=gone)) == gone


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"baseline": "V5"}, "baseline: nothing is called V5"),
        ({"note": {"plan": {"V4": 1.0}}}, "note: nothing is called plan; did you mean 'plain'? (plain, "),
        ({"note": {"plain": {"V9": 1.0}}}, "note.plain: nothing is called V9"),
        ({"settings": {"plain": {"variants": ["V1"]}}}, "settings.plain.variants: nothing is called V1"),
        ({"variants": {}}, "variants"),
        ({"partitions": "5-1"}, "5-1 is no range"),
        ({"question": 3}, "question = 3: must be text"),
        ({"sets": {}}, "sets"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_study_is_one_line_that_names_the_file(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = study_file(tmp_path, **changes)
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        read_study(str(path))
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


def test_an_unknown_study_is_answered_with_the_names() -> None:
    with pytest.raises(
        RecipeError, match=r"^no study 'ancors'; did you mean 'anchors'\? \(studies: aligned, anchors, .*\)$"
    ):
        read_study("ancors")
