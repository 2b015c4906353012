"""The command that repeats a run, from its recipe."""

from __future__ import annotations

import json
import shlex
from itertools import chain
from typing import Any

from oneround.config.load import load, parse_override, presets
from oneround.config.recipe import Recipe
from oneround.errors import OneroundError


def command(recipe: Recipe) -> str | None:
    """`oneround run PRESET --set …`, if that gives the same recipe; None for a recipe that is no variant of a preset."""
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
    """Keys with dots and values that differ; a mapping of another kind counts as one value."""
    if base == requested:
        return []
    both = isinstance(base, dict) and isinstance(requested, dict)
    if not both or base.get("kind") != requested.get("kind") or base.keys() - requested.keys():
        return [(key, requested)]
    inner = (_changes(base.get(name), value, f"{key}.{name}" if key else name) for name, value in requested.items())
    return list(chain.from_iterable(inner))


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | None | bool) else str(value)
