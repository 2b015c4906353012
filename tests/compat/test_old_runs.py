"""Run folders written by version 0.1.0 (commit 1282dff) are read, fused, compared and resumed with the numbers they had then.

`runs/` has the folders (README.md says how each was made), `expected.json` what that version printed about them, written by
`record_expected.py`. On another processor a number may differ by a test image or two. With ONEROUND_EXACT=1 in the
environment none may differ, which holds on the machine where they were recorded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from commands import bad, good, oneround

FIXTURES = Path(__file__).parent
RUNS = FIXTURES / "runs"

EXACT = bool(os.environ.get("ONEROUND_EXACT"))
ONE_IMAGE = 100 / 355 + 0.01  # in points: digits have 355 test images

WITH_MODEL = [
    "federation",
    "fp32",
    "int8",
    "masked",
    "mergenet",
    "noisy-counts",
    "rounds",
    "routed",
    "sums",
    "v10",
    "v9",
]
WITHOUT_MODEL = ["bank", "consensus"]  # taken out of the fixtures; a resumed run makes it again
FINISHED = [*WITH_MODEL, *WITHOUT_MODEL]
BEGUN = ["rails", "unfinished", "unfinished-rounds"]
FUSED_BY = {
    "federation": ["logit-ensemble"],
    "fp32": ["dynamic-prototypes", "split"],
    "int8": ["average"],
    "rails": ["iffi"],
    "routed": ["ridge"],
}
"""Rules whose model is written and evaluated."""
REPORTED = ["fp32", "masked", "mergenet", "rails", "study", "sweep"]
PREDICTED = ["fp32", "rounds", "routed", "sums"]
EXPORTED = ["int8", "rounds"]  # an ensemble; one network
REPEATED = ["int8", "masked", "sums"]  # one epoch, or nothing to train
COMPARED = {"methods": "sweep", "rounds": "study", "goals": "fp32", "peaks": "v10", "lambda": "v10", "gradients": "v9"}
"""Layouts of `compare`, with the folder each is asked about."""

IN_PROCESS = ["--set", "local.workers=1"]  # starting others takes longer than training
NARROW = ["--set", "model.encoder={kind: cnn, width: 2}", "--set", "training.batch_size=16"]
TWO_RULES = ["--set", "trace.every=0", "--set", "fusion=[iffi, average]"]
SWEEP = [
    "sweep", "fafi", "fafi+balanced", "--alpha", "0.5", "--partitions", "1-2", "--data", "digits", "--device", "cpu",
    *NARROW, "--set", "partition.clients=3", "--set", "training.epochs=2", *TWO_RULES,
]  # fmt: skip
STUDY = [
    "demo", "--partitions", "2", "--set", "local.device=cpu", "--set", "partition.clients=3", "--set", "partition.alpha=0.3",
    *NARROW, "--set", "training.epochs=2", "--set", "snapshots=1", *TWO_RULES,
]  # fmt: skip


# --- what the command line prints about a run --------------------------------------------------------------------------


def compared(runs: list[Path], folder: Path, *options: str) -> list[dict[str, Any]]:
    """Tables of `oneround compare`; their notes name the machine and are left out, seconds as well."""
    target = folder / "compared.json"
    good("compare", *map(str, runs), "--out", str(target), *options)
    sheets = read(target)
    for sheet in sheets:
        del sheet["notes"]
        for row in sheet["rows"] if "goals" in options else ():
            row["reached"] = {goal: [hit and hit[0] for hit in hits] for goal, hits in row["reached"].items()}
    return sheets


def evaluation(model: Path) -> dict[str, Any]:
    measured = json.loads(good("evaluate", str(model), "--json"))
    assert measured["data"] == "digits" and sum(map(sum, measured["confusion"])) == 355
    return {"rule": measured["rule"], "accuracy": 100 * measured["accuracy"], "loss": measured["loss"]}


def table(output: str) -> dict[str, float]:
    """Accuracy in percent by rule and client, from the table that `run` and `fuse` print."""
    return {name: float(value) for name, value in re.findall(r"│ (\S[^│]*?) │ ([\d.]+) │", output)}


def fused(run: Path, rule: str) -> dict[str, Any]:
    """The model that `fuse` writes, evaluated, and its accuracy in the table."""
    shown = table(good("fuse", str(run), "--rule", rule))
    return {"shown": shown, **evaluation(run / "fused" / rule)}


def diagnosis(run: Path, *options: str) -> dict[str, Any]:
    found = json.loads(good("diagnose", str(run), "--json", *options))
    findings = [[one["severity"], one["rule"], one["client"], one["epoch"]] for one in found["findings"]]
    kept = ("method", "epochs", "clients", "looked", "remarks", "geometry")
    return {"findings": findings, **{key: found[key] for key in kept}}


def prediction(run: Path, folder: Path) -> dict[str, float]:
    """Probabilities for an image file in which somebody has drawn a seven."""
    drawn = np.zeros((8, 8), np.uint8)
    drawn[1, 1:7], drawn[[2, 3, 4, 5, 6], [6, 5, 4, 3, 3]] = 240, 240
    Image.fromarray(drawn).save(folder / "seven.png")
    probabilities: dict[str, float] = json.loads(good("predict", str(run), str(folder / "seven.png"), "--json"))[
        "probabilities"
    ]
    return probabilities


def resumed(run: Path) -> dict[str, float]:
    return table(good("run", str(run), "--resume", *IN_PROCESS))


# --- helpers -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def accuracies(run: Path) -> dict[str, float]:
    """In percent, of every rule in `result.json`."""
    return {rule: 100 * score["accuracy"] for rule, score in read(run / "result.json")["rules"].items()}


def copy_of(name: str, folder: Path) -> Path:
    """A run folder that a test may change."""
    return Path(shutil.copytree(RUNS / name, folder / name))


def every(folder: Path) -> list[Path]:
    """All finished runs."""
    return [copy_of(name, folder) for name in FINISHED]


def contents(run: Path) -> dict[str, bytes]:
    """Files that nothing may touch where there is nothing to do."""
    names = ("result.json", "study.json", "metrics.jsonl", "recipe.yaml", "broadcast.safetensors")
    kept = (path for path in run.rglob("*") if path.name in names or path.parent.name in ("uploads", "model"))
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in kept}


def close(measured: Any, expected: Any, absolute: float = 0.0, relative: float = 1e-4) -> bool:
    """The same structure with the same values, numbers within a tolerance."""
    if isinstance(expected, dict):
        return list(measured) == list(expected) and all(
            close(measured[key], expected[key], absolute, relative) for key in expected
        )
    if isinstance(expected, list):
        return len(measured) == len(expected) and all(
            close(one, other, absolute, relative) for one, other in zip(measured, expected, strict=True)
        )
    if isinstance(expected, float) and not EXACT:
        return bool(measured == pytest.approx(expected, rel=relative, abs=absolute))
    return type(measured) is type(expected) and bool(measured == expected)


def close_evaluation(measured: dict[str, Any], expected: dict[str, Any], images: int = 1) -> bool:
    """Accuracy within some test images, the loss within a few parts in ten thousand for each."""
    numbers = [close(measured["accuracy"], expected["accuracy"], images * ONE_IMAGE)]
    numbers.append(close(measured["loss"], expected["loss"], relative=images * 3e-4))
    return all(numbers) and measured["rule"] == expected["rule"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    values: dict[str, Any] = read(FIXTURES / "expected.json")
    return values


# --- reading -----------------------------------------------------------------------------------------------------------


def test_scores_of_every_rule(tmp_path: Path, expected: dict[str, Any]) -> None:
    """All runs in one command: those with the same settings share a table."""
    for found, wanted in zip(compared(every(tmp_path), tmp_path, "--rule", "all"), expected["scores"], strict=True):
        assert close(found, wanted), found


@pytest.mark.parametrize("name", WITH_MODEL)
def test_evaluate(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    measured = evaluation(copy_of(name, tmp_path))
    assert close_evaluation(measured, expected["evaluate"][name]), measured


@pytest.mark.parametrize("name", PREDICTED)
def test_predict(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    measured = prediction(copy_of(name, tmp_path), tmp_path)
    assert close(measured, expected["predict"][name], 1e-4), measured


@pytest.mark.parametrize("name", [*FINISHED, *BEGUN])
def test_fuse_by_all_rules(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    """A run that ended early or was killed has uploads too."""
    measured = table(good("fuse", str(copy_of(name, tmp_path))))
    assert close(measured, expected["fuse all"][name], ONE_IMAGE), measured


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, chosen in FUSED_BY.items() for rule in chosen])
def test_fuse_by_one_rule(name: str, rule: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    measured, wanted = fused(copy_of(name, tmp_path), rule), expected["fuse"][name][rule]
    assert close_evaluation(measured, wanted), measured
    assert close(measured["shown"], wanted["shown"], ONE_IMAGE), measured


@pytest.mark.parametrize("name", [*FINISHED, *BEGUN])
def test_diagnose(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    measured = diagnosis(copy_of(name, tmp_path))
    assert close(measured, expected["diagnose"][name]), measured


def test_diagnose_deep(tmp_path: Path, expected: dict[str, Any]) -> None:
    measured = diagnosis(copy_of("v9", tmp_path), "--deep")
    assert measured["geometry"] and close(measured, expected["diagnose deep"]["v9"], relative=1e-3), measured


@pytest.mark.parametrize("layout", COMPARED)
def test_compare(layout: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    measured = compared([copy_of(COMPARED[layout], tmp_path)], tmp_path, "--layout", layout)
    without_titles, known = (
        [{**sheet, "title": ""} for sheet in sheets] for sheets in (measured, expected["compare"][layout])
    )
    assert close(without_titles, known), measured


def test_a_record_of_runs_compares_like_the_runs(tmp_path: Path, expected: dict[str, Any]) -> None:
    assert close(compared([RUNS / "sweep.json"], tmp_path), expected["compare"]["methods"])


@pytest.mark.parametrize("name", REPORTED)
def test_report(name: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    good("report", str(copy_of(name, tmp_path)), "--out", str(target))
    page = target.read_text(encoding="utf-8")
    assert "</html>" in page and "<svg" in page and len(page) > 20_000


@pytest.mark.parametrize("name", EXPORTED)
def test_export(name: str, tmp_path: Path) -> None:
    output = good("export", str(copy_of(name, tmp_path)), str(tmp_path / "model.onnx"))
    difference = re.search(r"onnxruntime gives the model's own scores to within (\S+)", output)
    assert difference is not None and float(difference[1]) < 1e-3, output


# --- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MODEL)
def test_a_finished_run_is_left_as_it_is(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    run = copy_of(name, tmp_path)
    before = contents(run)
    measured = resumed(run)
    assert close(measured, expected["resume"][name], ONE_IMAGE), measured
    assert contents(run) == before
    assert accuracies(run) == expected["result"][name]


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_a_model_that_is_missing_is_made_from_the_uploads(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    run = copy_of(name, tmp_path)
    before = contents(run / "uploads")
    measured = resumed(run)
    assert close(measured, expected["resume"][name], ONE_IMAGE), measured
    assert contents(run / "uploads") == before, "nobody trained again"
    assert close(accuracies(run), expected["result"][name], ONE_IMAGE)
    assert close_evaluation(evaluation(run), expected["evaluate"][name])


@pytest.mark.parametrize("name", ["unfinished", "unfinished-rounds"])
def test_a_killed_run_ends_as_if_undisturbed(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    run = copy_of(name, tmp_path)
    ended = (run / "uploads" / "client_001.safetensors").read_bytes()
    log = (run / "metrics.jsonl").read_text()
    measured = resumed(run)
    assert close(measured, expected["resume"][name], 3 * ONE_IMAGE), measured
    assert close(accuracies(run), expected["result"][name], 3 * ONE_IMAGE)
    assert close_evaluation(evaluation(run), expected["evaluate"][name], images=3)
    assert (run / "metrics.jsonl").read_text().startswith(log), "what was logged is kept"
    assert (run / "uploads" / "client_001.safetensors").read_bytes() == ended, "it had ended before the kill"
    assert not (run / "clients").exists()


def test_a_run_that_its_safeguard_ended_ends_there_again(tmp_path: Path, expected: dict[str, Any]) -> None:
    run = copy_of("rails", tmp_path)
    done = oneround("run", str(run), "--resume", *IN_PROCESS)
    assert done.returncode == 1
    trouble, _, rest = expected["rails"].partition(" (rails.largest_weight = 20)")
    cause = rest.partition("; stopped, ")[0]
    assert trouble and cause, "the wording of the rest may change, client, epoch, λ and cause may not"
    assert f"{trouble} (safeguards.largest_weight = 20){cause}" in done.stderr and "oneround fuse" in done.stderr
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("name", REPEATED)
def test_a_recipe_repeats_its_run(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    """The same scores, and on the machine that wrote it the same uploads."""
    recipe, again = copy_of(name, tmp_path) / "recipe.yaml", tmp_path / "again"
    measured = table(good("run", str(recipe), "--out", str(again), *IN_PROCESS))
    assert close(measured, expected["resume"][name], 3 * ONE_IMAGE), measured
    before, after = (read(run / "result.json") for run in (RUNS / name, again))
    for key in ("recipe_digest", "partition", "bytes_up", "bytes_down", "traffic"):
        assert after[key] == before[key], key
    assert not EXACT or after["uploads"] == before["uploads"]


def test_a_finished_sweep_trains_nothing_again(tmp_path: Path, expected: dict[str, Any]) -> None:
    sweep = copy_of("sweep", tmp_path)
    before = contents(sweep)
    output = good(*SWEEP, "--out", str(sweep))
    assert "fafi+balanced" in output and "not distinguishable with 2 pairs" in output
    assert contents(sweep) == before
    assert close(compared([sweep], tmp_path), expected["compare"]["methods"])


def test_a_sweep_with_another_recipe_is_refused(tmp_path: Path) -> None:
    sweep = copy_of("sweep", tmp_path)
    message = bad(*SWEEP, "--out", str(sweep), "--set", "training.learning_rate=0.5")
    assert "holds a run with training.learning_rate = 0.05, not 0.5" in message


def test_a_finished_study_trains_nothing_again(tmp_path: Path, expected: dict[str, Any]) -> None:
    study = copy_of("study", tmp_path)
    before = contents(study)
    good(*STUDY, "--out", str(study), "--resume")
    after = contents(study)
    assert {name: raw for name, raw in after.items() if name != "study.json"} == {
        name: raw for name, raw in before.items() if name != "study.json"
    }
    measured, record = read(study / "study.json"), expected["study"]
    assert close({key: measured[key] for key in record}, record, 0.01)
