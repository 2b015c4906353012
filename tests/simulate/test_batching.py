"""Who trains together, and runs that do: recorded, resumed in the mode they were begun in, killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import run_in_parts, small_recipe
from oneround.config.load import change
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import OutOfTime, RecipeError
from oneround.models.encoders import encoders
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate import batching, run
from oneround.simulate.batching import (
    MOST_ACTIVATIONS,
    REMARK,
    Members,
    activations,
    groups,
    outputs_per_image,
    trains_batched,
)
from oneround.training.batched_loop import Group
from run_files import final, timeless

MANY = {"partition__clients": 6, "partition__kind": "iid", "training__batch_size": 32, "local__workers": 1}


def recipe_of(**changes: Any) -> Recipe:
    return small_recipe(**{**MANY, **changes})


def grouped(sizes: list[int], **changes: Any) -> list[Members]:
    named = {f"c{number}": size for number, size in enumerate(sizes)}
    return groups(recipe_of(**changes), (1, 8, 8), named)


def test_clients_of_one_step_shape_are_a_group() -> None:
    assert grouped([100, 20, 90, 20, 31]) == [
        Members(["c0", "c2"], 2),
        Members(["c4"], 1),
        Members(["c1", "c3"], 2),
    ]


def test_a_group_has_at_most_twice_as_many_steps_as_its_shortest() -> None:
    assert grouped([320, 160, 150, 40]) == [Members(["c0", "c1", "c2"], 3), Members(["c3"], 1)]


def test_groups_are_of_equal_size_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    formed = grouped([40] * 150)
    assert [(len(members.names), members.slots) for members in formed] == [(50, 50)] * 3
    assert [(len(members.names), members.slots) for members in grouped([40] * 65)] == [(32, 33), (33, 33)]
    assert sorted(name for members in formed for name in members.names) == sorted(f"c{number}" for number in range(150))
    monkeypatch.setattr(batching, "MOST_ACTIVATIONS", 3 * activations(recipe_of(), (1, 8, 8), 32))
    assert [members.slots for members in grouped([40] * 6)] == [3, 3]
    monkeypatch.setattr(batching, "MOST_ACTIVATIONS", 1)
    assert grouped([40] * 2) == [Members(["c0"], 1), Members(["c1"], 1)]


def test_activations_are_the_outputs_of_convolutions_and_the_similarities() -> None:
    outputs = 4 * 64 + 8 * 16 + 16 * 4
    assert outputs_per_image(encoders.parse({"kind": "cnn", "width": 4}), (1, 8, 8)) == outputs
    assert activations(recipe_of(), (1, 8, 8), 10) == 20 * (outputs + 20)
    queue = {"preset": "fafi+queue", "queue__size": 100}
    assert activations(recipe_of(**queue), (1, 8, 8), 10) == 20 * (outputs + 20 + 100)
    reference = recipe_of(model__encoder="resnet18", training__batch_size=512)
    assert 2 * activations(reference, (3, 32, 32), 512) > MOST_ACTIVATIONS  # the reference setting trains one by one


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local__compile": True}, "local.compile compiles the network of one client; set it to false"),
        ({"partition__clients": 1}, "there is one client; leave it out"),
        ({"partition__kind": "dirichlet", "partition__alpha": 0.3, "training__batch_size": 2000}, "no two clients have steps of one shape; set training.batch_size to"),
        ({"model__encoder": "resnet18", "training__batch_size": 200, "training__views": 2}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_batched_is_refused_on_request(
    changes: dict[str, Any], words: str | None, digits: Dataset, tmp_path: Path
) -> None:
    plan = DealtPlan.of(recipe_of(local__batched=True, **changes), digits)
    if words is None:
        assert trains_batched(plan, RunFolder(tmp_path))
        return
    with pytest.raises(RecipeError, match=f"local.batched = true: {words}"):
        run(plan.recipe, tmp_path / "run", data=digits)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_ray_s_workers_train_one_by_one(digits: Dataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not trains_batched(DealtPlan.of(recipe_of(), digits), folder, on_ray=True)
    recipe = recipe_of(local__batched=True, training__epochs=2, snapshots=1)
    with pytest.raises(RecipeError, match=r"local.batched = true: Ray's workers train one client at a time"):
        run(recipe, tmp_path, data=digits, ray="auto")
    with pytest.raises(OutOfTime):
        run(recipe, tmp_path, data=digits, deadline=time.time())
    with pytest.raises(RecipeError, match=r"its clients train together .*; continue without --ray"):
        run(recipe, tmp_path, data=digits, resume=True, ray="auto")


def test_two_steps_that_do_not_fit_into_one_are_refused(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(batching, "MOST_ACTIVATIONS", 40 * (448 + 20))
    plan = DealtPlan.of(recipe_of(local__batched=True), digits)
    with pytest.raises(
        RecipeError, match="two clients with 32 samples in a step do not fit into one, at most 10 would"
    ):
        trains_batched(plan, RunFolder(tmp_path))
    fewer = DealtPlan.of(recipe_of(local__batched=True, training__batch_size=10), digits)
    assert trains_batched(fewer, RunFolder(tmp_path))


def test_auto_is_for_small_encoders_on_a_gpu(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    many = {"partition__clients": 8}
    assert not trains_batched(DealtPlan.of(recipe_of(**many), digits), folder)
    monkeypatch.setattr(batching, "choose_device", lambda name: torch.device("cuda"))
    assert trains_batched(DealtPlan.of(recipe_of(**many), digits), folder)
    for changes in (
        {"local__deterministic": True},
        {"local__batched": False},
        {"local__compile": True},
        {"model__encoder": "resnet18"},
        {"partition__clients": 7},
    ):
        assert not trains_batched(DealtPlan.of(recipe_of(**many | changes), digits), folder), changes


def test_a_run_in_batches_is_the_run_one_by_one_up_to_rounding_and_says_so(digits: Dataset, tmp_path: Path) -> None:
    recipe = recipe_of(training__epochs=2, snapshots=1, validation=0.1)
    for batched in (False, True):
        run(change(recipe, {"local.batched": batched}), tmp_path / str(batched), data=digits)
    (one, other), logs = (
        [json.loads((tmp_path / str(batched) / "result.json").read_text()) for batched in (False, True)],
        [timeless(tmp_path / str(batched)) for batched in (False, True)],
    )
    assert other["remarks"] == [*one["remarks"], REMARK]
    assert json.loads((tmp_path / "True" / "environment.json").read_text())["batched"] is True
    assert "batched" not in json.loads((tmp_path / "False" / "environment.json").read_text())
    assert one["recipe_digest"] == other["recipe_digest"] and one["traffic"] == other["traffic"]
    assert [(event["event"], event["epoch"], list(event)) for event in logs[0]] == [
        (event["event"], event["epoch"], list(event)) for event in logs[1]
    ]
    for mine, theirs in zip(*logs, strict=True):
        if mine["event"] == "epoch":
            assert mine["client"] == theirs["client"] and theirs["loss"] == pytest.approx(mine["loss"], rel=1e-4)
    assert all(abs(score["accuracy"] - one["rules"][rule]["accuracy"]) < 0.02 for rule, score in other["rules"].items())


@pytest.mark.parametrize("batched", [False, True])
def test_a_run_goes_on_in_the_mode_it_was_begun_in(
    batched: bool, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(training__epochs=2, snapshots=1, local__batched=batched)
    run(recipe, tmp_path, data=digits)
    before, (result, *_) = final(tmp_path), tmp_path.glob("result.json")
    result.unlink()
    for upload in list((tmp_path / "uploads").iterdir())[:2]:
        upload.unlink()
    trained: list[int] = []
    train = Group.train
    monkeypatch.setattr(Group, "train", lambda self, until: (trained.append(len(self.learners)), train(self, until))[1])
    run(change(recipe, {"local.batched": not batched}), tmp_path, data=digits, resume=True)
    assert trained == ([2] if batched else [])
    assert final(tmp_path) == before, "bit-equal: the group has its slots, and two of them are at work"


def test_stopped_at_every_deadline_it_ends_with_the_same_numbers(digits: Dataset, tmp_path: Path) -> None:
    recipe = recipe_of(preset="etf-uncertainty", training__epochs=3, snapshots=2, local__batched=True)
    run(recipe, tmp_path / "calm", data=digits)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 2
    assert final(tmp_path / "parts") == final(tmp_path / "calm")
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "calm")


def test_rounds_and_consensus_in_batches(digits: Dataset, tmp_path: Path) -> None:
    """Participants of a round form its groups; clients that need each other's state meet after every epoch."""
    several = {"rounds": 3, "participation__fraction": 0.7, "fusion": ["average"]}
    meeting = {"preset": "etf-annealed", "training__epochs": 3, "snapshots": 2}
    for name, changes in (("rounds", several), ("consensus", meeting)):
        results = [
            run(recipe_of(**changes, local__batched=batched), tmp_path / f"{name}_{batched}", data=digits)
            for batched in (False, True)
        ]
        one, other = (timeless(result.folder) for result in results)
        for mine, theirs in zip(one, other, strict=True):
            if mine["event"] == "epoch":
                assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3), mine


@pytest.mark.slow
@pytest.mark.processes
def test_killed_and_resumed_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "oneround.cli", "run", "v10", "--data", "digits", "--epochs", "8", "--clients", "9",
        "--set", "model.encoder={kind: cnn, width: 4}", "--set", "partition.alpha=1", "--set", "training.batch_size=32",
        "--set", "snapshots=3", "--set", "local.checkpoint_seconds=0", "--set", "local.workers=2",
        "--set", "local.batched=true",
    ]  # fmt: skip
    subprocess.run([*command, "--out", str(tmp_path / "calm")], check=True, capture_output=True, timeout=240)
    folder, seed = tmp_path / "killed", random.randrange(10**6)
    process = subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    limit = time.monotonic() + 120
    while not list(folder.glob("clients/*/state.safetensors")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(random.Random(seed).uniform(0, 0.5))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "result.json").exists(), "faster than the kill"
    done = subprocess.run([*command, "--out", str(folder), "--resume", "--set", "local.batched=false"], capture_output=True, text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "environment.json").read_text())["batched"] is True
    assert final(folder) == final(tmp_path / "calm"), f"seed {seed}"
    assert timeless(folder) == timeless(tmp_path / "calm"), f"seed {seed}"


def test_another_value_is_answered_with_one_line() -> None:
    with pytest.raises(RecipeError, match=r"^local\.batched = \"maybe\": must be one of auto, true, false$"):
        recipe_of(local__batched="maybe")
