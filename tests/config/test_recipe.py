"""A recipe is strict, says in one line what is wrong, and runs again as it was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from oneround.config.load import change, load, parse_federated, parse_override
from oneround.config.recipe import ADDED, Recipe
from oneround.config.sections import Alignment, Augment, Evaluation, Sums, Training
from oneround.errors import RecipeError
from oneround.runs.record import flat, keys_of

BAD = {
    "training.epohcs=3": ["training.epohcs", "3", "did you mean 'epochs'"],
    "training.epochs=0": ["training.epochs", "0", "≥ 1"],
    "training.epochs=2.5": ["training.epochs", "2.5", "whole number"],
    "training.epochs='50'": ["training.epochs", '"50"', "whole number"],
    "training.learning_rate=-1": ["training.learning_rate", "-1", "> 0"],
    "training.momentum=1": ["training.momentum", "1", "< 1"],
    "training.last_batch=warp": ["training.last_batch", "warp", "wrap, keep, drop", "did you mean 'wrap'"],
    "training=3": ["training", "3", "mapping"],
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
    "snapshots=1.5": ["snapshots = 1.5: must be a whole number"],
    "snapshots=[11, 1]": ["snapshots = [11, 1]: must be epochs from 1 on that rise"],
    "snapshots=[]": ["snapshots = []: must be epochs from 1 on"],
    "snapshots=[1, 60]": ["snapshots = [1, 60]: must be ≤ training.epochs = 50"],
    "local.device=gpu": ["local.device", "gpu", "cuda"],
    "local.threads=0": ["local.threads", "0", "≥ 1"],
    "local.deterministic=yes": ["local.deterministic", "yes", "true or false"],
    "locale.threads=1": ["locale.threads = 1", "did you mean 'local'"],
    "a.b.c=3": ["a.b.c = 3", "unknown key 'a'"],
    "fusion=[iffi, average, iffi]": ["fusion", "names iffi twice"],
    "fusion.9=iffi": ["fusion.9", "no index of a list of 6", "0 to 5"],
    "fusion.²=iffi": ["fusion.²", "no index of a list of 6", "0 to 5"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("fafi", [parse_override(override)])
    message = str(caught.value)
    assert "\n" not in message
    for word in BAD[override]:
        assert word in message, message


def test_several_mistakes_are_a_line_each() -> None:
    with pytest.raises(RecipeError) as caught:
        load("fafi", [("training.epochs", 0), ("training.momentum", 2.0)])
    assert len(str(caught.value).splitlines()) == 2


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
    assert change(recipe, {"evaluation.batch_norm": "batch"}).digest != recipe.digest, "a key that was added later"


ADDED_KEYS = [f"{section}.{key}" for section, keys in ADDED.items() for key in keys]


def test_a_key_that_was_added_later_leaves_older_recipes_their_digest() -> None:
    sections = {
        "evaluation": Evaluation(),
        "alignment": Alignment(),
        "training": Training(),
        "training.augment": Augment(),
        "sums": Sums(),
    }
    assert {name: {key: getattr(sections[name], key) for key in keys} for name, keys in ADDED.items()} == ADDED
    aligned = load("etf")
    assert load("etf", {"training.augment.hole": 0.0}).digest == aligned.digest
    assert load("etf", {"training.augment.hole": 0.1}).digest != aligned.digest
    assert load("etf", {"alignment.initial": "random"}).digest == aligned.digest
    assert load("etf", {"alignment.initial": "anchors"}).digest != aligned.digest
    older = {key: value for key, value in flat(aligned.plain()) if key not in ADDED_KEYS}
    assert keys_of(older) == keys_of(aligned.plain())


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe: Recipe = load("fafi")
    with pytest.raises(Exception, match="frozen"):
        recipe.training.epochs = 3  # type: ignore[misc]
