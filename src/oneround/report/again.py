"""The command that repeats a run, from its recipe."""

from __future__ import annotations

import json
import shlex
from typing import Any

from oneround.errors import OneroundError
from oneround.reading import load, parse_override, presets
from oneround.recipe import Recipe


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


def _changes(base: Any, wanted: Any, key: str = "") -> list[tuple[str, Any]]:
    """What differs, as deep in as the two have the same shape and kind."""
    if base == wanted:
        return []
    if not (isinstance(base, dict) and isinstance(wanted, dict) and base.get("kind") == wanted.get("kind")):
        return [(key, wanted)]
    if base.keys() - wanted.keys():
        return [(key, wanted)]
    found = []
    for name, value in wanted.items():
        found += _changes(base.get(name), value, f"{key}.{name}" if key else name)
    return found


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | None | bool) else str(value)
