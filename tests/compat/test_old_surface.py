"""Every name, preset, command, option and recipe key of version 0.1.0 is there today; `surface.json` lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from pydantic import BaseModel
from typer.main import get_command

import oneround
from oneround.cli import app
from oneround.config.load import load
from oneround.config.parts import Part, slot
from oneround.config.recipe import Recipe, current_name

SURFACE: dict[str, Any] = json.loads(Path(__file__).with_name("surface.json").read_text(encoding="utf-8"))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a section or part with dots; options of parts in it are their own."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in models(field.annotation):
            yield from keys(section, f"{prefix}{name}.")


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, Part):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)


def options(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[str]:
    """Arguments and options of a command and of those below it."""
    context = click.Context(command, info_name=path, parent=parent)
    for parameter in command.get_params(context):
        argument = isinstance(parameter, click.Argument)
        for name in [str(parameter.name).upper()] if argument else [*parameter.opts, *parameter.secondary_opts]:
            yield f"{path} {name}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below, f"{path} {name}", context)


def test_names_of_the_package() -> None:
    assert not set(SURFACE["names"]) - set(oneround.__all__)
    assert all(getattr(oneround, name) for name in SURFACE["names"])


@pytest.mark.parametrize("name", SURFACE["presets"])
def test_presets_and_aliases(name: str) -> None:
    assert load(name).method


def test_commands_and_options() -> None:
    assert not set(SURFACE["options"]) - set(options(get_command(app), "oneround"))


def test_recipe_keys() -> None:
    assert not {current_name(key) for key in SURFACE["keys"]} - set(keys(Recipe))


@pytest.mark.parametrize("name", SURFACE["parts"])
def test_parts_and_their_options(name: str) -> None:
    kinds = slot(name).kinds
    lost = {
        f"{kind}.{key}"
        for kind, own in SURFACE["parts"][name].items()
        for key in ["", *own]
        if kind not in kinds or (key and key not in set(keys(kinds[kind])))
    }
    assert not lost
