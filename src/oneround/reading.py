"""From a preset name, a YAML file or a run folder to a validated recipe.

A recipe starts from a preset (`extends: fafi` in a file, or its name on the command line), then come the file's own keys,
then `--set a.b=c`. The resolved recipe is saved with every run and runs again as it stands.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from oneround.errors import RecipeError, did_you_mean
from oneround.parts import Part, Strict, load_plugin, slot
from oneround.recipe import Federated, Recipe

M = TypeVar("M", bound=Strict)


class _Yaml(yaml.SafeLoader):
    """YAML with the values people mean: 1e-3 is a number, `off` and 2020-01-01 are words, a key is one and stands once."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, f"a {key.id} cannot be a key", key.start_mark)
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


_OURS = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp")}
_Yaml.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _OURS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def read_yaml(text: str, where: str) -> Any:
    """Plain data from YAML text; whatever is wrong with it is one line that begins with `where`."""
    try:
        told = yaml.load(text, Loader=_Yaml)
        _refuse_loops(told, ())
    except RecursionError:
        raise RecipeError(f"{where}: not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # the library lets through what Python says of `!!int abc` and the like
        reason = " ".join(str(error).split()).partition(";")[0]
        raise RecipeError(f"{where}: not valid YAML: a value cannot be read ({reason})") from None
    return told


def _refuse_loops(node: Any, above: tuple[int, ...]) -> None:
    """An anchor may be used anywhere but inside itself; `above` are the nodes this one lies in."""
    if id(node) in above:
        raise yaml.YAMLError("an anchor (&) holds itself (*)")
    if isinstance(node, dict | list):
        for below in node.values() if isinstance(node, dict) else node:
            _refuse_loops(below, (*above, id(node)))


_METHODS = Path(__file__).parent / "methods"


def presets() -> dict[str, dict[str, Any]]:
    """Every preset by name: its `about` block (alias, idea, formula) and what it says of the recipe."""
    return copy.deepcopy(_read_presets())


@cache
def _read_presets() -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(_METHODS.glob("*.yaml")):
        found[path.stem] = read_yaml(path.read_text(encoding="utf-8"), path.name)
    return found


def _preset(name: str, what: str = "extends: no preset", others: str = "") -> dict[str, Any]:
    """A preset by name or alias, with all it extends laid under it; else `what` is missing and `others` would do."""
    known = presets()
    aliases = []
    for preset, raw in known.items():
        alias = raw.pop("about", {}).get("alias")
        if name in (preset, alias):
            base = raw.pop("extends", None)
            return merge(_preset(base) if base else {}, {**raw, "method": preset})
        aliases += [alias] if alias else []
    raise RecipeError(f"{what} '{name}'{did_you_mean(name, [*aliases, *known])} (presets: {', '.join(known)}{others})")


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, key by key; a part of another kind replaces the old one whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested data; a list is entered by number, a bare name (`encoder: cnn`) becomes a mapping with that kind."""
    *path, last = key.split(".")
    node: Any = raw
    for step in path:
        at = _place(node, step, key)
        below = node[at] if isinstance(node, list) else node.get(at)
        if isinstance(below, str):
            below = {"kind": below}
        if below is not None and not isinstance(below, dict | list):
            raise RecipeError(f"{key}: '{step}' holds {below!r}, not a mapping; set {'.'.join(path)} itself")
        node[at] = list(below) if isinstance(below, list) else dict(below or {})
        node = node[at]
    if last == "kind" and isinstance(node, dict) and node.get("kind") not in (None, value):
        node.clear()
    node[_place(node, last, key)] = value


def _place(node: Any, step: str, key: str) -> Any:
    """Where `step` leads in a mapping (its name) or in a list (its number, from 0)."""
    if not isinstance(node, list):
        return step
    if not (step.isdigit() and int(step) < len(node)):
        raise RecipeError(f"{key}: '{step}' is no place in a list of {len(node)}; use 0 to {len(node) - 1}")
    return int(step)


def parse_override(text: str) -> tuple[str, Any]:
    """`training.epochs=3` → ("training.epochs", 3); the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {text}: write it as key=value, for example --set training.epochs=3")
    return key.strip(), read_yaml(value, f"--set {key}") if value.strip() else None


def load(source: str | Path, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
    """A recipe from a preset name, a YAML file or a run folder, with overrides on top."""
    path = Path(source)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: not a text file; a recipe is YAML") from None
        raw = read_yaml(text, str(path))
        if not isinstance(raw, dict):
            raise RecipeError(
                f"{path}: a recipe is a YAML mapping (extends: fafi, …), this file holds {type(raw).__name__}"
            )
        base = raw.pop("extends", None)
        if base is not None:
            raw = merge(_preset(str(base), f"{path}: extends: no preset"), raw)
        raw.setdefault("method", path.stem)
    elif path.suffix in (".yaml", ".yml"):
        raise RecipeError(f"no recipe file '{source}'")
    else:
        raw = _preset(str(source), "no preset or recipe file", "; or a .yaml file, or a run folder")
    for key, value in overrides:
        assign(raw, key, value)
    return parse(raw)


_OBJECT = re.compile(r"^([A-Za-z_][\w.]*):([A-Za-z_]\w*)$")


def _load_plugins(raw: dict[str, Any]) -> dict[str, Any]:
    """Import `local.plugins`; turn each `module:name` into the name its part registered, remembering the module."""
    local = raw.get("local")
    plugins = local.get("plugins") if isinstance(local, dict) else None
    modules = [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []
    for module in modules:
        load_plugin(module)

    def name_of(word: Any) -> Any:
        match = _OBJECT.match(word) if isinstance(word, str) else None
        if not match:
            return word
        load_plugin(match[1])
        part = getattr(importlib.import_module(match[1]), match[2], None)
        if not (isinstance(part, type) and issubclass(part, Part) and part.kind):
            raise RecipeError(f"'{word}': {match[1]} has no registered part named {match[2]}")
        if match[1] not in modules:
            modules.append(match[1])
        return part.kind

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {name_of(key): walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return name_of(node)

    walked = {key: value if key in ("local", "method") else walk(value) for key, value in raw.items()}
    if not modules:
        return raw
    return {**walked, "local": {**(local if isinstance(local, dict) else {}), "plugins": modules}}


def parse(raw: dict[str, Any]) -> Recipe:
    """Validated recipe from plain data; every mistake is one line naming key, value and what is allowed."""
    return checked(Recipe, _load_plugins(raw))


def parse_federated(raw: Any) -> Federated:
    """The federated half as it came in a Broadcast: parts by registered name only, nothing is imported."""
    return checked(Federated, raw)


def parse_part(name: str, raw: Any) -> Part:
    """One part for the slot of that name, with the same one-line errors as a recipe."""
    try:
        part: Part = slot(name).parse(raw)
        return part
    except ValidationError as error:
        raise RecipeError(_lines(error)) from None
    except PydanticCustomError as error:
        raise RecipeError(error.message()) from None


def change(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A changed copy, validated like any other: `change(recipe, {"training.epochs": 3})`."""
    raw = recipe.model_dump(mode="json")
    for key, value in changes.items():
        assign(raw, key, value)
    return parse(raw)


def checked(model: type[M], raw: Any, what: str = "recipe") -> M:
    """Data as that model, with the same one-line errors as a recipe; `what` it is where no key is to blame."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(_lines(error, what)) from None


def _lines(error: ValidationError, what: str = "recipe") -> str:
    """A line for each mistake."""
    return "\n".join(dict.fromkeys(_explain(dict(item), what) for item in error.errors(include_url=False)))


_PLAIN = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "path_type": "must be a path",
    "finite_number": "must be finite",
    "missing": "is required",
}


def _explain(item: dict[str, Any], what: str) -> str:
    where = ".".join(str(step) for step in item["loc"])
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    message = item["msg"]
    if kind == "unknown_key":
        where, value = ".".join(filter(None, [where, context["key"]])), context["given"]
        if isinstance(value, dict):
            message = message.replace("unknown key", f"unknown key '{context['key']}'", 1)
        while isinstance(value, dict) and len(value) == 1:
            (step, value), *_ = value.items()
            where = f"{where}.{step}"
    if kind == "unknown_kind":
        value = context["given"]
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        rule = f"must be one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}"
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}
        limit = context[
            {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}[kind]
        ]
        rule = f"must be {words[kind]} {limit:g}" if isinstance(limit, float) else f"must be {words[kind]} {limit}"
    elif kind == "value_error":
        rule = str(context.get("error", item["msg"]))
    elif kind in ("too_short", "too_long"):
        size = context.get("min_length", context.get("max_length"))
        rule = f"must have {'at least' if kind == 'too_short' else 'at most'} {size} entries"
    elif kind == "string_pattern_mismatch":
        device, name = (
            "must be auto, cpu, mps, cuda or cuda:N",
            "must be at most 64 letters, digits, _ . or -, a letter or digit first",
        )
        rule = device if where.endswith("device") else name
    else:
        rule = _PLAIN.get(kind, message)
    shown = "" if kind == "missing" or isinstance(value, dict) else f" = {_short(value)}"
    return f"{where or what}{shown}: {rule}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
