"""Put the measured tables of results/ into the READMEs, where they are marked `<!-- table: FILE -->`.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(match: re.Match[str]) -> str:
    lines = (ROOT / match[2]).read_text(encoding="utf-8").splitlines()
    return match[1] + "".join(f"{line}\n" for line in lines if line.startswith("|")) + match[3]


for path in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
    path.write_text(MARK.sub(table, path.read_text(encoding="utf-8")), encoding="utf-8")
