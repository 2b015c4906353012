"""From a preset name, a YAML file or a run folder to a validated recipe.

A recipe starts from a preset (`extends: fafi` in a file, or its name on the command line), then come the file's own keys,
then `--set a.b=c`. The resolved recipe is saved with every run, and running it again repeats the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from oneround.config.parts import MODULE_AND_NAME, Part, load_plugin, slot
from oneround.config.recipe import Federated, Recipe, current_name, with_current_names
from oneround.errors import RecipeError, did_you_mean

M = TypeVar("M", bound=BaseModel)
Overrides = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Recipe keys with the values to set them to, the later of equal keys last."""


def pairs(overrides: Overrides) -> Iterable[tuple[str, Any]]:
    """Keys and values, whether they came as a mapping or as pairs."""
    return overrides.items() if isinstance(overrides, Mapping) else overrides


class _Yaml(yaml.SafeLoader):
    """YAML without its surprises: 1e-3 is a number, `off` and 2020-01-01 are strings, a key is a scalar and not repeated."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, f"a {key.id} cannot be a key", key.start_mark)
            if (key.tag, key.value) in keys:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            keys.add((key.tag, key.value))
        return node


_REDEFINED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp")}
_Yaml.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in _REDEFINED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
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


class _PresetYaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same scalars, read by PyYAML's parser in C where it is installed."""

    yaml_implicit_resolvers = _Yaml.yaml_implicit_resolvers


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML text into plain data; an error is one line that begins with `where`."""
    try:
        content = yaml.load(text, Loader=_Yaml)
        _refuse_loops(content, ())
    except RecursionError:
        raise RecipeError(f"{where}: not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # PyYAML lets Python's own errors through, for example of `!!int abc`
        reason = " ".join(str(error).split()).partition(";")[0]
        raise RecipeError(f"{where}: not valid YAML: a value cannot be read ({reason})") from None
    return content


_TYPE_NAMES = {
    type(None): "nothing",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def read_mapping(path: Path, form: str) -> dict[str, Any]:
    """The mapping in a YAML file; `form` says in an error what such a file is."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not text; {form}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: {form}, this file holds {_TYPE_NAMES.get(type(content), 'something else')}")
    return content


def _refuse_loops(node: Any, above: tuple[int, ...]) -> None:
    """Refuse an anchor that is used inside itself; `above` are the ids of the enclosing nodes."""
    if id(node) in above:
        raise yaml.YAMLError("an anchor (&) contains itself (*)")
    if isinstance(node, dict | list):
        for below in node.values() if isinstance(node, dict) else node:
            _refuse_loops(below, (*above, id(node)))


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """The file of every preset, by name: its `about` block (alias, idea, formula), what it extends, and its own keys.

    The fast parser checks less than `read_yaml`, by which a test reads the same files.
    """
    paths = sorted(Path(__file__).parent.parent.joinpath("methods").glob("*.yaml"))
    return {path.stem: yaml.load(path.read_bytes(), Loader=_PresetYaml) for path in paths}


def _preset(name: str, what: str = "extends: no preset", others: str = "") -> dict[str, Any]:
    """A preset's keys, merged over those of the preset it extends; `what` and `others` word the error if there is none."""
    files = presets()
    aliases = {file["about"]["alias"]: preset for preset, file in files.items() if "alias" in file["about"]}
    preset = aliases.get(name, name)
    if preset not in files:
        hint = did_you_mean(name, [*aliases, *files])
        raise RecipeError(f"{what} '{name}'{hint} (presets: {', '.join(files)}{others})")
    own = {key: value for key, value in files[preset].items() if key not in ("about", "extends")}
    base = files[preset].get("extends")
    return merge(_preset(base) if base else {}, {**own, "method": preset})


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, key by key; a part of another kind replaces the old one."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and value.get("kind") in (None, old.get("kind")):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested data; a list is entered by number, a bare name (`encoder: cnn`) becomes a mapping with that kind."""
    *path, last = current_name(key).split(".")
    node: Any = raw
    for step in path:
        at = _index(node, step, key)
        below = node[at] if isinstance(node, list) else node.get(at)
        if isinstance(below, str):
            below = {"kind": below}
        if below is not None and not isinstance(below, dict | list):
            raise RecipeError(f"{key}: '{step}' is {below!r}, not a mapping; set {'.'.join(path)} itself")
        node[at] = list(below) if isinstance(below, list) else dict(below or {})
        node = node[at]
    if last == "kind" and isinstance(node, dict) and node.get("kind") not in (None, value):
        node.clear()
    node[_index(node, last, key)] = value


def _index(node: Any, step: str, key: str) -> Any:
    """The key of a mapping or the index of a list (from 0) that `step` means."""
    if not isinstance(node, list):
        return step
    if not (step.isdecimal() and int(step) < len(node)):
        raise RecipeError(f"{key}: '{step}' is no index of a list of {len(node)}; use 0 to {len(node) - 1}")
    return int(step)


def parse_override(text: str) -> tuple[str, Any]:
    """`training.epochs=3` → ("training.epochs", 3); the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {text}: write it as key=value, for example --set training.epochs=3")
    return key.strip(), read_yaml(value, f"--set {key}") if value.strip() else None


def load(source: str | PathLike[str], overrides: Overrides = ()) -> Recipe:
    """A recipe from a preset name, a YAML file or a run folder, with overrides on top: `load("fafi", {"training.epochs": 3})`."""
    path = Path(source)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"
    if path.is_file():
        raw = with_current_names(read_mapping(path, "a recipe is a YAML mapping (extends: fafi, …)"))
        base = raw.pop("extends", None)
        if base is not None:
            raw = merge(_preset(str(base), f"{path}: extends: no preset"), raw)
        raw.setdefault("method", path.stem)
    elif path.suffix in (".yaml", ".yml"):
        raise RecipeError(f"no recipe file '{source}'")
    else:
        raw = _preset(str(source), "no preset or recipe file", "; or a .yaml file, or a run folder")
    return parse(raw, overrides)


def _load_plugins(raw: dict[str, Any]) -> dict[str, Any]:
    """Import `local.plugins`; turn each `module:name` into the name its part registered, remembering the module."""
    local = raw.get("local", {})
    plugins = local.get("plugins", []) if isinstance(local, dict) else None
    if not isinstance(plugins, list):
        return raw  # refused when it is validated
    for module in plugins:
        if isinstance(module, str):
            load_plugin(module)
    plugins = list(plugins)

    def name_of(word: Any) -> Any:
        match = MODULE_AND_NAME.fullmatch(word) if isinstance(word, str) else None
        if not match:
            return word
        module, name = match.groups()
        part = getattr(load_plugin(module), name, None)
        if not (isinstance(part, type) and issubclass(part, Part) and part.kind):
            raise RecipeError(f"'{word}': {module} has no registered part named {name}")
        if module not in plugins:
            plugins.append(module)
        return part.kind

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {name_of(key): value if key == "classes" else walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return name_of(node)

    walked = {key: value if key in ("local", "method") else walk(value) for key, value in raw.items()}
    return {**walked, "local": {**local, "plugins": plugins}} if plugins else walked


def parse(raw: dict[str, Any], overrides: Overrides = ()) -> Recipe:
    """Set the overrides in plain data and validate it as a recipe; every mistake is one line: key, value and what is allowed."""
    for key, value in pairs(overrides):
        assign(raw, key, value)
    return checked(Recipe, _load_plugins(raw))


def parse_federated(raw: Any) -> Federated:
    """Validate the federated half in a received message: parts by registered name only, no plug-in is imported."""
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


def change(recipe: Recipe, changes: Overrides) -> Recipe:
    """A changed copy, validated like any other: `change(recipe, {"training.epochs": 3})`."""
    return parse(recipe.model_dump(mode="json"), changes)


def checked(model: type[M], raw: Any, what: str = "recipe") -> M:
    """Validate data as this model, with the same one-line errors as a recipe; `what` names the data where no key is to blame."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(_lines(error, what)) from None


def _lines(error: ValidationError, what: str = "recipe") -> str:
    """One line for each mistake."""
    return "\n".join(dict.fromkeys(_explain(dict(item), what) for item in error.errors(include_url=False)))


_RULES = {
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
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be ≥ {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be ≤ {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "value_error": "{error}",
}
"""What a value of a recipe violates, by pydantic's type of error; names in braces are of its context."""


def _explain(item: dict[str, Any], what: str) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    path = [str(step) for step in item["loc"]]
    plain = {name: f"{each:g}" if isinstance(each, float) else each for name, each in context.items()}
    rule = _RULES[kind].format(**plain) if kind in _RULES else item["msg"]
    if kind == "unknown_key":
        path.append(context["key"])
        value = context["given"]
        if isinstance(value, dict):
            rule = rule.replace("unknown key", f"unknown key '{context['key']}'", 1)
        while isinstance(value, dict) and len(value) == 1:
            ((step, value),) = value.items()
            path.append(str(step))
    elif kind == "unknown_kind":
        value = context["given"]
    elif kind == "literal_error":
        allowed = [text or truth.lower() for text, truth in re.findall(r"'([^']*)'|(True|False)", context["expected"])]
        rule = f"must be one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}"
    elif kind == "string_pattern_mismatch" and path[-1] == "device":
        rule = "must be auto, cpu, mps, cuda or cuda:N"
    elif kind == "string_pattern_mismatch":
        rule = "must be at most 64 letters, digits, _ . or -, a letter or digit first"
    assignment = "" if kind == "missing" or isinstance(value, dict) else f" = {_short(value)}"
    return f"{'.'.join(path) or what}{assignment}: {rule}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
