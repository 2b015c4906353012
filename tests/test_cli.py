"""The command line as people type it, in processes of its own."""

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

from commands import bad, good, oneround
from oneround.cli import app
from oneround.cli.using import _named
from oneround.data import Dataset
from oneround.describe import describe
from oneround.errors import RecipeError
from oneround.reading import load, presets

SMALL = ["--set", "model.encoder.width=4", "--set", "local.workers=1", "--set", "training.batch_size=64"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "x"
    words = [
        "run",
        "fafi",
        "--data",
        "digits",
        "--clients",
        "3",
        "--alpha",
        "0.1",
        "--epochs",
        "2",
        "--seed",
        "4",
        "--model",
        "cnn",
    ]
    told = good(*words, "--out", str(folder), *SMALL)
    for part in (
        "1,442 training",
        "parameters",
        "down",
        "epoch 2:",
        "typicality-gated",
        "client_000 alone",
        str(folder),
    ):
        assert part in told
    return folder


def test_run_leaves_a_resolved_recipe_with_what_was_asked(finished: Path) -> None:
    from oneround.reading import load

    recipe = load(finished)
    assert (recipe.partition.clients, recipe.partition.alpha, recipe.training.epochs) == (3, 0.1, 2)
    assert recipe.seeds.model_dump() == {"partition": 4, "initialisation": 4, "training": 4}


def test_a_recipe_file_runs(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "extends: fafi\nmethod: mine\ndata: digits\npartition: {kind: shards, clients: 5, labels_per_client: 2}\n"
        "model: {encoder: {kind: cnn, width: 4}}\ntraining: {epochs: 1, batch_size: 64}\nfusion: [entropy-gated]\nlocal: {workers: 1}\n"
    )
    told = good("run", "my.yaml", cwd=tmp_path)
    assert "mine on digits" in told and "shards" in told
    assert (tmp_path / "runs" / "mine-digits-shards-clients5-labels_per_client2-s1" / "result.json").exists()


def test_a_finished_run_is_not_run_over(finished: Path) -> None:
    assert "--resume" in bad("run", str(finished), "--out", str(finished))
    assert "typicality-gated" in good("run", str(finished), "--resume")


def test_the_demo(tmp_path: Path) -> None:
    words = ["demo", "--partitions", "2", "--set", "training.epochs=2", "--set", "snapshots=1", *SMALL[:2]]
    told = good(*words, "--out", str(tmp_path / "demo"))
    for part in (
        "minus average",
        "iffi",
        "typicality-gated",
        "best client alone",
        "centralised",
        "not distinguishable",
        "Everything is in",
    ):
        assert part in told
    for name in ("accuracy.png", "partition_1/partition.png", "partition_2/accuracy.png", "study.json"):
        assert (tmp_path / "demo" / name).stat().st_size > 200
    study = json.loads((tmp_path / "demo" / "study.json").read_text())
    assert len(study["rules"]) == 6 and all(len(values) == 2 for values in study["rules"].values())
    assert len(set(study["partition_digests"])) == 2
    assert "minus average" in good(*words, "--out", str(tmp_path / "demo"), "--resume")


def test_partition_shows_and_draws(tmp_path: Path) -> None:
    told = good(
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
    assert "alpha=0.3" in told and "digest" in told
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.width > 400
    assert f"drawn in {tmp_path}/partition.png" in good("partition", "--out", str(tmp_path))
    assert (tmp_path / "partition.png").stat().st_size > 200
    assert "no picture format 'xyz'; use one of" in bad("partition", "--out", str(tmp_path / "p.xyz"))
    assert "no samples" in good("partition", "--alpha", "0.000001", "--clients", "30", "--out", str(tmp_path / "q.png"))


def test_fuse_scores_all_and_writes_one(finished: Path, tmp_path: Path) -> None:
    told = good("fuse", str(finished), "--rule", "all")
    for rule in ("average", "iffi", "informative-iffi", "logit-ensemble", "entropy-gated", "typicality-gated"):
        assert rule in told
    told = good("fuse", str(finished), "--rule", "typicality-gated", "--set", "beta=2", "--out", str(tmp_path / "m"))
    assert "typicality-gated beta=2" in told and (tmp_path / "m" / "manifest.json").exists()
    result = json.loads((finished / "result.json").read_text())
    scored = json.loads(oneround("evaluate", str(finished), "--json").stdout)
    assert scored["accuracy"] == result["rules"]["iffi"]["accuracy"]
    assert "most often taken for" in good("evaluate", str(tmp_path / "m"), "--data", "digits")


def test_fuse_says_which_statistics_are_missing(tmp_path: Path) -> None:
    good(
        "run", "fafi", "--epochs", "1", "--model", "cnn", "--set", "fusion=[iffi]", "--out", str(tmp_path / "x"), *SMALL
    )
    assert "these uploads do not carry what it needs" in bad("fuse", str(tmp_path / "x"), "--rule", "typicality-gated")
    done = oneround("fuse", str(tmp_path / "x"), "--rule", "all")
    assert done.returncode == 0 and "typicality-gated is left out" in done.stderr


def test_a_late_upload_is_fused_in(finished: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    late = copy / "uploads" / "client_002.safetensors"
    raw = late.read_bytes()
    late.unlink()
    without = good("fuse", str(copy), "--rule", "iffi")
    late.write_bytes(raw)
    assert good("fuse", str(copy), "--rule", "iffi") != without
    late.write_bytes(raw[:-100])
    assert "client_002.safetensors: refused" in bad("fuse", str(copy), "--rule", "iffi")
    late.write_bytes(raw)
    before = (copy / "fused" / "iffi" / "manifest.json").read_bytes()
    good("fuse", str(copy), "--rule", "iffi", "--without", "client_002")
    assert (copy / "fused" / "iffi" / "manifest.json").read_bytes() == before, "the model of all is still there"
    assert (copy / "fused" / "iffi-without-client_002" / "manifest.json").is_file()


def test_a_model_is_named_after_who_is_left_out_in_any_order_and_number() -> None:
    two = [["client_001", "client_002"], ["client_002", "client_001"]]
    assert {_named("iffi", each, []) for each in two} == {"iffi-without-client_001-without-client_002"}
    many = [f"client_{number:03d}" for number in range(40)]
    names = {_named("iffi", many, []), _named("iffi", many[:-1], []), _named("iffi", many, [Path("late.safetensors")])}
    assert len(names) == 3 and all(len(name) < 120 for name in names)


@pytest.mark.parametrize("nohup", [True, False])
def test_a_closed_terminal_ends_a_run_unless_nohup_says_otherwise(tmp_path: Path, nohup: bool) -> None:
    small = ["--set", "training.epochs=40", "--set", "model.encoder={kind: cnn, width: 4}", "--set", "snapshots=0"]
    command = [sys.executable, "-m", "oneround.cli", "run", "fafi", "--data", "digits", "--clients", "2", *small]
    command = ["nohup", *command] if nohup else command
    run = subprocess.Popen([*command, "--out", str(tmp_path / "x")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    until = time.monotonic() + 100
    while not (tmp_path / "x" / "recipe.yaml").exists():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(signal.SIGHUP)
    _, wrong = run.communicate(timeout=200)
    if nohup:
        assert run.returncode == 0, wrong
    else:
        assert run.returncode == 130 and "--resume" in wrong
    assert (tmp_path / "x" / "result.json").exists() == nohup


@pytest.mark.parametrize("words", [("--interest", "nan"), ("--goal", "nan"), ("--interest", "inf")])
def test_what_is_no_number_is_no_limit(finished: Path, words: tuple[str, str]) -> None:
    assert f"{' '.join(words)}: must be a number" in bad("compare", str(finished), *words)


def test_a_copied_upload_is_refused_and_a_missing_one_is_told(finished: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(finished, tmp_path / "copy")
    uploads = tmp_path / "copy" / "uploads"
    shutil.copy(uploads / "client_000.safetensors", uploads / "client_009.safetensors")
    line = bad("fuse", str(tmp_path / "copy"), "--rule", "iffi")
    assert "client_009.safetensors: refused, it is the upload of client_000" in line
    (uploads / "client_009.safetensors").unlink()
    (uploads / "client_001.safetensors").unlink()
    done = oneround("fuse", str(tmp_path / "copy"), "--rule", "iffi")
    assert done.returncode == 0 and "missing and left out: client_001" in " ".join(done.stderr.split())
    assert "missing" not in oneround("fuse", str(finished), "--rule", "iffi").stderr


def test_predict_and_export(finished: Path, digits: Dataset, tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(digits.test.pixels[number, 0].numpy()).save(files[-1])
    told = oneround("predict", str(finished), *map(str, files), "--json")
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["file"] for row in rows] == [str(file) for file in files]
    assert all(abs(sum(row["probabilities"].values()) - 1) < 1e-5 and len(row["probabilities"]) == 10 for row in rows)
    assert "%" in good("predict", str(finished), str(files[0]))
    told = good("export", str(finished), str(tmp_path / "model.onnx"))
    assert "onnxruntime" in told and (tmp_path / "model.onnx").exists()


def test_own_data_as_npz_and_as_images(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x, y = random.randint(0, 256, (40, 10, 10)).astype(np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], group_train=np.arange(40) % 5)
    told = good(
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
    assert "mine" in told and "5 clients" in told
    for number in range(20):
        path = tmp_path / "pictures" / "abcd"[number % 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number]).save(path)
    told = good(
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
    assert "3×12×12, 4 classes" in told


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


@pytest.mark.parametrize("out", ["taken", "taken/below", "/proc/nowhere"])
def test_a_place_that_cannot_be_written_to_is_one_line(out: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    line = bad("run", "fafi", "--model", "cnn", "--out", out, *SMALL, cwd=tmp_path, code=1)
    assert line.startswith(f"error: {out}: ")
    line = bad("partition", "--out", f"{out}/p.png", cwd=tmp_path, code=1)
    assert line.startswith(f"error: {out}: ")


def test_a_model_cannot_be_exported_into_a_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    done = oneround("export", str(finished), "model.onnx", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: model.onnx: Is a directory; a folder is there, name a file"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(28, "No space left on device", "r/a"),
            "error: r/a: No space left on device; free some space and go on with --resume",
        ),
        (
            OSError(28, "No space left on device"),
            "error: No space left on device; free some space and go on with --resume",
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


def test_mistakes_with_a_model(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"junk")
    assert "a.png: not a readable image" in bad("predict", str(finished), str(tmp_path / "a.png"))
    assert "did you mean 'iffi'" in bad("fuse", str(finished), "--rule", "ifi")
    assert "bta" in bad("fuse", str(finished), "--rule", "typicality-gated", "--set", "bta=2")
    np.savez(
        tmp_path / "other.npz",
        x_train=np.zeros((4, 9, 9), np.uint8),
        y_train=[0, 1, 0, 1],
        x_test=np.zeros((2, 9, 9), np.uint8),
        y_test=[0, 1],
    )
    assert "this model takes (1, 8, 8)" in bad("evaluate", str(finished), "--data", str(tmp_path / "other.npz"))


def test_methods_and_help() -> None:
    assert "fafi" in good("methods") and "v4" in good("methods")
    told = good("--help")
    for command in ("demo", "run", "partition", "fuse", "evaluate", "predict", "export", "methods"):
        assert command in told


def test_started_from_nothing_it_says_the_same() -> None:
    """The other commands here begin with PyTorch in place; this one begins as a user's does."""
    words = ["run", "fafi", "--epochs", "0"]
    done = subprocess.run([sys.executable, "-m", "oneround.cli", *words], capture_output=True, text=True, timeout=300)
    forked = oneround(*words)
    assert (done.returncode, done.stdout, done.stderr) == (forked.returncode, forked.stdout, forked.stderr)


def test_a_method_is_explained_with_its_formula_or_without() -> None:
    assert presets()["fafi"]["about"]["formula"] in describe("v4", "cnn", 10, 1).lines()[2]
    told = describe("demo", "cnn", 10, 1).lines()
    assert "network: " in told[2] and all(line.strip() for line in told[2:4])
    with pytest.raises(RecipeError, match="no preset or recipe file 'V9'; did you mean 'v9'"):
        load("V9")


def test_help_says_what_arguments_are() -> None:
    for command, words in (("run", "A preset (see oneround methods), a recipe file"), ("export", "Where to write it")):
        told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert words in " ".join(told.split()), command


def test_numbers_of_a_partition_are_never_cut() -> None:
    told = CliRunner().invoke(app, ["partition", "--clients", "20", "--alpha", "0.1"], env={"COLUMNS": "60"}).output
    assert "…" not in told.partition("drawn in")[0]


def test_what_a_command_cannot_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "site.npz").write_bytes(bytes(range(200, 256)))
    for words, line in (
        (["federate", "client", "--server", "localhost:1", "--insecure", "--site", "site.npz"], "site.npz: not text; a site file is YAML"),
        (["export", "nowhere", "model.txt"], "model.txt: name a file that ends in .onnx"),
        (["run", "fafi", "--data", "nowhere/images"], "--data nowhere/images: no such folder"),
        (["run", "fafi", "--set", "model.encoder.norm=group"], "model.encoder: its kind is not said; add encoder.kind ("),
        (["federate", "client", "--server", "localhost:99999", "--insecure", "--name", "a", "--data", "site.npz"], "the port from 1 to 65535"),
        (["federate", "client", "--server", "localhost:1", "--insecure", "--name", "a"], "error: site: give data (a folder"),
    ):  # fmt: skip
        assert line in " ".join(bad(*words, cwd=tmp_path).split())


def test_options_that_would_do_nothing_are_refused(finished: Path) -> None:
    for words in (["--set", "beta=2"], ["--out", "somewhere"]):
        assert "--set and --out are for one rule; name it with --rule" in bad("fuse", str(finished), *words)
    assert "5-1 is no range of 1 to 1,000 seeds" in bad("sweep", "v4", "--partitions", "5-1")
    assert "1-100000000 is no range" in bad("sweep", "v4", "--partitions", "1-100000000")
    assert "--minutes nan: must be a number above 0" in bad("sweep", "v4", "--minutes", "nan")
