"""A table and its formats: terminal, Markdown, CSV, LaTeX, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from oneround.formatting import without_infinity

VERDICT = "verdict"
_LATEX = str.maketrans({
    "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "{": r"\{", "}": r"\}", "$": r"\$", "^": r"\^{}", "~": r"\~{}",
    "\\": r"\textbackslash{}", "±": r"$\pm$", "λ": r"$\lambda$", "α": r"$\alpha$", "σ": r"$\sigma$", "Δ": r"$\Delta$",
    "·": r"$\cdot$", "≥": r"$\ge$", "≤": r"$\le$", "–": "--", "−": "$-$", "→": r"$\to$", "×": r"$\times$",
})  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """A titled table of strings; `data` is what it was made from, for JSON."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    data: Any = None

    def markdown(self) -> str:
        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"

        rule = "|---" + "|---:" * (len(self.heads) - 1) + "|"
        notes = [f"- {note}" for note in self.notes]
        lines = [f"## {self.title}\n", line(self.heads), rule, *map(line, self.rows), "", *notes]
        return "\n".join(lines).rstrip() + "\n"

    def csv(self) -> str:
        return _csv([self.heads, *self.rows])

    def latex(self) -> str:
        def line(row: Sequence[str]) -> str:
            return " & ".join(cell.translate(_LATEX) for cell in row) + r" \\"

        begin = r"\begin{tabular}{l" + "r" * (len(self.heads) - 1) + "}"
        lines = [f"% {self.title}", begin, r"\toprule", line(self.heads), r"\midrule", *map(line, self.rows)]
        notes = [f"% {note}" for note in self.notes]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"

    def json(self) -> str:
        data = [dict(zip(self.heads, row, strict=True)) for row in self.rows] if self.data is None else self.data
        content = {"title": self.title, "notes": list(self.notes), "rows": without_infinity(data)}
        return json.dumps(content, ensure_ascii=False, indent=1)

    def terminal(self) -> Table:
        table = Table(
            title=escape(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        shown = [number for number, head in enumerate(self.heads) if head != VERDICT]  # too long for a column
        for number in shown:
            table.add_column(escape(self.heads[number]), justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*(escape(row[number]) for number in shown))
        return table

    def verdicts(self) -> list[str]:
        """The verdict of every row that the terminal table leaves out."""
        at = list(self.heads).index(VERDICT) if VERDICT in self.heads else None
        return [] if at is None else [f"{row[0]}: {row[at]}" for row in self.rows]


_WRITERS = {".md": Sheet.markdown, ".csv": Sheet.csv, ".tex": Sheet.latex}
SUFFIXES = (*_WRITERS, ".json")


def render(sheets: Sequence[Sheet], suffix: str) -> str:
    """All sheets in the text of one file: `.md`, `.csv`, `.tex` or `.json`."""
    if suffix == ".json":
        return "[" + ",\n".join(sheet.json() for sheet in sheets) + "]\n"
    if suffix == ".csv" and len(sheets) > 1:  # nothing but a line of its own tells which is which
        return "\n".join(_csv([[sheet.title]]) + sheet.csv() for sheet in sheets)
    return "\n".join(_WRITERS[suffix](sheet) for sheet in sheets)


def _csv(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
