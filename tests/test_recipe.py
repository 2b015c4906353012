"""A recipe is strict, says in one line what is wrong, and runs again as it was saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oneround import reading
from oneround.errors import RecipeError
from oneround.parts import slot
from oneround.reading import change, load, parse, parse_federated, presets, read_yaml
from oneround.recipe import Recipe

BAD = {
    "training.epohcs=3": ["training.epohcs", "3", "did you mean 'epochs'"],
    "training.epochs=0": ["training.epochs", "0", "≥ 1"],
    "training.epochs=2.5": ["training.epochs", "2.5", "whole number"],
    "training.epochs='50'": ["training.epochs", '"50"', "whole number"],
    "training.learning_rate=-1": ["training.learning_rate", "-1", "> 0"],
    "training.momentum=1": ["training.momentum", "1", "< 1"],
    "training.last_batch=warp": ["training.last_batch", "warp", "wrap, keep, drop", "did you mean 'wrap'"],
    "training=3": ["training", "3", "mapping"],
    "training.augment.crop_scale=[0.9, 0.2]": ["training.augment", "crop_scale"],
    "training.augment.hue=0.7": ["training.augment.hue", "0.7", "≤ 0.5"],
    "partition.alpha=0": ["partition.alpha", "0", "> 0"],
    "partition.alpha=.nan": ["partition.alpha"],
    "partition.clients=0": ["partition.clients", "0", "≥ 1"],
    "partition.kind=dirichlt": ["partition", "dirichlt", "did you mean 'dirichlet'"],
    "data.kind=cifar": ["data", "cifar", "did you mean 'cifar10'"],
    "model.encoder=resnet19": ["model.encoder", "resnet19", "did you mean 'resnet18'"],
    "model.encoder.kind=7": ["model.encoder", "7", "resnet18"],
    "model.encoder={kind: cnn, width: 3}": ["model.encoder.width", "3"],
    "fusion=[]": ["fusion", "at least 1"],
    "fusion=[ifi]": ["fusion.0", "ifi", "did you mean 'iffi'"],
    "fusion=[{kind: typicality-gated, bta: 2}]": ["fusion.0.bta", "2", "did you mean 'beta'"],
    "objective.terms.supcon.weight=1": ["objective.terms.supcon", "supervised-contrastive"],
    "objective.terms.cross-entropy.wieght=1": ["objective.terms.cross-entropy.wieght", "did you mean 'weight'"],
    "objective={terms: {}}": ["objective", "empty", "cross-entropy"],
    "seeds.partition=-1": ["seeds.partition", "-1", "≥ 0"],
    "snapshots=-1": ["snapshots", "-1", "≥ 0"],
    "local.device=gpu": ["local.device", "gpu", "cuda"],
    "local.threads=0": ["local.threads", "0", "≥ 1"],
    "local.deterministic=yes": ["local.deterministic", "yes", "true or false"],
    "locale.threads=1": ["locale.threads = 1", "did you mean 'local'"],
    "a.b.c=3": ["a.b.c = 3", "unknown key 'a'"],
    "fusion=[iffi, average, iffi]": ["fusion", "names iffi twice"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("fafi", [reading.parse_override(override)])
    message = str(caught.value)
    assert "\n" not in message
    for word in BAD[override]:
        assert word in message, message


def test_several_mistakes_are_a_line_each() -> None:
    with pytest.raises(RecipeError) as caught:
        load("fafi", [("training.epochs", 0), ("training.momentum", 2.0)])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["nonsense", "=3", ""])
def test_an_override_needs_a_key_and_a_value(text: str) -> None:
    with pytest.raises(RecipeError, match="key=value"):
        reading.parse_override(text)


def test_presets_have_an_idea_and_aliases_work() -> None:
    assert all(raw["about"]["idea"] for raw in presets().values())
    assert load("v4") == load("fafi")
    with pytest.raises(RecipeError, match="did you mean 'fafi'"):
        load("faffi")


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load(
        "fafi", [("data.kind", "cifar10"), ("model.encoder", "mobilenet-v2"), ("training.learning_rate", 1e-3)]
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load(path)
    assert again == recipe
    assert again.digest == recipe.digest


def test_only_the_federated_half_is_hashed() -> None:
    recipe = load("fafi")
    assert change(recipe, {"local.threads": 3, "local.data_path": "/elsewhere"}).digest == recipe.digest
    assert change(recipe, {"training.epochs": 3}).digest != recipe.digest
    assert "local" not in recipe.plain()
    assert parse_federated(recipe.plain()).digest == recipe.digest


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
        ("training: {epochs: 1}\ntraining: {epochs: 2}\n", "twice"),
        ("\x00", "YAML"),
        ("seeds: {[1]: 2}\n", "a sequence cannot be a key"),
        ("snapshots: !!int abc\n", "abc"),
        ("snapshots: !!bool maybe\n", "maybe"),
        ("snapshots: !!timestamp 2020-13-45\n", "month must be"),
        ("snapshots: " + "9" * 5000, "4300 digits"),
        ("fusion: &a [*a]\n", "an anchor .* holds itself"),
        ("seeds: &a {training: *a}\n", "an anchor .* holds itself"),
        ("fusion: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
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
    told = read_yaml("a: 1e-3\nb: off\nc: 5\nd: true\ne: .5\nf: -2.5E+3\ng: 010\n", "test")
    assert told == {"a": 1e-3, "b": "off", "c": 5, "d": True, "e": 0.5, "f": -2500.0, "g": 8}


def test_a_date_is_text() -> None:
    assert read_yaml("{a: 2020-01-01, b: 2020-13-45}", "test") == {"a": "2020-01-01", "b": "2020-13-45"}


def test_merge_keys_work_wherever_their_anchor_stands() -> None:
    text = "a: {b: &b {<<: &c {x: 1, y: 1}, x: 2}}\nd: {<<: *b, y: 3}\ne: {<<: [*b, *c]}\n"
    told = read_yaml(text, "test")
    assert told == {"a": {"b": {"x": 2, "y": 1}}, "d": {"x": 2, "y": 3}, "e": {"x": 2, "y": 1}}


PLUGIN = '''
from oneround.fusion import EnsembleRule, rules
from oneround.models.inference import plus

@rules.register("loudest")
class Loudest(EnsembleRule):
    """The largest logit wins."""
    gain: float = 2.0
    def add(self, totals, seen):
        return {"top": seen.logits if totals is None else totals["top"].maximum(seen.logits)}
    def scores(self, totals):
        return self.gain * totals["top"]
'''


def test_a_part_from_outside_by_module_and_name(here: Path) -> None:
    (here / "my_rules.py").write_text(PLUGIN)
    recipe = load("fafi", [("fusion", ["my_rules:Loudest", "iffi"])])
    assert [part.kind for part in recipe.fusion] == ["loudest", "iffi"]
    assert recipe.local.plugins == ["my_rules"]
    again = parse(read_yaml(recipe.to_yaml(), "again"))
    assert again == recipe
    assert "my_rules" not in str(recipe.plain())
    del slot("fusion").kinds["loudest"]
    del sys.modules["my_rules"]


def test_a_plugin_that_is_not_there_is_named(here: Path) -> None:
    with pytest.raises(RecipeError, match="no_such_module"):
        load("fafi", [("local.plugins", ["no_such_module"])])
    with pytest.raises(RecipeError, match="no registered part named Nothing"):
        load("fafi", [("fusion", ["oneround.errors:Nothing"])])


BROKEN_PLUGINS = {
    "syntax": ("\ndef (:\n", "2: SyntaxError: "),
    "raises": ("x = 1\n\nprint(x / 0)\n", "3: ZeroDivisionError: division by zero"),
    "needs": ("import no_such_library\n", "1: ModuleNotFoundError: No module named 'no_such_library'"),
    "clash": (
        "from oneround.fusion import EnsembleRule, rules\n@rules.register('iffi')\nclass Iffi(EnsembleRule): ...\n",
        "2: ValueError: fusion kind 'iffi' is already registered",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PLUGINS)
def test_a_plugin_that_fails_is_one_line_with_its_place(case: str, here: Path) -> None:
    text, words = BROKEN_PLUGINS[case]
    (here / f"broken_{case}.py").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load("fafi", [("local.plugins", [f"broken_{case}"])])
    assert f"'broken_{case}' cannot be imported: {here}/broken_{case}.py:{words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broadcast_imports_nothing(here: Path) -> None:
    (here / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    raw = load("fafi").plain()
    raw["fusion"] = [{"kind": "evil:Rule"}]
    with pytest.raises(RecipeError, match="unknown fusion 'evil:Rule'"):
        parse_federated(raw)
    assert not (here / "ran").exists()


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe: Recipe = load("fafi")
    with pytest.raises(Exception, match="frozen"):
        recipe.training.epochs = 3  # type: ignore[misc]
