"""Each preset does on real digits what defines it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from oneround import acts
from oneround.data import Dataset, Images
from oneround.errors import RecipeError
from oneround.learning import Batch
from oneround.learning.objective import Features, stage_of, terms
from oneround.protocol import Broadcast, Upload, blob
from oneround.reading import load, presets
from oneround.runs import Plan
from oneround.simulate import run
from oneround.site import Site

SMALL = {"model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 32, "fusion": ["iffi"]}


def few(digits: Dataset, classes: int, samples: int = 128) -> Images:
    """Samples of the first so many classes."""
    return digits.train.take(torch.nonzero(digits.train.labels < classes)[:samples, 0])


def sent(digits: Dataset, preset: str, epochs: int, **changes: Any) -> Broadcast:
    given = {**SMALL, "training.epochs": epochs, **{key.replace("__", "."): value for key, value in changes.items()}}
    return Plan.of(load(preset, given.items()), digits).prepare()


def trained(digits: Dataset, preset: str, epochs: int, classes: int = 10, **changes: Any) -> Upload:
    return acts.train(sent(digits, preset, epochs, **changes), Site("site", few(digits, classes)))


def series(upload: Upload, key: str) -> list[float]:
    return [entry[key] for entry in upload.history]


FAST = {"alignment__weight__rate": 2.0}


def test_every_preset_trains_one_client_and_uploads_nothing_but_the_network(digits: Dataset) -> None:
    for name in presets():
        if not load(name).trains:
            continue
        own = {"fusion": load(name).plain()["fusion"]} if load(name).model.head == "linear" else {}
        beside = {"companion__teacher__encoder": {"kind": "cnn", "width": 4}} if load(name).companion else {}
        broadcast = sent(digits, name, 2, **own, **beside)
        upload = acts.train(broadcast, Site("site", few(digits, 3, 40)))
        assert upload.weights.keys() == broadcast.weights.keys(), name
        assert all(np.isfinite(series(upload, "loss"))), name


def test_the_documented_names_and_aliases() -> None:
    alias = {name: raw["about"].get("alias") for name, raw in presets().items()}
    wanted = {"fafi": "v4", "bank": "v5", "two-stage": "v6", "etf": "v7", "etf-progressive": "v8", "etf-entropy": "v9", "etf-uncertainty": "v10",
              "etf-annealed": "v11", "etf-attenuated": "v12", "etf-guarded": "v13", "etf-hinge": "v14"}  # fmt: skip
    assert wanted.items() <= alias.items()
    assert {"etf-uncertainty-repaired", "etf-decoupled", "etf-decaying", "etf-equilibrium"} <= alias.keys()
    assert load("v9").method == "etf-entropy" and load("v9").digest == load("etf-entropy").digest


def test_a_preset_is_its_parts_and_not_its_name(digits: Dataset) -> None:
    named = trained(digits, "v9", 1)
    other = trained(digits, "v9", 1, method="something else")
    assert all(torch.equal(value, other.weights[name]) for name, value in named.weights.items())


def test_v6_changes_its_loss_at_the_right_epoch(digits: Dataset) -> None:
    upload = trained(digits, "v6", 10)
    assert ["bank-contrastive" in entry for entry in upload.history] == [True] * 2 + [False] * 8
    assert ["cross-entropy" in entry for entry in upload.history] == [False] * 2 + [True] * 8
    first, later = upload.history[1], upload.history[2]
    assert first["loss"] == pytest.approx(first["bank-contrastive"], rel=1e-5)
    four = ("cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation")
    assert later["loss"] == pytest.approx(sum(later[name] for name in four), rel=1e-5)


def test_stages_over_all_epochs() -> None:
    def at(epochs: int, first: dict[str, Any]) -> list[int]:
        plan = [{**first, "terms": {"bank-contrastive": 1.0}}, {"terms": {"cross-entropy": 1.0}}]
        objective = load("v6", [("objective.stages", plan), ("training.epochs", max(epochs, 2))]).objective
        return [stage_of(objective, epoch, epochs) for epoch in range(epochs)]

    assert at(50, {"share": 0.2}) == [0] * 10 + [1] * 40
    assert at(50, {"share": 0.4}) == [0] * 20 + [1] * 30
    assert at(50, {"epochs": 7}) == [0] * 7 + [1] * 43
    assert at(3, {"share": 0.01}) == [0, 1, 1]
    assert at(3, {"share": 0.99}) == [0, 0, 1]
    assert stage_of(load("fafi").objective, 3, 5) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective.stages.0.terms": {"cros-entropy": 1.0}}, "no such term; did you mean 'cross-entropy'"),
        ({"objective.stages.0.share": None}, "give share or epochs, one of both"),
        ({"objective.stages.1.share": 0.5}, "the last stage takes the rest"),
        ({"objective.stages.0.terms": {"bank-contrastive": 0.0}}, "no term counts"),
        ({"training.epochs": 1}, "must be ≥ 2, as many as objective.stages name"),
        (
            {"training.epochs": 10, "objective.stages.0": {"epochs": 10, "terms": {"bank-contrastive": 1.0}}},
            "training.epochs = 10: must be ≥ 11",
        ),
        ({"objective.stages.7.share": 0.5}, "'7' is no place in a list of 2; use 0 to 1"),
        ({"bank": None}, "needs bank"),
        ({"public": 0.0}, "its features come from public images"),
    ],
)
def test_stages_and_banks_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load("v6", changes.items())


def test_v9_pulls_the_client_with_more_classes_more(digits: Dataset) -> None:
    two, nine = trained(digits, "v9", 1, classes=2), trained(digits, "v9", 1, classes=9)
    assert series(two, "lambda_effective")[0] < series(nine, "lambda_effective")[0] < 10
    assert series(trained(digits, "v9", 1, classes=1), "lambda_effective")[0] == pytest.approx(0.1)


def test_v10_tends_to_the_ratio_of_the_losses(digits: Dataset) -> None:
    upload = trained(digits, "v10", 25)
    last = upload.history[-1]
    assert last["lambda_raw"] == pytest.approx(last["base"] / last["align"], rel=0.25)
    assert last["lambda_raw"] == pytest.approx(last["sigma_base"] / last["sigma_align"], rel=0.1)


def test_v11_is_the_learned_weight_times_a_factor_from_outside(digits: Dataset) -> None:
    upload = trained(digits, "v11", 5)
    assert series(upload, "s") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    raw, effective = np.array(series(upload, "lambda_raw")), np.array(series(upload, "lambda_effective"))
    assert np.allclose(effective, raw * [0.8, 0.6, 0.4, 0.2, 0.0], rtol=1e-5)


def test_v12_answers_a_falling_factor_with_a_larger_weight(digits: Dataset) -> None:
    steady, falling = (series(trained(digits, name, 20, **FAST), "lambda_raw") for name in ("etf-decoupled", "v12"))
    assert falling[-1] > 3 * steady[-1]
    assert falling[-1] > falling[len(falling) // 2] > falling[3]


def test_v13_never_exceeds_its_bound(digits: Dataset) -> None:
    upload = trained(digits, "v13", 20, **FAST)
    bound = max(series(upload, "base")) / (2 * 0.04)
    assert max(series(upload, "lambda_raw")) <= bound
    assert min(series(upload, "sigma_align")) >= 0.9 * 2 * 0.04
    free = trained(digits, "v12", 20, **FAST)
    assert series(free, "lambda_raw")[-1] > series(upload, "lambda_raw")[-1]


@pytest.mark.parametrize(("preset", "changes"), [("etf-decaying", FAST), ("etf-equilibrium", {})])
def test_decaying_and_equilibrium_go_to_zero_with_the_factor(digits: Dataset, preset: str, changes: Any) -> None:
    weights = series(trained(digits, preset, 20, **changes), "lambda_effective")
    assert weights[-1] < 0.25 * max(weights)
    assert weights[-1] < weights[-3] < weights[-6]


# --- state -----------------------------------------------------------------------------------------------------------


def state_of(digits: Dataset, folder: Path, preset: str) -> set[str]:
    acts.train(sent(digits, preset, 3), Site("site", few(digits, 3), folder), until=1)
    return {name for name in blob.read(folder / "state.safetensors", "state")[1] if name.startswith("alignment.")}


def test_what_of_the_weight_is_kept_between_epochs(digits: Dataset, tmp_path: Path) -> None:
    assert state_of(digits, tmp_path / "a", "etf-equilibrium") == {
        f"alignment.{name}" for name in ("base", "align", "mass", "ceiling")
    }
    assert state_of(digits, tmp_path / "b", "v10") == {"alignment.a", "alignment.b", "alignment.ceiling"}


@pytest.mark.parametrize("preset", ["v10", "v13", "etf-equilibrium", "v6", "v8"])
@pytest.mark.parametrize("restart", [True, False])
def test_stopped_and_resumed_is_the_same(digits: Dataset, tmp_path: Path, preset: str, restart: bool) -> None:
    broadcast = sent(digits, preset, 4, training__restart_optimizer=restart)
    data = few(digits, 4)
    whole = acts.train(broadcast, Site("site", data))
    for until in (1, 3):
        acts.train(broadcast, Site("site", data, tmp_path), until)
        acts.train(broadcast, Site("other", few(digits, 2)))  # somebody else has a turn in between
    parted = acts.train(broadcast, Site("site", data, tmp_path))
    assert parted.content == whole.content
    strip = [{key: value for key, value in entry.items() if key != "seconds"} for entry in whole.history]
    assert strip == [{key: value for key, value in entry.items() if key != "seconds"} for entry in parted.history]


# --- public images and the bank --------------------------------------------------------------------------------------


def test_no_client_holds_a_public_image_and_all_methods_see_the_same_partition(digits: Dataset) -> None:
    plans = [Plan.of(load(name, [("public", 0.1), ("partition.alpha", 0.3)]), digits) for name in ("v4", "v5", "v6")]
    assert len({plan.split.digest for plan in plans}) == 1
    split = plans[0].split
    held = np.concatenate(split.clients)
    assert not set(held) & set(split.public.tolist())
    assert len(held) + len(split.public) == len(digits.train)
    shares = np.bincount(digits.train.labels[split.public].numpy()) / np.bincount(digits.train.labels.numpy())
    assert np.allclose(shares, 0.1, atol=0.005)
    assert Plan.of(load("v4", [("partition.alpha", 0.3)]), digits).split.digest != split.digest


def test_the_bank_is_what_a_teacher_sees_in_the_public_images(digits: Dataset) -> None:
    broadcast = sent(digits, "v5", 2, bank__size=100, bank__teacher_epochs=15)
    unit, labels = broadcast.extras["bank.features"], broadcast.extras["bank.labels"]
    assert unit.shape[0] == 100 and torch.allclose(unit.norm(dim=1), torch.ones(100), atol=1e-5)
    own = unit @ unit.T
    same = (labels[:, None] == labels) & ~torch.eye(100, dtype=torch.bool)
    other = labels[:, None] != labels
    assert own[same].mean() > own[other].mean() + 0.1  # it learned the classes
    again = sent(digits, "v5", 2, bank__size=100, bank__teacher_epochs=15)
    assert torch.equal(again.extras["bank.features"], unit)
    assert sent(digits, "v5", 2, bank__teacher_epochs=1).extras["bank.labels"].shape[0] == 143  # all there are


@pytest.mark.parametrize("same_class", ["negatives", "ignored", "positives"])
def test_contrast_with_a_bank_is_its_formula(same_class: str) -> None:
    random = torch.Generator().manual_seed(3)
    z = F.normalize(torch.randn(12, 6, generator=random, dtype=torch.float64), dim=1)
    u = F.normalize(torch.randn(9, 6, generator=random, dtype=torch.float64), dim=1)
    y, v = torch.randint(0, 3, (12,), generator=random), torch.randint(0, 3, (9,), generator=random)
    rows = []
    for i in range(12):
        compared = [(float(z[i] @ z[j]) / 0.1, bool(y[i] == y[j])) for j in range(12) if j != i]
        for j in range(9):
            mine = bool(y[i] == v[j])
            if not (mine and same_class == "ignored"):
                compared.append((float(z[i] @ u[j]) / 0.1, mine and same_class == "positives"))
        below = np.log(sum(np.exp(s) for s, _ in compared))
        positives = [s - below for s, positive in compared if positive]
        rows += [-sum(positives) / len(positives)] if positives else []
    term = terms.parse({"kind": "bank-contrastive", "temperature": 0.1, "same_class": same_class})
    found = term.loss(Batch(z, y, torch.eye(3), bank=Features(u, v)))
    assert float(found) == pytest.approx(np.mean(rows), rel=1e-9)


def test_a_bank_pushes_and_a_plain_contrast_does_not(digits: Dataset) -> None:
    upload = trained(digits, "v5", 2)
    assert "supervised-contrastive" not in upload.history[0]
    assert upload.history[0]["bank-contrastive"] > trained(digits, "v4", 2).history[0]["supervised-contrastive"]
    assert Batch(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 2)).bank is None


# --- consensus: simulation only --------------------------------------------------------------------------------------


def test_consensus_follows_the_spread_of_the_clients_and_survives_a_stop(digits: Dataset, tmp_path: Path) -> None:
    given = {**SMALL, "alignment.schedule": "consensus", "alignment.weight.value": 100.0, "training.clip_norm": 0.0, "training.epochs": 4, "snapshots": 0, "partition.clients": 3, "partition.alpha": 0.5,
             "local.workers": 1}  # fmt: skip
    recipe = load("etf", given.items())
    result = run(recipe, tmp_path / "whole", data=digits)
    assert any("simulation only" in remark for remark in result.remarks)
    spreads = blob_json(tmp_path / "whole" / "consensus.json")
    wanted = [1.0, *(min(1.0, spreads[str(epoch)] / spreads["1"]) for epoch in (1, 2, 3))]
    told = [
        event["s"]
        for event in events(tmp_path / "whole")
        if event["event"] == "epoch" and event["client"] == "client_000"
    ]
    assert told == pytest.approx(wanted) and min(told) < 1

    class Stop(Exception):
        pass

    def stop_in_the_middle(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and event["epoch"] == 3 and event["client"] != "client_000":
            raise Stop

    with pytest.raises(Stop):
        run(recipe, tmp_path / "parted", data=digits, emit=stop_in_the_middle)
    run(recipe, tmp_path / "parted", data=digits, resume=True)
    results = [blob_json(tmp_path / name / "result.json") for name in ("whole", "parted")]
    assert results[0] == results[1]


def blob_json(path: Path) -> Any:
    import json

    return json.loads(path.read_text())


def events(folder: Path) -> list[dict[str, Any]]:
    from oneround.observe.log import MetricsLog

    return list(MetricsLog(folder / "metrics.jsonl"))
