"""Commands that run: run, demo, partition, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from commands import SMALL, bad, good
from oneround.cli import app
from oneround.cli.running import print_result
from oneround.config.load import load
from oneround.runs.result import Result


def test_run_leaves_a_resolved_recipe_with_what_was_asked(finished: Path) -> None:

    recipe = load(finished)
    assert (recipe.partition.clients, recipe.partition.alpha, recipe.training.epochs) == (3, 0.1, 2)
    assert recipe.seeds.model_dump() == {"partition": 4, "initialisation": 4, "training": 4}


def test_a_recipe_file_runs(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "extends: fafi\nmethod: mine\ndata: digits\npartition: {kind: shards, clients: 5, labels_per_client: 2}\n"
        "model: {encoder: {kind: cnn, width: 4}}\ntraining: {epochs: 1, batch_size: 64}\nfusion: [entropy-gated]\nlocal: {workers: 1}\n"
    )
    output = good("run", "my.yaml", cwd=tmp_path)
    assert "mine on digits" in output and "shards" in output
    assert (tmp_path / "runs" / "mine-digits-shards-clients5-labels_per_client2-s1" / "result.json").exists()


def test_a_finished_run_is_not_run_over(finished: Path) -> None:
    assert "--resume" in bad("run", str(finished), "--out", str(finished))
    assert "typicality-gated" in good("run", str(finished), "--resume")


def test_the_demo(tmp_path: Path) -> None:
    words = ["demo", "--partitions", "2", "--set", "training.epochs=2", "--set", "snapshots=1", *SMALL[:2]]
    output = good(*words, "--out", str(tmp_path / "demo"))
    for part in (
        "minus average",
        "iffi",
        "typicality-gated",
        "best client alone",
        "centralised",
        "not distinguishable",
        "Everything is in",
    ):
        assert part in output
    for name in ("accuracy.png", "partition_1/partition.png", "partition_2/accuracy.png", "study.json"):
        assert (tmp_path / "demo" / name).stat().st_size > 200
    study = json.loads((tmp_path / "demo" / "study.json").read_text())
    assert len(study["rules"]) == 6 and all(len(values) == 2 for values in study["rules"].values())
    assert len(set(study["partition_digests"])) == 2
    assert "minus average" in good(*words, "--out", str(tmp_path / "demo"), "--resume")


def test_partition_shows_and_draws(tmp_path: Path) -> None:
    output = good(
        "partition",
        "--data",
        "digits",
        "--clients",
        "4",
        "--alpha",
        "0.3",
        "--seed",
        "2",
        "--out",
        str(tmp_path / "p.png"),
    )
    assert "alpha=0.3" in output and "digest" in output
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.width > 400
    assert f"drawn in {tmp_path}/partition.png" in good("partition", "--out", str(tmp_path))
    assert (tmp_path / "partition.png").stat().st_size > 200
    assert "no picture format 'xyz'; use one of" in bad("partition", "--out", str(tmp_path / "p.xyz"))
    assert "no samples" in good("partition", "--alpha", "0.000001", "--clients", "30", "--out", str(tmp_path / "q.png"))


def _hear_hangups() -> None:
    """In the child: these tests may themselves run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("nohup", [True, False])
def test_a_closed_terminal_ends_a_run_unless_nohup_says_otherwise(tmp_path: Path, nohup: bool) -> None:
    small = ["--set", "training.epochs=12", "--set", "model.encoder={kind: cnn, width: 4}", "--set", "snapshots=0"]
    command = [sys.executable, "-m", "oneround.cli", "run", "fafi", "--data", "digits", "--clients", "2", *small]
    command = ["nohup", *command] if nohup else command
    run = subprocess.Popen([*command, "--out", str(tmp_path / "x")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_hangups)  # fmt: skip
    until = time.monotonic() + 100
    while not (tmp_path / "x" / "recipe.yaml").exists():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(signal.SIGHUP)
    _, wrong = run.communicate(timeout=200)
    if nohup:
        assert run.returncode == 0, wrong
    else:
        assert (run.returncode, "--resume" in wrong) == (130, True), wrong
    assert (tmp_path / "x" / "result.json").exists() == nohup


def test_own_data_as_npz_and_as_images(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x, y = random.randint(0, 256, (40, 10, 10)).astype(np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], group_train=np.arange(40) % 5)
    output = good(
        "run",
        "fafi",
        "--data",
        "mine.npz",
        "--partition",
        "natural",
        "--epochs",
        "1",
        "--model",
        "cnn",
        "--out",
        "r1",
        *SMALL,
        cwd=tmp_path,
    )
    assert "mine" in output and "5 clients" in output
    for number in range(20):
        path = tmp_path / "pictures" / "abcd"[number % 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number]).save(path)
    output = good(
        "run",
        "fafi",
        "--data",
        "pictures",
        "--set",
        "data.size=12",
        "--clients",
        "2",
        "--epochs",
        "1",
        "--model",
        "cnn",
        "--out",
        "r2",
        *SMALL,
        cwd=tmp_path,
    )
    assert "3×12×12, 4 classes" in output


@pytest.mark.parametrize("out", ["taken", "taken/below", "/proc/nowhere"])
def test_a_place_that_cannot_be_written_to_is_one_line(out: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    line = bad("run", "fafi", "--model", "cnn", "--out", out, *SMALL, cwd=tmp_path, code=1)
    assert line.startswith(f"error: {out}: ")
    line = bad("partition", "--out", f"{out}/p.png", cwd=tmp_path, code=1)
    assert line.startswith(f"error: {out}: ")


def test_numbers_of_a_partition_are_never_cut(here: Path) -> None:
    output = CliRunner().invoke(app, ["partition", "--clients", "20", "--alpha", "0.1"], env={"COLUMNS": "60"}).output
    assert "…" not in output.partition("drawn in")[0]
    assert (here / "partition.png").is_file(), "drawn in the current folder unless --out names another"


def test_no_picture_that_a_command_draws_is_tracked() -> None:
    """`oneround partition` draws into the current folder, which may be the checkout."""
    root = Path(__file__).parents[2]
    assert "/partition.png" in (root / ".gitignore").read_text().split()
    tracked = subprocess.run(["git", "ls-files", "*.png"], cwd=root, capture_output=True, text=True, check=False)
    assert [name for name in tracked.stdout.split() if "/" not in name] == []


def test_a_result_is_printed_with_what_was_chosen_and_the_remarks(capsys: pytest.CaptureFixture[str]) -> None:
    """The same for a run and for a federation, whose server may have no images to score on."""
    curves, validation = {"iffi": {1: 0.8, 2: 0.9}}, {"iffi": {1: 0.7, 2: 0.6}}
    rules, clients, personal = {"iffi": 0.9}, {"client_000": 0.5}, {"iffi": 0.75}
    print_result(Result(Path("run"), rules, clients, curves, validation, "digest", ("one is missing",), personal))
    printed = capsys.readouterr().out
    assert "90.00" in printed and "client_000 alone" in printed and "mix of classes, mean: iffi 75.0" in printed
    assert "iffi at epoch 1, 80.00 % (on validation 70.00 %)" in printed and "note: one is missing" in printed
    print_result(Result(Path("run"), {}, {}, {}, {}, "digest", ("one is missing",)))
    assert capsys.readouterr().out == "note: one is missing\n"
