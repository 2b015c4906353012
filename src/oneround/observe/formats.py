"""One table, written as people need it: on the terminal, as Markdown, CSV, LaTeX or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

VERDICT = "verdict"
_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "λ": r"$\lambda$", "α": r"$\alpha$", "·": r"$\cdot$",
          "≥": r"$\ge$", "≤": r"$\le$", "–": "--", "−": "$-$", "→": r"$\to$", "×": r"$\times$", "Δ": r"$\Delta$", "σ": r"$\sigma$",
          "{": r"\{", "}": r"\}", "$": r"\$", "^": r"\^{}", "~": r"\~{}", "\\": r"\textbackslash{}"}  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """A titled table of words; `data` is what it was made from, for machines."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    data: Any = field(default=None)

    def markdown(self) -> str:
        lines = [f"## {self.title}\n", _line(self.heads), "|---" + "|---:" * (len(self.heads) - 1) + "|"]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip() + "\n"

    def csv(self) -> str:
        told = io.StringIO()
        csv.writer(told, lineterminator="\n").writerows([self.heads, *self.rows])
        return told.getvalue()

    def latex(self) -> str:
        def line(row: Sequence[str]) -> str:
            return " & ".join(_latex(cell) for cell in row) + r" \\"

        body = [r"\begin{tabular}{l" + "r" * (len(self.heads) - 1) + "}", r"\toprule", line(self.heads), r"\midrule"]
        notes = [f"% {note}" for note in self.notes]
        return (
            "\n".join([f"% {self.title}", *body, *map(line, self.rows), r"\bottomrule", r"\end{tabular}", *notes])
            + "\n"
        )

    def json(self) -> str:
        content = self.data if self.data is not None else [dict(zip(self.heads, row, strict=True)) for row in self.rows]
        return json.dumps(
            {"title": self.title, "notes": list(self.notes), "rows": content}, ensure_ascii=False, indent=1
        )

    def terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        shown = [number for number, head in enumerate(self.heads) if head != VERDICT]  # too long for a column
        for number in shown:
            table.add_column(escape(self.heads[number]), justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*(escape(row[number]) for number in shown))
        return table

    def verdicts(self) -> list[str]:
        """What the table means, a line a row."""
        at = list(self.heads).index(VERDICT) if VERDICT in self.heads else None
        return [] if at is None else [f"{row[0]}: {row[at]}" for row in self.rows]


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in cell)


def written(sheets: Sequence[Sheet], form: str) -> str:
    """All sheets in one text: `md`, `csv`, `tex` or `json`."""
    if form == "json":
        return "[" + ",\n".join(sheet.json() for sheet in sheets) + "]\n"
    if form == "csv" and len(sheets) > 1:  # nothing but a line of its own tells which is which
        return "\n".join(f"{_csv_cell(sheet.title)}\n{sheet.csv()}" for sheet in sheets)
    each = {"md": Sheet.markdown, "csv": Sheet.csv, "tex": Sheet.latex}[form]
    return "\n".join(each(sheet) for sheet in sheets)


def _csv_cell(text: str) -> str:
    told = io.StringIO()
    csv.writer(told, lineterminator="").writerow([text])
    return told.getvalue()
