"""What a run ran on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from oneround.runs import environment


def test_the_commit_is_that_of_the_checkout_marked_when_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "oneround" / "observe"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("one\n")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.delenv("ONEROUND_COMMIT", raising=False)
    assert environment.commit() is None  # no checkout

    def git(*words: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *named, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init")
    git("add", "-A")
    git("commit", "-m", "one")
    known = git("rev-parse", "HEAD")[:12]
    (package / "new.py").write_text("untracked\n")
    assert environment.commit() == known
    (package / "environment.py").write_text("two\n")
    assert environment.commit() == f"{known}-dirty"
    monkeypatch.setenv("ONEROUND_COMMIT", "given")
    assert environment.commit() == "given"


def test_git_is_asked_once_for_all_runs_of_a_process(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked: list[str] = []
    ask = environment.commit
    monkeypatch.setattr(environment, "commit", lambda: ask() or asked.append("git") or "abc")
    monkeypatch.setattr(environment, "_git", lambda *arguments: "")
    environment._commit_at_first.cache_clear()
    request.addfinalizer(environment._commit_at_first.cache_clear)
    monkeypatch.delenv("ONEROUND_COMMIT", raising=False)
    cpu = torch.device("cpu")
    first, second = environment.environment(cpu), environment.environment(cpu)
    assert first == second and first["commit"] == "abc" and asked == ["git"]
    first["packages"].clear()
    assert environment.environment(cpu) == second, "what a caller does to its copy is its own"
    monkeypatch.setenv("ONEROUND_COMMIT", "given")
    assert environment.environment(cpu)["commit"] == "given"


@pytest.mark.parametrize("tracked", [False, True], ids=["ignored", "committed by mistake"])
def test_a_package_installed_inside_another_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: bool
) -> None:
    """A virtual environment in the folder of somebody's project: that project's commit is not this code's."""
    package = tmp_path / ".venv" / "lib" / "python3" / "site-packages" / "oneround" / "observe"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("one\n")
    (tmp_path / "theirs.py").write_text("one\n")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.delenv("ONEROUND_COMMIT", raising=False)
    named = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init"], ["add", "-A"] if tracked else ["add", "theirs.py"], ["commit", "-m", "theirs"]):
        subprocess.run([*named, *words], cwd=tmp_path, capture_output=True, check=True)
    assert environment.commit() is None


def test_an_untracked_copy_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "oneround" / "observe"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("one\n")
    (tmp_path / "theirs.py").write_text("one\n")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.delenv("ONEROUND_COMMIT", raising=False)
    for words in (
        ["init"],
        ["add", "theirs.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "theirs"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, check=True)
    assert environment.commit() is None
