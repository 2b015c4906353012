"""Recipes are read from presets, files and overrides; YAML means what people mean."""

from __future__ import annotations

from pathlib import Path

import pytest

import oneround
from oneround.config.load import change, load, parse_federated, parse_override, presets, read_yaml
from oneround.errors import RecipeError


@pytest.mark.parametrize("text", ["nonsense", "=3", ""])
def test_an_override_needs_a_key_and_a_value(text: str) -> None:
    with pytest.raises(RecipeError, match="key=value"):
        parse_override(text)


def test_presets_have_an_idea_and_aliases_work() -> None:
    assert all(raw["about"]["idea"] for raw in presets().values())
    assert load("v4") == load("fafi")
    with pytest.raises(RecipeError, match="did you mean 'fafi'"):
        load("faffi")


def test_a_file_extends_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: fafi\nobjective:\n  terms:\n    supervised-contrastive: {temperature: 0.5}\npartition: iid\n"
    )
    recipe = load(path)
    assert recipe.method == "fafi"
    assert recipe.objective.terms["supervised-contrastive"].temperature == 0.5
    assert set(recipe.objective.terms) == set(load("fafi").objective.terms)
    assert recipe.partition.kind == "iid"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "mapping"),
        ("a: [1,\n", "not valid YAML"),
        ("training: {epochs: 1}\ntraining: {epochs: 2}\n", "duplicate key"),
        ("\x00", "YAML"),
        ("seeds: {[1]: 2}\n", "a sequence cannot be a key"),
        ("snapshots: !!int abc\n", "abc"),
        ("snapshots: !!bool maybe\n", "maybe"),
        ("snapshots: !!timestamp 2020-13-45\n", "month must be"),
        ("snapshots: " + "9" * 5000, "4300 digits"),
        ("fusion: &a [*a]\n", "an anchor .* contains itself"),
        ("seeds: &a {training: *a}\n", "an anchor .* contains itself"),
        pytest.param("fusion: " + "[" * 3000 + "]" * 3000, "nested too deeply", marks=pytest.mark.slow),
        ("extends: faffi\n", r"extends: no preset 'faffi'; did you mean 'fafi'\? \(presets: [^;]*\)$"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words) as caught:
        load(path)
    assert "bad.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_kind_replaces_the_old_options() -> None:
    recipe = load("demo", [("partition.kind", "shards"), ("partition.labels_per_client", 3)])
    assert recipe.partition.dump() == {"kind": "shards", "clients": 5, "minimum": 0, "labels_per_client": 3}


def test_yaml_means_what_people_mean() -> None:
    content = read_yaml("a: 1e-3\nb: off\nc: 5\nd: true\ne: .5\nf: -2.5E+3\ng: 010\n", "test")
    assert content == {"a": 1e-3, "b": "off", "c": 5, "d": True, "e": 0.5, "f": -2500.0, "g": 8}


def test_a_date_is_text() -> None:
    assert read_yaml("{a: 2020-01-01, b: 2020-13-45}", "test") == {"a": "2020-01-01", "b": "2020-13-45"}


def test_merge_keys_work_wherever_their_anchor_stands() -> None:
    text = "a: {b: &b {<<: &c {x: 1, y: 1}, x: 2}}\nd: {<<: *b, y: 3}\ne: {<<: [*b, *c]}\n"
    content = read_yaml(text, "test")
    assert content == {"a": {"b": {"x": 2, "y": 1}}, "d": {"x": 2, "y": 3}, "e": {"x": 2, "y": 1}}


def test_presets_are_as_the_strict_reader_reads_them() -> None:
    files = sorted(Path(oneround.__file__).parent.joinpath("methods").glob("*.yaml"))
    assert presets() == {file.stem: read_yaml(file.read_text(encoding="utf-8"), file.name) for file in files}


@pytest.mark.parametrize("key", ["rails", "safeguards"])
def test_the_former_name_of_a_key_is_read_and_today_s_is_written(key: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(f"extends: fafi\n{key}: {{on_explosion: stop}}\n")
    recipe = load(tmp_path / "old.yaml", [(f"{key}.largest_weight", 7)])
    assert (recipe.safeguards.on_explosion, recipe.safeguards.largest_weight) == ("stop", 7)
    assert "safeguards:" in recipe.to_yaml() and "rails" not in recipe.to_yaml()
    assert recipe == change(load(tmp_path / "old.yaml"), {f"{key}.largest_weight": 7})
    plain = recipe.plain()
    assert parse_federated({key: plain.pop("safeguards"), **plain}).safeguards == recipe.safeguards
    assert recipe.digest == load("fafi", {"rails.on_explosion": "stop", "safeguards.largest_weight": 7}).digest


def test_both_names_of_a_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("extends: fafi\nrails: {on_explosion: stop}\nsafeguards: {largest_weight: 7}\n")
    with pytest.raises(RecipeError, match="rails is the former name of safeguards; give one of them"):
        load(tmp_path / "both.yaml")
