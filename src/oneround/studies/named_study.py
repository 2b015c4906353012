"""Named studies: variants of recipes, settings, partitions and seeds, with a question and the figures of a source note.

Each is a YAML file in the folder `named` beside this file, called like the study; a file of one's own has the same form.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from oneround.config.load import Overrides, checked, load, pairs, parse_federated, read_mapping, read_yaml
from oneround.config.parts import Strict
from oneround.config.recipe import Recipe
from oneround.errors import RecipeError, did_you_mean
from oneround.runs.record import RunRecord, flat, keys_of, tree_of
from oneround.studies.sweep import Seeds, Values

FOLDER = Path(__file__).with_name("named")
EARLIER = 100
"""Added to the training seed of a run before another."""
FROM_DATA = ("model.encoder", "training.augment.flip", "sums.features", "sums.mirror")
"""Keys that are chosen for the data where a recipe leaves them open."""


class Variant(Strict):
    """A recipe that a study compares with others."""

    method: str
    """A preset, by name or alias; a variant that is a preset as it stands is written as this name alone."""
    set: dict[str, Any] = Field(default={})
    """Recipe keys that differ from the preset's."""
    rule: str | None = None
    """The fusion rule whose accuracy counts; default: that of the study. Variants of one recipe that differ in it share a run."""
    first: Variant | None = None
    """A run before it on the same partition, with other shuffles and views, whose uploaded features its prototypes begin at."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_method(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value


class Setting(Strict):
    """A setting that all variants are measured in."""

    set: dict[str, Any] = Field(default={})
    """Recipe keys of the setting."""
    partitions: Seeds | None = None
    """Default: those of the study."""
    variants: Values[str] | None = None
    """Default: all."""


class ClientFigures(Strict):
    """A quantity of every client that a note reports."""

    setting: str
    variant: str
    quantity: str
    """As metrics.jsonl calls it: `lambda_raw`, …"""
    epoch: int
    values: Values[float]
    """By client."""


Noted = float | dict[int, float]
"""An accuracy in % after the last epoch, or by epoch."""


class NamedStudy(Strict):
    """What is run to answer a question."""

    question: str
    source: str
    """Where it comes from, in a few words."""
    set: dict[str, Any] = Field(default={})
    """Recipe keys of every cell; those of a setting and of a variant come after them."""
    variants: dict[str, Variant] = Field(min_length=1)
    settings: dict[str, Setting] = Field(min_length=1)
    baseline: str | None = None
    """The variant that the others are compared with."""
    rule: str | None = None
    """The fusion rule whose accuracy counts; default: the one that makes each variant's model."""
    partitions: Seeds
    """Partition seeds; the initial weights have the same seed, and training where `training_seeds` names no others."""
    training_seeds: Seeds | None = None
    """Repeats on every partition."""
    note: dict[str, dict[str, Noted]] = Field(default={})
    """Setting → variant → the accuracy that the note reports, transductive as its code scored."""
    figures: list[ClientFigures] = Field(default=[])
    traces: list[str] = Field(default=[])
    """Quantities to show after the last epoch, mean over clients."""

    @model_validator(mode="after")
    def _names_are_known(self) -> NamedStudy:
        named: list[tuple[str, Mapping[str, Any], Sequence[str]]] = []
        named += [("baseline", self.variants, [self.baseline] if self.baseline is not None else [])]
        named += [
            (f"settings.{name}.variants", self.variants, each.variants or []) for name, each in self.settings.items()
        ]
        named += [("note", self.settings, [*self.note])]
        named += [(f"note.{name}", self.variants, [*by]) for name, by in self.note.items()]
        for number, each in enumerate(self.figures):
            named += [(f"figures.{number}", self.settings, [each.setting])]
            named += [(f"figures.{number}", self.variants, [each.variant])]
        for where, known, names in named:
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"{where}: nothing is called {name}{did_you_mean(name, known)} ({', '.join(known)})"
                    )
        return self


@dataclass(frozen=True, eq=False)
class Cell:
    """A variant in a setting on one partition with one training seed."""

    setting: str
    variant: str
    partition: int
    seed: int
    """Of training."""
    recipe: Recipe
    rule: str | None = None
    """The fusion rule whose accuracy counts; default: the one that makes the model."""
    first: Recipe | None = None
    """Of the run before it, whose uploaded features its prototypes begin at."""

    @property
    def name(self) -> str:
        seed = "" if self.seed == self.partition else f", seed {self.seed}"
        return f"{self.setting}: {self.variant}, partition {self.partition}{seed}"

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        return keys_of(self.recipe.plain())

    def has_keys(self, keys: Mapping[str, Any]) -> bool:
        """Whether these are the keys of its run: none differs, save those that are chosen for the data."""
        left_open = [key for key, value in flat(self.recipe.plain()) if value is None]
        chosen = [key for key in left_open if key.startswith(FROM_DATA)]
        below = tuple(f"{key}." for key in chosen)
        return all(
            self.keys.get(key) == keys.get(key)
            for key in {**self.keys, **keys}
            if key not in chosen and not key.startswith(below)
        )


def keys_today(run: RunRecord) -> Mapping[str, Any]:
    """The keys of a run as its recipe would have them today: options that are newer than its record have their defaults."""
    try:
        return keys_of(parse_federated(tree_of(run.keys)).plain())
    except RecipeError:  # it has an option that is gone, or a part that is not built in
        return run.keys


def names() -> list[str]:
    """The named studies."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_study(name: str) -> NamedStudy:
    """A named study, or that in a YAML file; a mistake in it is one line that begins with the file."""
    path = FOLDER / f"{name}.yaml"
    if name not in names():
        path = Path(name)
        if not path.is_file():
            raise RecipeError(f"no study '{name}'{did_you_mean(name, names())} (studies: {', '.join(names())})")
    raw = read_mapping(path, "a study is a YAML mapping (question: …, variants: {…}, settings: {…}, partitions: 1-3)")
    try:
        return checked(NamedStudy, raw, "study")
    except RecipeError as error:
        raise RecipeError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def cells(
    study: NamedStudy,
    overrides: Overrides = (),
    *,
    variants: Sequence[str] = (),
    settings: Sequence[str] = (),
    partitions: Sequence[int] = (),
) -> list[Cell]:
    """Every cell, or those of some variants, settings and partitions; partition by partition, so that pairs are complete early."""
    _check("--variant", variants, study.variants)
    _check("--setting", settings, study.settings)
    overrides = list(pairs(overrides))
    chosen = {name: setting for name, setting in study.settings.items() if name in settings or not settings}
    seeds = {name: partitions or setting.partitions or study.partitions for name, setting in chosen.items()}
    found = []
    for partition in dict.fromkeys(itertools.chain.from_iterable(seeds.values())):
        for seed in study.training_seeds or [partition]:
            for setting, variant in _combinations(study, chosen):
                if partition in seeds[setting] and (variant in variants or not variants):
                    own = study.variants[variant]
                    recipe = _recipe(study, setting, own, partition, seed, overrides)
                    first = (
                        _recipe(study, setting, own.first, partition, seed + EARLIER, overrides) if own.first else None
                    )
                    found.append(Cell(setting, variant, partition, seed, recipe, _rule(study, own, recipe), first))
    return found


class _Seeds(Strict):
    partitions: Seeds


def seeds_of(text: str) -> list[int]:
    """Seeds as a command line names them: `1-5`, or `1,2,7`."""
    raw = text if "-" in text else read_yaml(f"[{text}]", "--partitions")
    try:
        return checked(_Seeds, {"partitions": raw}).partitions
    except RecipeError as error:
        raise RecipeError(f"--{error}") from None


def _combinations(study: NamedStudy, settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    for name, setting in settings.items():
        for variant in setting.variants or study.variants:
            yield name, variant


def _rule(study: NamedStudy, own: Variant, recipe: Recipe) -> str | None:
    """The rule that counts, which must be one that the recipe has."""
    rule, known = own.rule or study.rule, [each.label for each in recipe.fusion]
    if rule is not None and rule not in known:
        raise RecipeError(
            f"rule = {rule}: {own.method} is not fused by it{did_you_mean(rule, known)} ({', '.join(known)})"
        )
    return rule


def _recipe(study: NamedStudy, setting: str, own: Variant, partition: int, seed: int, overrides: Overrides) -> Recipe:
    sets = {**study.set, **study.settings[setting].set, **own.set}
    seeds = {"seeds.partition": partition, "seeds.initialisation": partition, "seeds.training": seed}
    return load(own.method, [*sets.items(), *seeds.items(), *pairs(overrides)])


def _check(option: str, chosen: Sequence[str], known: Mapping[str, object]) -> None:
    for name in chosen:
        if name not in known:
            raise RecipeError(f"{option} {name}: not in this study{did_you_mean(name, known)} ({', '.join(known)})")
