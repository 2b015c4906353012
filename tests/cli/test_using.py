"""Commands that work on what a run left: fuse, evaluate, predict, export, methods."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import SMALL, bad, good, oneround
from conftest import small_recipe
from oneround.analysis.describe import describe
from oneround.cli.using import _model_name
from oneround.config.load import load, presets
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.simulate import run


def test_fuse_scores_all_and_writes_one(finished: Path, tmp_path: Path) -> None:
    output = good("fuse", str(finished), "--rule", "all")
    for rule in ("average", "iffi", "informative-iffi", "logit-ensemble", "entropy-gated", "typicality-gated"):
        assert rule in output
    output = good("fuse", str(finished), "--rule", "typicality-gated", "--set", "beta=2", "--out", str(tmp_path / "m"))
    assert "typicality-gated beta=2" in output and (tmp_path / "m" / "manifest.json").exists()
    result = json.loads((finished / "result.json").read_text())
    scored = json.loads(oneround("evaluate", str(finished), "--json").stdout)
    assert scored["accuracy"] == result["rules"]["iffi"]["accuracy"]
    assert "most often taken for" in good("evaluate", str(tmp_path / "m"), "--data", "digits")


def test_fuse_and_evaluate_score_transductively_on_request(finished: Path, tmp_path: Path) -> None:
    assert "transductive" not in good("fuse", str(finished), "--rule", "all")
    output = good("fuse", str(finished), "--rule", "all", "--transductive")
    assert "iffi, transductive" in output and "average, transductive" in output
    scores = {
        flag: json.loads(oneround("evaluate", str(finished), "--json", *flag).stdout)
        for flag in ((), ("--transductive",))
    }
    assert [score["rule"] for score in scores.values()] == ["iffi", "iffi, transductive"]
    assert scores[()]["confusion"] != scores["--transductive",]["confusion"]
    assert "iffi, transductive on digits" in good("evaluate", str(finished), "--transductive")
    good("run", "ridge", "--out", str(tmp_path / "x"), "--set", "sums.features={kind: patches, size: 48, patch: 4}")
    for command in (("fuse", str(tmp_path / "x"), "--rule", "ridge"), ("evaluate", str(tmp_path / "x"))):
        assert "no network is trained, so there is no batch norm" in bad(*command, "--transductive")


def test_fuse_says_that_the_model_is_of_an_earlier_epoch(finished: Path, tmp_path: Path) -> None:
    assert "the run's model is of epoch" not in oneround("fuse", str(finished)).stderr
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    result = json.loads((copy / "result.json").read_text())
    last = result["model"]["epoch"]
    result["model"] |= {"epoch": 1, "chosen_on": "validation"}
    (copy / "result.json").write_text(json.dumps(result))
    expected = f"uploads are of epoch {last}; the run's model is of epoch 1, the best on validation images"
    assert expected in " ".join(oneround("fuse", str(copy)).stderr.split())


def test_fuse_says_which_statistics_are_missing(tmp_path: Path) -> None:
    good(
        "run", "fafi", "--epochs", "1", "--model", "cnn", "--set", "fusion=[iffi]", "--out", str(tmp_path / "x"), *SMALL
    )
    assert "--set kind=iffi: the rule is named with --rule" in bad(
        "fuse", str(tmp_path / "x"), "--rule", "average", "--set", "kind=iffi"
    )
    assert "these uploads do not carry what it needs" in bad("fuse", str(tmp_path / "x"), "--rule", "typicality-gated")
    done = oneround("fuse", str(tmp_path / "x"), "--rule", "all")
    assert done.returncode == 0 and "typicality-gated is left out" in done.stderr


def test_evaluate_finds_the_data_of_a_run(digits: Dataset, tmp_path: Path) -> None:
    """The run's recipe says where its data is; a path on the command line comes first."""
    arrays = {
        f"{name}_{part}": getattr(digits, part).pixels[:200, 0].numpy() if name == "x" else getattr(digits, part).labels[:200].numpy()
        for name in "xy" for part in ("train", "test")
    }  # fmt: skip
    np.savez(tmp_path / "mine.npz", **arrays)
    np.savez(tmp_path / "fewer.npz", **{**arrays, "x_test": arrays["x_test"][:50], "y_test": arrays["y_test"][:50]})
    words = ["run", "fafi", "--data", "mine.npz", "--epochs", "1", "--model", "cnn", "--clients", "2"]
    good(*words, "--out", "x", *SMALL, cwd=tmp_path)
    good("fuse", "x", "--rule", "average", cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for folder in ("x", "x/model", "x/fused/average"):
        assert "of 200 test images" in good("evaluate", folder, cwd=tmp_path), folder
        assert "of 200 test images" in good("evaluate", f"../{folder}", cwd=tmp_path / "elsewhere"), folder
    fewer = str(tmp_path / "fewer.npz")
    assert "of 50 test images" in good("evaluate", "x", "--data-dir", fewer, cwd=tmp_path)
    assert "of 50 test images" in good("evaluate", "x", "--data", fewer, cwd=tmp_path)


NEEDY = '''
from oneround.fusion import EnsembleRule, rules

@rules.register("needy")
class Needy(EnsembleRule):
    """The sum of logits, times a gain without a default."""
    gain: float
    def add(self, totals, seen):
        return {"sum": seen.logits if totals is None else totals["sum"] + seen.logits}
    def scores(self, totals):
        return self.gain * totals["sum"]
'''


def test_a_plugin_rule_with_a_required_option(tmp_path: Path) -> None:
    """It is left out of `all` by one line that names the option; by name it is refused, or works with --set."""
    (tmp_path / "needy_rules.py").write_text(NEEDY)
    changes = ["--set", "local.plugins=[needy_rules]", "--set", "fusion=[iffi]"]
    good("run", "fafi", "--epochs", "1", "--model", "cnn", "--out", "x", *changes, *SMALL, cwd=tmp_path)
    every = oneround("fuse", "x", cwd=tmp_path)
    assert every.returncode == 0, every.stderr
    (line,) = [line for line in every.stderr.splitlines() if "needy" in line]
    assert line == "needy is left out: gain: is required (--rule needy --set OPTION=VALUE)"
    assert "iffi" in every.stdout and "needy" not in every.stdout
    assert bad("fuse", "x", "--rule", "needy", cwd=tmp_path) == "error: gain: is required"
    assert "needy gain=2.0" in good("fuse", "x", "--rule", "needy", "--set", "gain=2.0", cwd=tmp_path)
    line = bad("fuse", "x", "--rule", "split", "--set", "inner=average", cwd=tmp_path)
    assert "must be a rule that keeps networks" in line and "iffi" in line and "needy" not in line


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
    assert {_model_name("iffi", each, []) for each in two} == {"iffi-without-client_001-without-client_002"}
    many = [f"client_{number:03d}" for number in range(40)]
    names = {
        _model_name("iffi", many, []),
        _model_name("iffi", many[:-1], []),
        _model_name("iffi", many, [Path("late.safetensors")]),
    }
    assert len(names) == 3 and all(len(name) < 120 for name in names)


def test_a_copied_upload_is_refused_and_a_missing_one_is_reported(finished: Path, tmp_path: Path) -> None:
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


def test_predict(finished: Path, digits: Dataset, tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(digits.test.pixels[number, 0].numpy()).save(files[-1])
    done = oneround("predict", str(finished), *map(str, files), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["file"] for row in rows] == [str(file) for file in files]
    assert all(abs(sum(row["probabilities"].values()) - 1) < 1e-5 and len(row["probabilities"]) == 10 for row in rows)
    assert "%" in good("predict", str(finished), str(files[0]))


def test_a_model_cannot_be_exported_into_a_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    line = bad("export", str(finished), "model.onnx", cwd=tmp_path)
    assert line == "error: model.onnx: that is a folder; give a file name"


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


def test_a_method_is_explained_with_its_formula() -> None:
    assert presets()["fafi"]["about"]["formula"] in describe("v4", "cnn", 10, 1).lines()[2]
    lines = describe("demo", "cnn", 10, 1).lines()
    assert "SupCon" in lines[2] and "network: " in lines[4] and all(line.strip() for line in lines[4:6])
    with pytest.raises(RecipeError, match="no preset or recipe file 'V9'; did you mean 'v9'"):
        load("V9")


class Killed(Exception):
    pass


def test_fuse_says_that_uploads_are_of_different_epochs(finished: Path, digits: Dataset, tmp_path: Path) -> None:
    """The largest client has come to the second snapshot when the run is killed, the others have not."""
    seconds = []

    def emit(event: dict[str, object]) -> None:
        if event["event"] == "epoch" and event["epoch"] == 2:
            seconds.append(event["client"])
            if len(seconds) == 2:
                raise Killed

    recipe = small_recipe(partition__clients=3, training__epochs=3, snapshots=1, fusion=["iffi"], local__workers=1)
    with pytest.raises(Killed):
        run(recipe, tmp_path / "run", data=digits, emit=emit)
    remark = "uploads are of different epochs (1, 2): the run was stopped before every client reached the same epoch"
    for rule in ("iffi", "all"):
        done = oneround("fuse", str(tmp_path / "run"), "--rule", rule)
        assert done.returncode == 0 and done.stderr.splitlines().count(remark) == 1, done.stderr
    done = oneround("fuse", str(tmp_path / "run"), "--rule", "iffi", "--without", str(seconds[0]))
    assert done.returncode == 0 and "epochs" not in done.stderr, "the others are of one epoch"
    assert "epochs" not in oneround("fuse", str(finished), "--rule", "iffi").stderr
