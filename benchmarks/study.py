"""What long measurements share: cells measured one after another, kept in OUT.json as they are done, and a page made of them."""

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
"""Arguments that say where and how long; the others say what."""


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Those that every study has."""
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
    """A record that is added to, cell by cell; `keys` of an entry name its cell, `setting` must be the same for all."""

    def __init__(
        self,
        options: argparse.Namespace,
        keys: Sequence[str],
        setting: dict[str, Any],
        page: Callable[[Record], list[str]],
    ) -> None:
        self.keys, self.setting, self.page = keys, setting, page
        self.deadline = time.time() + 60 * options.minutes
        self.record_file = beside(options.out, ".json")
        self.machine = environment(choose_device("auto"))
        earlier = json.loads(self.record_file.read_text()) if self.record_file.exists() else {"cells": []}
        other = next((key for key, value in setting.items() if earlier.get(key, value) != value), None)
        if other is not None:
            sys.exit(f"{self.record_file}: holds runs with {other} = {earlier[other]}; choose another --out")
        self.commands = [command for command in commands_of(earlier) if command != command_line()]
        self.entries = {tuple(entry[key] for key in keys): entry for entry in earlier["cells"]}

    def go_on(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell, float], Record | None],
        in_brief: Callable[[Record], str],
    ) -> None:
        """Measure what is missing; `measure` gives None when its deadline passes before the end."""
        for cell in cells:
            if cell in self.entries or time.time() >= self.deadline:
                continue
            done = measure(cell, self.deadline)
            if done is None:
                break
            named = dict(zip(self.keys, cell, strict=True))
            self.entries[cell] = {**named, **done, "commit": self.machine["commit"]}
            print(f"{', '.join(f'{key} {value}' for key, value in named.items())}: {in_brief(done)}", flush=True)
            self._keep()
        done_of_these = sum(cell in self.entries for cell in cells)
        print(f"{done_of_these} of {len(cells)} runs; {beside(self.record_file, '.md')}")

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


def already(options: argparse.Namespace, keys: Sequence[str], page: Callable[[Record], list[str]]) -> bool:
    """Render or join existing records if asked to; returns whether that was all."""
    if options.render:
        render(options.render, page)
    elif options.join:
        record_file = beside(options.out, ".json")
        write_json(record_file, joined(options.join, keys), indent=None)
        render(record_file, page)
    return bool(options.render or options.join)


def joined(paths: Sequence[Path], keys: Sequence[str]) -> Record:
    """One record of several that were measured side by side."""
    records = [json.loads(path.read_text()) for path in paths]
    settings = [
        {key: value for key, value in record.items() if key not in ("cells", "environment", "arguments")}
        for record in records
    ]
    for path, setting in zip(paths, settings, strict=True):
        check_alike(paths[0], settings[0], path, setting)
    cells = {tuple(cell[key] for key in keys): cell for record in records for cell in record["cells"]}
    commands = dict.fromkeys(command for record in records for command in commands_of(record))
    where = together([record["environment"] for record in records])
    return {**settings[0], "cells": list(cells.values()), "environment": where, "arguments": list(commands)}


def commands_of(record: Record) -> list[str]:
    """The commands that made a record; older ones name the last alone."""
    commands = record.get("arguments", [])
    return [commands] if isinstance(commands, str) else list(commands)


def check_alike(first: Path, setting: Record, other: Path, its: Record) -> None:
    """Settings must be the same, whichever of the two has one."""
    for key in sorted(setting.keys() | its.keys()):
        if setting.get(key) != its.get(key):
            value, expected = its.get(key, "not said"), setting.get(key, "not said")
            sys.exit(f"{other}: {key} = {value}, in {first} it is {expected}; only like records can be joined")


def together(environments: Sequence[Record]) -> Record:
    """Where parts of a record were measured: one environment, with every device, commit, … of those that differ."""
    merged: Record = {}
    for key, value in environments[0].items():
        if isinstance(value, dict):
            merged[key] = together([environment[key] for environment in environments])
        else:
            each = list(dict.fromkeys(environment.get(key) for environment in environments))
            merged[key] = value if len(each) == 1 else ", ".join(str(one) for one in each if one is not None)
    return merged


def measured_on(environment: Record, commits: Iterable[str | None]) -> str:
    """Device, torch and the commits that are known."""
    hashes = sorted({commit for commit in commits if commit})
    version = environment["packages"]["torch"]
    return f"device: {environment['device']}; torch {version}" + (f"; commits {', '.join(hashes)}" if hashes else "")


def render(record_file: Path, page: Callable[[Record], list[str]]) -> None:
    """The record as a page of Markdown beside it."""
    record = json.loads(record_file.read_text())
    lines = [
        *page(record),
        f"- {measured_on(record['environment'], (cell['commit'] for cell in record['cells']))}",
        *(f"- command: `python benchmarks/{Path(sys.argv[0]).name} {command}`" for command in commands_of(record)),
    ]
    beside(record_file, ".md").write_text("\n".join(lines) + "\n")


def beside(path: Path, ending: str) -> Path:
    """The same name with this ending; a point in a name (`alpha_0.5`) is no ending."""
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


def in_words(values: Sequence[float]) -> str:
    """Mean, 95 % interval, and each of them."""
    each = f" ({' '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{Summary(tuple(values)):.1f}{each}"
