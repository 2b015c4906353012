"""The README is true: its Python runs, its plug-in works, and both languages agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import good

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]
BLOCK = re.compile(r"```(\w+)(?: title=(\S+))?\n(.*?)```", re.DOTALL)


def blocks(name: str, language: str) -> list[tuple[str, str]]:
    found = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    return [(title, code) for kind, title, code in found if kind == language]


@pytest.mark.parametrize("name", READMES)
def test_what_it_links_to_is_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_both_languages_show_the_same_code() -> None:
    for language in ("python", "yaml", "sh"):
        bare = [
            [re.sub(r"#.*|\"\"\".*\"\"\"", "", code).split() for _, code in blocks(name, language)] for name in READMES
        ]
        assert bare[0] == bare[1], language


def test_its_python_runs_and_its_plugin_works(tmp_path: Path) -> None:
    code = blocks("README.md", "python")
    script = "\n".join(block for title, block in code if not title)
    for title, block in code:
        if title:
            (tmp_path / title).write_text(block)
    (tmp_path / "script.py").write_text(script)  # no `__main__` guard: workers do not import it
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "iffi" in done.stdout and "tensor(" in done.stdout
    command = next(line for _, text in blocks("README.md", "sh") for line in text.splitlines() if "my_rules" in line)
    assert "loudest" in good(*command.split('"')[0].split()[1:], command.split('"')[1], cwd=tmp_path)
    (folder,) = (tmp_path / "runs").glob("fafi-digits-*")
    for words in (
        ["evaluate", str(folder)],
        ["evaluate", str(folder / "model"), "--plugin", "my_rules"],
        ["fuse", str(folder)],
    ):
        assert "loudest" in good(*words, cwd=tmp_path)


def test_the_recipe_it_shows_is_valid(tmp_path: Path) -> None:
    from oneround.config.load import load

    for _, text in blocks("README.md", "yaml"):
        (tmp_path / "mine.yaml").write_text(text)
        assert load(tmp_path / "mine.yaml").method == "mine"
