"""What long measurements share: cells measured one after another, kept in OUT.json as they are done, and a page made of them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oneround.observe.environment import environment
from oneround.observe.statistics import Summary
from oneround.site import choose_device

Cell = tuple[Any, ...]
Record = dict[str, Any]
PLACES = ("--data-dir", "--runs", "--out", "--minutes")
"""Arguments that say where and how long; the others say what."""


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Those that every study has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        self.place = beside(options.out, ".json")
        self.here = environment(choose_device("auto"))
        known = json.loads(self.place.read_text()) if self.place.exists() else {"cells": []}
        other = next((key for key, value in setting.items() if known.get(key, value) != value), None)
        if other is not None:
            sys.exit(f"{self.place}: holds runs with {other} = {known[other]}; choose another --out")
        self.commands = [told for told in commands_of(known) if told != asked()]
        self.found = {tuple(entry[key] for key in keys): entry for entry in known["cells"]}

    def go_on(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell, float], Record | None],
        words: Callable[[Record], str],
    ) -> None:
        """Measure what is missing; `measure` gives None when the time (the deadline it is told) was over before the end."""
        for cell in cells:
            if cell in self.found or time.time() >= self.deadline:
                continue
            done = measure(cell, self.deadline)
            if done is None:
                break
            named = dict(zip(self.keys, cell, strict=True))
            self.found[cell] = {**named, **done, "commit": self.here["commit"]}
            print(f"{', '.join(f'{key} {value}' for key, value in named.items())}: {words(done)}", flush=True)
            self._keep()
        done_of_these = sum(cell in self.found for cell in cells)
        print(f"{done_of_these} of {len(cells)} runs; {beside(self.place, '.md')}")

    def _keep(self) -> None:
        cells = list(self.found.values())
        record = {**self.setting, "cells": cells, "environment": self.here, "arguments": [*self.commands, asked()]}
        self.place.parent.mkdir(parents=True, exist_ok=True)
        self.place.write_text(json.dumps(record, ensure_ascii=False) + "\n")
        render(self.place, self.page)


def already(options: argparse.Namespace, keys: Sequence[str], page: Callable[[Record], list[str]]) -> bool:
    """Whether only records that are there were asked for; if so, it is done."""
    if options.render:
        render(options.render, page)
    elif options.join:
        place = beside(options.out, ".json")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(joined(options.join, keys), ensure_ascii=False) + "\n")
        render(place, page)
    return bool(options.render or options.join)


def joined(places: Sequence[Path], keys: Sequence[str]) -> Record:
    """One record of several that were measured side by side."""
    records = [json.loads(place.read_text()) for place in places]
    settings = [
        {key: value for key, value in record.items() if key not in ("cells", "environment", "arguments")}
        for record in records
    ]
    for place, setting in zip(places, settings, strict=True):
        check_alike(places[0], settings[0], place, setting)
    cells = {tuple(cell[key] for key in keys): cell for record in records for cell in record["cells"]}
    commands = dict.fromkeys(told for record in records for told in commands_of(record))
    where = together([record["environment"] for record in records])
    return {**settings[0], "cells": list(cells.values()), "environment": where, "arguments": list(commands)}


def commands_of(record: Record) -> list[str]:
    """The commands that made a record; older ones name the last alone."""
    told = record.get("arguments", [])
    return [told] if isinstance(told, str) else list(told)


def check_alike(first: Path, setting: Record, other: Path, its: Record) -> None:
    """Settings must be the same, whichever of the two has one."""
    for key in sorted(setting.keys() | its.keys()):
        if setting.get(key) != its.get(key):
            here, there = its.get(key, "not said"), setting.get(key, "not said")
            sys.exit(f"{other}: {key} = {here}, in {first} it is {there}; only like records can be joined")


def together(places: Sequence[Record]) -> Record:
    """Where parts of a record were measured: one environment, with every device, commit, … of those that differ."""
    found: Record = {}
    for key, value in places[0].items():
        if isinstance(value, dict):
            found[key] = together([place[key] for place in places])
        else:
            each = list(dict.fromkeys(place.get(key) for place in places))
            found[key] = value if len(each) == 1 else ", ".join(map(str, each))
    return found


def render(place: Path, page: Callable[[Record], list[str]]) -> None:
    """The record as a page of Markdown beside it."""
    record = json.loads(place.read_text())
    where, commits = record["environment"], sorted({str(cell["commit"]) for cell in record["cells"]})
    lines = [
        *page(record),
        f"- device: {where['device']}; torch {where['packages']['torch']}; commits {', '.join(commits)}",
        *(f"- command: `python benchmarks/{Path(sys.argv[0]).name} {told}`" for told in commands_of(record)),
    ]
    beside(place, ".md").write_text("\n".join(lines) + "\n")


def beside(place: Path, ending: str) -> Path:
    """The same name with this ending; a point in a name (`alpha_0.5`) is no ending."""
    return place.with_name(place.name.removesuffix(".json") + ending)


def asked() -> str:
    """The command line, without where things lie."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in PLACES:
            next(words, None)
        else:
            kept.append(word)
    return shlex.join(kept)


def in_words(values: Sequence[float]) -> str:
    """Mean, 95 % interval, and each of them."""
    found = Summary(tuple(values))
    margin = f" ± {found.margin:.1f}" if found.margin is not None else ""
    each = f" ({' '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{found.mean:.1f}{margin}{each}"
