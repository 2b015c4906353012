"""The command that repeats a run, from its recipe."""

from __future__ import annotations

import json
import shlex
from typing import Any

from oneround.config.load import load, parse_override, presets
from oneround.config.recipe import Recipe
from oneround.errors import OneroundError


def command(recipe: Recipe) -> str | None:
    """`oneround run PRESET --set …`, if that gives this very recipe; None for a recipe with parts or names of its own."""
    if recipe.method not in presets():
        return None
    sets = [f"{key}={_yaml(value)}" for key, value in _changes(load(recipe.method).plain(), recipe.plain())]
    try:
        if load(recipe.method, [parse_override(text) for text in sets]).digest != recipe.digest:
            return None
    except OneroundError:
        return None
    return shlex.join(["oneround", "run", recipe.method, *(word for text in sets for word in ("--set", text))])


def _changes(base: Any, requested: Any, key: str = "") -> list[tuple[str, Any]]:
    """What differs, as deep in as the two have the same shape and kind."""
    if base == requested:
        return []
    if not (isinstance(base, dict) and isinstance(requested, dict) and base.get("kind") == requested.get("kind")):
        return [(key, requested)]
    if base.keys() - requested.keys():
        return [(key, requested)]
    changes = []
    for name, value in requested.items():
        changes += _changes(base.get(name), value, f"{key}.{name}" if key else name)
    return changes


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | None | bool) else str(value)
