"""Parts and slots: a method is a composition, not a copy.

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
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from oneround.errors import RecipeError, did_you_mean


class Strict(BaseModel):
    """A model that takes nothing it does not know: no unknown keys, no silent conversions, no changes later."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    known = sorted(cls.model_fields)
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key{hint} (allowed: {allowed})",
                        {
                            "key": str(key),
                            "given": value[key],
                            "hint": did_you_mean(str(key), known),
                            "allowed": ", ".join(known) or "none",
                        },
                    )
        return value


class Part(Strict):
    """Options plus what they configure. `kind` is the name it was registered under."""

    kind: ClassVar[str] = ""

    def dump(self) -> dict[str, Any]:
        """The part as plain data, as it stands in a resolved recipe."""
        return {"kind": self.kind, **self.model_dump(mode="json")}

    @property
    def label(self) -> str:
        """Its kind and what differs from the defaults: `typicality-gated beta=2.0`."""
        return self.words(_differing(self))

    def words(self, options: dict[str, Any]) -> str:
        shown = {key: value.label if isinstance(value, Part) else value for key, value in options.items()}
        return " ".join([self.kind, *(f"{key}={value}" for key, value in shown.items())])


def _differing(options: Strict) -> dict[str, Any]:
    """What is not as it usually is; of options within options by a dotted name."""
    found: dict[str, Any] = {}
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if value == field.default or _is_plain(value, field.default):
            continue
        if isinstance(value, Strict) and not isinstance(value, Part):
            found |= {f"{name}.{key}": each for key, each in _differing(value).items()}
        else:
            found[name] = value
    return found


def _is_plain(value: Any, usual: Any) -> bool:
    """Whether a part is the one a name stands for, with nothing changed."""
    return isinstance(value, Part) and value.label == usual


P = TypeVar("P", bound=Part)

# The module that defines each slot and its built-in parts; imported when a recipe first asks for the slot.
_HOMES = {
    "companion": "oneround.mergenet",
    "data": "oneround.data",
    "partition": "oneround.data",
    "encoder": "oneround.models",
    "term": "oneround.learning",
    "anchors": "oneround.learning.anchors",
    "weight": "oneround.learning.weights",
    "schedule": "oneround.learning.schedules",
    "guard": "oneround.learning.guards",
    "features": "oneround.models",
    "fusion": "oneround.fusion",
}
_slots: dict[str, Slot[Any]] = {}


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
            known = self.kinds.get(kind)
            if known is not None and (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(f"{self.name} kind {kind!r} is already registered by {known.__module__}")
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
        if not isinstance(value, dict):
            raise PydanticCustomError(
                "part_type",
                "must be a name or a mapping with a kind ({known})",
                {"known": ", ".join(sorted(self.kinds))},
            )
        options = dict(value)
        kind = options.pop("kind", self.default)
        if kind is None:
            raise PydanticCustomError(
                "no_kind",
                "its kind is not said; add {slot}.kind ({known})",
                {"slot": self.name, "known": ", ".join(sorted(self.kinds))},
            )
        if not isinstance(kind, str) or kind not in self.kinds:
            raise PydanticCustomError(
                "unknown_kind",
                "unknown {slot} '{given}'{hint} (allowed: {allowed})",
                {
                    "slot": self.name,
                    "given": kind,
                    "hint": did_you_mean(str(kind), self.kinds),
                    "allowed": ", ".join(sorted(self.kinds)),
                },
            )
        return self.kinds[kind].model_validate(options)


def slot(name: str) -> Slot[Any]:
    """The slot of that name, with its built-in parts loaded."""
    importlib.import_module(_HOMES[name])
    return _slots[name]


class In:
    """Annotation for a recipe field that a part fills: `Annotated[Part, In("fusion")]`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: slot(self.name).parse(value),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda part: part.dump()),
        )


def load_plugin(module: str) -> None:
    """Import a module of the user's so that its parts register; the current folder is searched like in `python -m`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            raise RecipeError(
                f"local.plugins: no module named '{module}' here; install it or run where it lies"
            ) from error
        raise RecipeError(_broken(module, error)) from error
    except Exception as error:  # whatever the user's own code raises
        raise RecipeError(_broken(module, error)) from error


def _broken(module: str, error: Exception) -> str:
    """One line on a plug-in that fails while it is imported: the line of its own that fails, and how."""
    if isinstance(error, SyntaxError):
        where, said = f"{error.filename}:{error.lineno}: ", error.msg
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
        where, said = f"{frames[0].filename}:{frames[0].lineno}: " if frames else "", " ".join(str(error).split())
    return f"local.plugins: '{module}' cannot be imported: {where}{type(error).__name__}: {said}"
