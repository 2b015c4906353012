"""Fill in the tables of the pages: what stands between `<!-- oneround compare … -->` and `<!-- end -->` is what that command writes,
and after `<!-- table: FILE -->` the tables in that file, which a benchmark wrote.

python benchmarks/tables.py
"""

from __future__ import annotations

import re
import shlex
import tempfile
from itertools import groupby
from pathlib import Path

from typer.testing import CliRunner

from oneround.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "results/README.md"]
FROM_FILE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARK = re.compile(r"(<!-- oneround (compare .*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(command: str) -> str:
    """What `oneround compare …` writes as Markdown, without its titles unless there are several."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "table.md"
        arguments = [str(ROOT / word) if word.startswith("results/") else word for word in shlex.split(command)]
        done = CliRunner().invoke(app, [*arguments, "--out", str(target)])
        if done.exit_code:
            raise SystemExit(f"oneround {command}: {done.output}")
        lines = target.read_text(encoding="utf-8").splitlines()
    several = sum(line.startswith("## ") for line in lines) > 1
    body = [
        f"**{line[3:]}**" if line.startswith("## ") and several else line
        for line in lines
        if several or not line.startswith("## ")
    ]
    return "\n".join(body).strip("\n") + "\n"


def filled(text: str) -> str:
    """A page with its tables made anew."""
    text = FROM_FILE.sub(lambda mark: mark[1] + copied(ROOT / mark[2]) + mark[3], text)
    return MARK.sub(lambda mark: mark[1] + table(mark[2]) + mark[3], text)


def copied(path: Path) -> str:
    """The tables of a page, with a blank line between two."""
    lines = [line if line.startswith("|") else "" for line in path.read_text(encoding="utf-8").splitlines()]
    blocks = ["\n".join(block) for is_table, block in groupby(lines, bool) if is_table]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
