"""Long measurements: cells that are measured one after another and kept in the record OUT.json, and the page of a record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import parser_of, write_json
from oneround.analysis.statistics import Summary
from oneround.runs.environment import environment
from oneround.site import choose_device

Cell = tuple[Any, ...]
Record = dict[str, Any]
UNRECORDED = ("--data-dir", "--runs", "--out", "--minutes")
"""Arguments that are no part of what is measured."""


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all studies have."""
    parser = parser_of(doc)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so long; what is done is kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument("--out", type=Path, default=Path("results") / f"cifar10_{name}")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RECORD.json", help="only make one record of several")
    parser.add_argument("--render", type=Path, metavar="RECORD.json", help="only make the page of a record again")
    return parser


class Study:
    """A record that grows cell by cell; an entry's values of `keys` identify its cell, `setting` is the same for all."""

    def __init__(
        self,
        options: argparse.Namespace,
        keys: Sequence[str],
        setting: dict[str, Any],
        page: Callable[[Record], list[str]],
    ) -> None:
        self.keys, self.setting, self.page = keys, setting, page
        self.deadline = time.time() + 60 * options.minutes
        self.record_file = sibling(options.out, ".json")
        self.machine = environment(choose_device(getattr(options, "device", "auto")))
        earlier = json.loads(self.record_file.read_text()) if self.record_file.exists() else {"cells": []}
        other = next((key for key, value in setting.items() if earlier.get(key, value) != value), None)
        if other is not None:
            sys.exit(f"{self.record_file}: holds runs with {other} = {earlier[other]}; choose another --out")
        self.commands = [command for command in commands_of(earlier) if command != command_line()]
        self.entries = {tuple(entry[key] for key in keys): entry for entry in earlier["cells"]}

    def measure_missing(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell, float], Record | None],
        summary_of: Callable[[Record], str],
    ) -> None:
        """Measure the missing cells; `measure` returns None if its deadline passes before it is finished."""
        for cell in cells:
            if cell in self.entries or time.time() >= self.deadline:
                continue
            done = measure(cell, self.deadline)
            if done is None:
                break
            named = dict(zip(self.keys, cell, strict=True))
            self.entries[cell] = {**named, **done, "commit": self.machine["commit"]}
            print(f"{', '.join(f'{key} {value}' for key, value in named.items())}: {summary_of(done)}", flush=True)
            self._keep()
        done_of_these = sum(cell in self.entries for cell in cells)
        print(f"{done_of_these} of {len(cells)} runs; {sibling(self.record_file, '.md')}")

    def _keep(self) -> None:
        cells = list(self.entries.values())
        record = {
            **self.setting,
            "cells": cells,
            "environment": self.machine,
            "arguments": [*self.commands, command_line()],
        }
        write_json(self.record_file, record, indent=None)
        render(self.record_file, self.page)


def only_pages(options: argparse.Namespace, keys: Sequence[str], page: Callable[[Record], list[str]]) -> bool:
    """Render or join existing records if an option asks for it; returns whether one did."""
    if options.render:
        render(options.render, page)
    elif options.join:
        record_file = sibling(options.out, ".json")
        write_json(record_file, joined(options.join, keys), indent=None)
        render(record_file, page)
    return bool(options.render or options.join)


def joined(paths: Sequence[Path], keys: Sequence[str]) -> Record:
    """One record of several that were measured separately."""
    records = [json.loads(path.read_text()) for path in paths]
    settings = [
        {key: value for key, value in record.items() if key not in ("cells", "environment", "arguments")}
        for record in records
    ]
    for path, setting in zip(paths, settings, strict=True):
        check_alike(paths[0], settings[0], path, setting)
    cells = {tuple(cell[key] for key in keys): cell for record in records for cell in record["cells"]}
    commands = dict.fromkeys(command for record in records for command in commands_of(record))
    where = merge_environments([record["environment"] for record in records])
    return {**settings[0], "cells": list(cells.values()), "environment": where, "arguments": list(commands)}


def commands_of(record: Record) -> list[str]:
    """The commands that made a record; older records have only the last."""
    commands = record.get("arguments", [])
    return [commands] if isinstance(commands, str) else list(commands)


def check_alike(first: Path, setting: Record, other: Path, its: Record) -> None:
    """Exit if two records differ in a setting."""
    for key in sorted(setting.keys() | its.keys()):
        if setting.get(key) != its.get(key):
            value, expected = its.get(key, "not said"), setting.get(key, "not said")
            sys.exit(f"{other}: {key} = {value}, in {first} it is {expected}; only like records can be joined")


def merge_environments(environments: Sequence[Record]) -> Record:
    """One environment of several; where they differ in device, commit, …, it lists all values."""
    merged: Record = {}
    for key, value in environments[0].items():
        if isinstance(value, dict):
            merged[key] = merge_environments([environment[key] for environment in environments])
        else:
            each = list(dict.fromkeys(environment.get(key) for environment in environments))
            merged[key] = value if len(each) == 1 else ", ".join(str(one) for one in each if one is not None)
    return merged


def measured_on(environment: Record, commits: Iterable[str | None]) -> str:
    """Device, version of torch and the known commits, as text."""
    hashes = sorted({commit for commit in commits if commit})
    version = environment["packages"]["torch"]
    return f"device: {environment['device']}; torch {version}" + (f"; commits {', '.join(hashes)}" if hashes else "")


def render(record_file: Path, page: Callable[[Record], list[str]]) -> None:
    """Write the page of a record, Markdown, in the same folder."""
    record = json.loads(record_file.read_text())
    lines = [
        *page(record),
        f"- {measured_on(record['environment'], (cell['commit'] for cell in record['cells']))}",
        *(f"- command: `python benchmarks/{Path(sys.argv[0]).name} {command}`" for command in commands_of(record)),
    ]
    sibling(record_file, ".md").write_text("\n".join(lines) + "\n")


def sibling(path: Path, ending: str) -> Path:
    """The path with another ending; a dot in the name (`alpha_0.5`) does not begin one."""
    return path.with_name(path.name.removesuffix(".json") + ending)


def command_line() -> str:
    """The command line, without paths and time limits."""
    arguments, recorded = iter(sys.argv[1:]), []
    for word in arguments:
        if word in UNRECORDED:
            next(arguments, None)
        else:
            recorded.append(word)
    return shlex.join(recorded)


def format_mean(values: Sequence[float]) -> str:
    """`70.3 ± 2.1 (68.9 71.0 71.0)`: mean, 95 % interval, and the single values."""
    each = f" ({' '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{Summary(tuple(values)):.1f}{each}"
