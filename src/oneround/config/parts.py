"""Parts and slots: a method is a composition of parts.

A *part* is its options (a strict, frozen model) and the one thing those options configure. A *slot* is a place in a
recipe that one registered part fills; `kind:` selects it. Parts come from this package or from anywhere else:

    from oneround.fusion import EnsembleRule, rules

    @rules.register("my-rule")
    class MyRule(EnsembleRule):
        sharpness: float = 1.0
        ...

Outside code is loaded where it runs: named in the recipe's `local.plugins`, or as `kind: my_module:MyRule`.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from oneround.errors import RecipeError, did_you_mean


class Strict(BaseModel):
    """A pydantic model without unknown keys, silent conversions or later changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, value: Any) -> Any:
        known = sorted(cls.model_fields)
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                text = f"unknown key{did_you_mean(str(key), known)} (allowed: {', '.join(known) or 'none'})"
                raise PydanticCustomError("unknown_key", text, {"key": str(key), "given": value[key]})
        return value


@dataclass(frozen=True)
class Needs:
    """What a part needs from others. A recipe that does not provide it is refused before anything runs."""

    network: bool = False
    """Networks trained by the clients."""
    prototypes: bool = False
    """A head of prototypes, which features are compared with; not a linear one."""
    generator: bool = False
    """Generators trained by the clients."""
    sums: bool = False
    """Sums of fixed features over the clients' images."""
    experts: bool = False
    """Features of all clients' networks, which go back to the sites in a second exchange."""
    class_counts: bool = False
    """The clients' class counts, as they are or with noise."""
    public: bool = False
    """Public images at the server."""
    validation: bool = False
    """Validation images at the server."""
    rounds: int = 1
    """Fewest rounds; with fewer it would never act."""
    state: bool = False
    """What the server keeps from round to round: uploads alone do not give its outcome."""
    other_clients: bool = False
    """Statistics of the other clients during training, which only a simulation can offer."""
    bank: bool = False
    """The section `bank` of the recipe."""
    reference: bool = False
    """The section `reference` of the recipe."""
    share: bool = False
    """The section `share` of the recipe."""
    teacher: bool = False
    """A teacher's outputs, which only the server has."""

    def __or__(self, other: Needs) -> Needs:
        """What either of them needs."""
        return Needs(**{each.name: max(getattr(self, each.name), getattr(other, each.name)) for each in fields(Needs)})


class Part(Strict):
    """Options plus what they configure. `kind` is the name it was registered under."""

    kind: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        """What it needs from others, given its options."""
        return Needs()

    def dump(self) -> dict[str, Any]:
        """The part as plain data, as in a resolved recipe."""
        return {"kind": self.kind, **self.model_dump(mode="json")}

    @property
    def label(self) -> str:
        """Its kind and what differs from the defaults: `typicality-gated beta=2.0`."""
        return self.describe(_changed_options(self))

    def describe(self, options: dict[str, Any]) -> str:
        """Its kind with these options."""
        values = {key: value.label if isinstance(value, Part) else value for key, value in options.items()}
        return " ".join([self.kind, *(f"{key}={value}" for key, value in values.items())])


def _changed_options(options: Strict) -> dict[str, Any]:
    """Options that differ from their defaults (a part's default is its kind); nested ones by dotted name."""
    changed: dict[str, Any] = {}
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if value == field.default or (isinstance(value, Part) and value.label == field.default):
            continue
        if isinstance(value, Strict) and not isinstance(value, Part):
            changed |= {f"{name}.{key}": each for key, each in _changed_options(value).items()}
        else:
            changed[name] = value
    return changed


class TermPart(Part):
    """Base class of objective terms: the attributes that a recipe checks."""

    uses_queue: ClassVar[bool] = False
    """Whether it compares features with the client's queue, where there is one."""

    weight: Annotated[float, Field(ge=0)] = 1.0


class RulePart(Part):
    """Base class of fusion rules: the attributes that a recipe checks."""

    makes_network: ClassVar[bool] = False
    """Whether it makes a network of the clients' own kind, which a next round can start from."""

    @property
    def discloses(self) -> str:
        """What its statistics disclose of a site's data, items separated by "; "; empty if it asks for none."""
        return ""


class PartitionPart(Part):
    """Base class of partitions: the attributes that a recipe checks."""

    clients: Annotated[int, Field(ge=1)] | None = None
    """How many clients there are; None: as many as the data have, known when they are loaded."""


class GuardPart(Part):
    """Base class of guards, which bound λ: the attributes that a recipe checks."""

    def check(self, weight: Part) -> None:
        """Refuse a weight policy that this guard cannot bound."""


P = TypeVar("P", bound=Part)

_slots: dict[str, Slot[Any]] = {}


RENAMED = {
    "needs_network": "needs: Needs(network=True)",
    "needs_prototypes": "needs: Needs(prototypes=True)",
    "needs_sums": "needs: Needs(sums=True)",
    "needs_counts": "needs: Needs(class_counts=True)",
    "needs_validation": "needs: Needs(validation=True)",
    "needs_others": "needs: Needs(other_clients=True)",
    "needs_public": "needs: Needs(public=True)",
    "between_rounds": "needs: Needs(state=True)",
    "continues": "makes_network",
    "reveals": "discloses",
}
"""What plug-ins written for version 0.1 may declare and what replaces it; it would be ignored silently."""

MOVED = {
    "oneround.learning": "terms are in oneround.training, weights, schedules, guards and anchors in oneround.training.alignment",
    "oneround.parts": "Part and Slot are in oneround.config.parts",
}
"""Modules that plug-ins written for version 0.1 import, and where what they want from them is now."""


class Slot(Generic[P]):
    """A named place in a recipe and the parts that can fill it."""

    def __init__(self, name: str, base: type[P], default: str | None = None) -> None:
        self.name, self.base, self.default = name, base, default
        self.kinds: dict[str, type[P]] = {}
        _slots[name] = self

    def register(self, kind: str) -> Callable[[type[P]], type[P]]:
        """Class decorator: make a part known under `kind`."""

        def add(part: type[P]) -> type[P]:
            if not issubclass(part, self.base):
                raise TypeError(f"{part.__name__} must derive from {self.base.__name__} to fill the slot {self.name}")
            for old, new in RENAMED.items():
                if old in vars(part):
                    raise TypeError(f"{part.__name__}.{old}: parts no longer declare that; declare {new}")
            other = self.kinds.get(kind, part)
            if (other.__module__, other.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(f"{self.name} kind {kind!r} is already registered by {other.__module__}")
            part.kind = kind
            self.kinds[kind] = part
            return part

        return add

    def of(self, part: Part) -> P:
        """The same part, with the type its slot promises."""
        if not isinstance(part, self.base):
            raise TypeError(f"{type(part).__name__} does not fill the slot {self.name}")
        return part

    def parse(self, value: Any) -> P:
        """A part from `"iffi"`, `{"kind": "iffi", ...}` or a ready part."""
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        known = ", ".join(sorted(self.kinds))
        if not isinstance(value, dict):
            raise PydanticCustomError("part_type", f"must be a name or a mapping with a kind ({known})")
        options = dict(value)
        kind = options.pop("kind", self.default)
        if kind is None:
            raise PydanticCustomError("no_kind", f"has no kind; add {self.name}.kind ({known})")
        if not isinstance(kind, str) or kind not in self.kinds:
            text = f"unknown {self.name} '{kind}'{did_you_mean(str(kind), self.kinds)} (allowed: {known})"
            raise PydanticCustomError("unknown_kind", text, {"given": kind})
        return self.kinds[kind].model_validate(options)


def slot(name: str) -> Slot[Any]:
    """The slot of that name; `oneround.catalog` imports the built-in parts."""
    if name not in _slots:
        raise RuntimeError(f"no parts for {name} are registered; import oneround.catalog first (import oneround does)")
    return _slots[name]


@dataclass(frozen=True)
class In:
    """Annotation for a recipe field that a part fills: `Annotated[Part, In("fusion")]`."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: slot(self.name).parse(value),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda part: part.dump()),
        )


MODULE_AND_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
"""How a recipe or a site file names an object in a user's module."""


def load_plugin(name: str) -> ModuleType:
    """Import a user's module, which registers its parts; the current folder is searched as with `python -m`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's own code raises
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == name.split(".")[0]:
            text = f"local.plugins: no module named '{name}' here; install it, or run from the folder that has it"
        else:
            text = _broken(name, error)
        raise RecipeError(text) from error


def _broken(module: str, error: Exception) -> str:
    """One line on a plug-in that fails while it is imported: where, and with which error."""
    moved = MOVED.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    if isinstance(error, SyntaxError):
        where, reason = f"{error.filename}:{error.lineno}: ", error.msg
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
        where, reason = f"{frames[0].filename}:{frames[0].lineno}: " if frames else "", " ".join(str(error).split())
    fix = f"; {moved}" if moved else ""
    return f"local.plugins: '{module}' cannot be imported: {where}{type(error).__name__}: {reason}{fix}"
