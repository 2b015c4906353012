"""`oneround` itself: a mistake is one line and an exit code, however it is started."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from commands import bad, good, oneround
from oneround.errors import RunError

MISTAKES = {
    "run fafi --alpha -1": ["partition.alpha = -1.0", "> 0"],
    "run fafi --epochs 0": ["training.epochs = 0", "≥ 1"],
    "run fafi --clients 2000": ["partition.clients = 2000", "≤ 1442"],
    "run fafi --set training.epohcs=3": ["training.epohcs = 3", "did you mean 'epochs'"],
    "run faffi": ["faffi", "did you mean 'fafi'"],
    "run fafi --data cifra10": ["cifra10", "did you mean 'cifar10'"],
    "run fafi --data gone.npz": ["gone.npz"],
    "run fafi --device cuda:9": ["cuda:9", "cpu"],
    "run nosuch.yaml": ["nosuch.yaml"],
    "partition --partition natural": ["group_train"],
    "fuse nowhere": ["nowhere", "recipe.yaml"],
    "evaluate nowhere": ["nowhere", "manifest.json"],
    "predict nowhere a.png": ["nowhere"],
    "export nowhere a.onnx": ["nowhere"],
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    line = bad(*command.split(), cwd=tmp_path)
    for word in MISTAKES[command]:
        assert word in line
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(28, "No space left on device", "r/a"),
            "error: r/a: No space left on device; free some space and continue with --resume",
        ),
        (
            OSError(28, "No space left on device"),
            "error: No space left on device; free some space and continue with --resume",
        ),
        (OSError("odd"), "error: odd"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from oneround import cli

    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize(
    "error", [EOFError("worker"), SystemExit(1), RunError("a training process died"), BrokenPipeError()]
)
def test_what_fails_after_it_was_asked_to_end_is_an_interruption(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from oneround import cli

    def fail() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise error

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "_interrupted", False)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err.startswith("error: ")
    for number, handler in before.items():
        signal.signal(number, handler)


def test_methods_and_help() -> None:
    assert "fafi" in good("methods") and "v4" in good("methods")
    output = good("--help")
    for command in ("demo", "run", "partition", "fuse", "evaluate", "predict", "export", "methods"):
        assert command in output


def test_started_from_nothing_it_says_the_same() -> None:
    """The other commands here begin with PyTorch in place; this one begins as a user's does."""
    words = ["run", "fafi", "--epochs", "0"]
    done = subprocess.run([sys.executable, "-m", "oneround.cli", *words], capture_output=True, text=True, timeout=300)
    forked = oneround(*words)
    assert (done.returncode, done.stdout, done.stderr) == (forked.returncode, forked.stdout, forked.stderr)


def test_what_a_command_cannot_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "site.npz").write_bytes(bytes(range(200, 256)))
    for words, line in (
        (["federate", "client", "--server", "localhost:1", "--insecure", "--site", "site.npz"], "site.npz: not text; a site file is a YAML mapping"),
        (["export", "nowhere", "model.txt"], "model.txt: name a file that ends in .onnx"),
        (["run", "fafi", "--data", "nowhere/images"], "--data nowhere/images: no such folder"),
        (["run", "fafi", "--set", "model.encoder.norm=group"], "model.encoder: has no kind; add encoder.kind ("),
        (["federate", "client", "--server", "localhost:99999", "--insecure", "--name", "a", "--data", "site.npz"], "the port from 1 to 65535"),
        (["federate", "client", "--server", "localhost:1", "--insecure", "--name", "a"], "error: site: give data (a folder"),
    ):  # fmt: skip
        assert line in " ".join(bad(*words, cwd=tmp_path).split())
