"""Describes a method: its idea and formula, what crosses the network, what it needs beyond one round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from oneround import acts
from oneround.config.load import Overrides, change, load, presets
from oneround.config.recipe import Recipe
from oneround.config.sections import Noise
from oneround.formatting import format_bytes
from oneround.fusion import Rule
from oneround.fusion.ridge import Ridge
from oneround.fusion.stacked import Stacked

HIDES = "masks hide each client's sums and class counts: the server sees only their total over all clients, which is all it needs"
MASKED = "that it took part; its sums and class counts only within the total over all clients"
MASKED_SUMS = "its sums and class counts only within the total over all clients"
GENERATOR = (
    "a generator, which is a model of its images: whoever has it can make images that look like them, class by class"
)
HISTOGRAMS = "an exchange of class histograms before the broadcast (a number per class and site)"
SECOND = (
    "a second exchange: every site receives the networks of all sites, makes one pass over its images and returns sums of the "
    "networks' features"
)
KEYS = "an exchange of public keys before the broadcast (32 bytes a site), and every site's upload: masks cancel only in the sum of all"


@dataclass(frozen=True)
class Method:
    """A preset, described for a given network."""

    recipe: Recipe
    own: Mapping[str, Any]
    """The content of its file, without the preset it extends."""
    traffic: acts.Traffic

    @property
    def about(self) -> dict[str, str]:
        about: dict[str, str] = self.own.get("about", {})
        return about

    @property
    def name(self) -> str:
        return self.recipe.method

    @property
    def alias(self) -> str:
        return self.about.get("alias", "")

    @property
    def idea(self) -> str:
        return self.about.get("idea", "")

    @property
    def down(self) -> str:
        return format_bytes(self.traffic.down)

    @property
    def up(self) -> str:
        return format_bytes(self.traffic.up)

    @property
    def needs(self) -> list[str]:
        """What it needs beyond one broadcast and one upload."""
        needs = [f"{self.recipe.rounds} rounds (not one-shot)"] if self.recipe.rounds > 1 else []
        if self.recipe.stacked:
            needs.append(SECOND)
        if self.recipe.public:
            needs.append("public images")
        if self.recipe.alignment and self.recipe.alignment.schedule.needs.other_clients:
            needs.append("the other clients every epoch (simulation only)")
        if self.recipe.share and self.recipe.share.surveyed:
            needs.append(HISTOGRAMS)
        return needs + ([KEYS] if self.recipe.secure else [])

    @property
    def reveals(self) -> list[str]:
        """What an upload discloses about the site's data."""
        counts = self.recipe.reveal.class_counts
        if self.recipe.secure and not self.recipe.trains:
            return [MASKED]
        to_all = ", to every other site too" if self.recipe.stacked else ""
        revealed = [f"the weights of its network{to_all}"] if self.recipe.trains else []
        if self.recipe.generator:
            revealed.append(GENERATOR)
        measured = "all training metrics" if counts is True else "the loss of every epoch"
        if isinstance(counts, Noise):
            revealed.append(f"class counts with Laplace noise (ε = {counts.epsilon:g})")
        else:
            revealed.append("class counts" if counts else "its number of samples")
        if not self.recipe.sums_only:
            revealed[-1] += f", {measured}"
        if self.recipe.share and not self.recipe.share.surveyed:
            revealed.append("how many blocks it shares, which follows from the entropy of its labels")
        summed: list[Rule] = [Stacked() if self.recipe.stacked else Ridge()] if self.recipe.sums else []
        disclosing = [*acts.rules_of(self.recipe), *summed]  # sums go whoever uses them
        if self.recipe.secure:
            disclosing, revealed = [rule for rule in disclosing if not rule.needs.sums], [*revealed, MASKED_SUMS]
        sent = (each for rule in disclosing if rule.discloses for each in rule.discloses.split("; "))
        return list(dict.fromkeys([*revealed, *sent]))

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name, **self.about, "parameters": self.traffic.parameters, "bytes_down": self.traffic.down,
            "bytes_up": self.traffic.up, "needs": self.needs, "reveals": self.reveals, "recipe": self.recipe.plain(),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The description as text."""
        recipe, base = self.recipe, self.own.get("extends")
        differs = {key: value for key, value in self.own.items() if key not in ("about", "extends")}
        encoding = "whole numbers of 64 bits" if recipe.secure else recipe.upload.encoding
        often = (
            f"in each of {recipe.rounds} rounds"
            if recipe.rounds > 1
            else "in two exchanges"
            if recipe.stacked
            else "once"
        )
        return [
            f"{self.name}{f' ({self.alias})' if self.alias else ''}: {self.idea}",
            "",
            *([f"  {self.about['formula']}", ""] if "formula" in self.about else []),
            f"  network: {self.down} down ({self._sent()}), {self.up} up ({self._returned()}; {encoding}), {often}",
            f"  a site reveals: {'; '.join(self.reveals)}",
            *([f"  {self._masks()}"] if recipe.sums else []),
            f"  also needs: {', '.join(self.needs) or 'nothing'}",
            f"  run it: oneround run {self.alias or self.name} --data cifar10 --clients 5 --alpha 0.05",
            "",
            f"  its recipe{f', on top of {base}' if base else ''}:",
            *(f"    {line}" for line in yaml.safe_dump(differs, sort_keys=False, allow_unicode=True).splitlines()),
        ]

    def _masks(self) -> str:
        """What secure aggregation hides, or why it is not available."""
        if not self.recipe.sums_only and not self.recipe.stacked:
            return "secure aggregation of the sums is not available when networks are uploaded too: they disclose what masks would hide"
        if self.recipe.secure:
            return f"{HIDES}; not from a server that swaps keys, nor from all other clients together (docs/ridge.md)"
        return f"with --set sums.secure=true --set reveal.class_counts=false {HIDES}"

    def _sent(self) -> str:
        recipe = self.recipe
        parts = {
            "initial weights": recipe.trains,
            "initial generator": recipe.generator,
            "anchors": recipe.alignment,
            "feature bank": recipe.bank,
            "reference features": recipe.reference,
            "features or their seed": recipe.sums,
            "then all sites' networks": recipe.stacked,
        }
        return ", ".join(name for name, sent in parts.items() if sent)

    def _returned(self) -> str:
        recipe, hidden = self.recipe, self.recipe.reveal.class_counts is False
        parts = {
            "network": recipe.trains,
            "generator": recipe.generator,
            "sums of fixed features": recipe.sums and not recipe.secure,
            "masked sums of fixed features and class counts": recipe.secure,
            "class counts": not hidden and not recipe.secure,
            "number of samples": hidden and not recipe.secure,
            "statistics of the fusion rules": recipe.trains and any(rule.discloses for rule in acts.rules_of(recipe)),
        }
        return ", ".join(name for name, sent in parts.items() if sent)


def describe(name: str, model: str, classes: int, public: int, overrides: Overrides = ()) -> Method:
    """Describe a preset.

    Args:
        name: its name or alias.
        model: the encoder that bytes are counted for, unless the preset names one.
        classes: number of classes.
        public: number of public images, where the method needs some.
        overrides: recipe keys with their values.
    """
    recipe = load(name, overrides)
    recipe = (
        change(recipe, {"model.encoder": model}) if not recipe.sums_only and recipe.model.encoder is None else recipe
    )
    return Method(recipe, presets()[recipe.method], acts.traffic(recipe, classes, (3, 32, 32), public))
