"""The words of the field are used, and every import is an import statement: nothing is loaded by its name but plug-ins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
DIALECT = {"told", "said", "place", "held", "there", "crew", "aside"}
OLD_MODULES = {
    "reading", "crew", "closing", "finished", "layouts", "rails", "memory", "summing", "sound", "words", "sinks", "claims", "reveal",
    "start", "leaves", "again", "reception", "operating", "carrying", "pairing", "observe", "learning", "train_aside", "alone", "desk",
    "job", "seen", "found", "wanted", "given", *DIALECT,
}  # fmt: skip
PLUGIN_LOADERS = {"config/parts.py"}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that somebody chose: variables, arguments, attributes, functions, classes, keywords, aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_the_field_s(path: Path) -> None:
    found = DIALECT & {name.lower() for name in identifiers(ast.parse(path.read_text(encoding="utf-8")))}
    assert not found, f"{path.relative_to(ROOT)} has identifiers called {', '.join(sorted(found))}"


def test_keys_of_messages_and_files_are_the_field_s_too() -> None:
    """`held` is read in models of version 0.1.0; `aside` is an element of HTML and a key of `diagnose --json`."""
    found = {
        (str(path.relative_to(ROOT / "src" / "oneround")), node.value)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in DIALECT
    }
    assert {word for _, word in found} == {"held", "aside"}
    assert {path for path, word in found if word == "held"} == {"fusion/routed.py"}


def test_the_check_of_names_finds_each_kind_of_name() -> None:
    for text in (
        "told = 1",
        "def f(place): 0",
        "x.held",
        "def said(): 0",
        "class crew: 0",
        "f(there=1)",
        "import a as aside",
        "from a import told",
        "import a.held",
        "try: 0\nexcept OSError as said: 0",
        "match x:\n case place: 0",
        "match x:\n case [*there]: 0",
        "match x:\n case {1: 2, **told}: 0",
    ):
        assert DIALECT & set(identifiers(ast.parse(text))), text


def test_no_module_has_its_old_name() -> None:
    package = ROOT / "src" / "oneround"
    names = {part for path in package.rglob("*.py") for part in path.relative_to(package).with_suffix("").parts}
    assert not names & OLD_MODULES
    assert not {f"{name}.py" for name in ("folder", "runs", "finished", "closing")} & {
        path.name for path in package.glob("*")
    }
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("*.py")}
    assert not tested & OLD_MODULES


def test_nothing_but_plugins_is_imported_by_name() -> None:
    package = ROOT / "src" / "oneround"
    loaders = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if {"import_module", "__import__"} & set(identifiers(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert loaders == PLUGIN_LOADERS


def test_modules_are_named_in_strings_only_to_start_processes() -> None:
    package = ROOT / "src" / "oneround"
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in modules
    }
    assert naming == {"cli/running.py", "federate/processes.py"}, "an import that the import contract does not see"


def has_logic(tree: ast.AST) -> bool:
    """Whether a module has a function that does something."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return any(not isinstance(node.body[-1], ast.Expr | ast.Pass) for node in functions)


def test_every_module_with_logic_has_a_test_file_of_its_name() -> None:
    package = ROOT / "src" / "oneround"
    modules = [
        path.relative_to(package) for path in package.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
    ]
    untested = [
        str(module)
        for module in sorted(modules)
        if has_logic(ast.parse((package / module).read_text(encoding="utf-8")))
        and not (ROOT / "tests" / module.parent / f"test_{module.name}").is_file()
    ]
    assert len(modules) > 100 and not untested, f"no test file: {', '.join(untested)}"
