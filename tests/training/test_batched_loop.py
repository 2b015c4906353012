"""Clients trained together upload what they would have uploaded one by one, up to rounding, whatever happens to the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clients import prepared
from oneround import acts
from oneround.config.recipe import Local
from oneround.config.sections import Training
from oneround.data import Dataset, dataset_from_arrays
from oneround.errors import OutOfTime, RunError
from oneround.protocol import Broadcast, Upload
from oneround.site import Site
from oneround.training.batched_loop import Group, step_shape
from oneround.training.step import Stepper

SIZES = (100, 110, 90)


def sites_of(digits: Dataset, sizes: tuple[int, ...] = SIZES, **more: Any) -> dict[int, Site]:
    """Clients that hold the samples of one class more than of the others, each with its own mix."""
    sites, start = {}, 0
    for slot, size in enumerate(sizes):
        folder = more["root"] / f"client_{slot}" if "root" in more else None
        options = {name: value for name, value in more.items() if name != "root"}
        own = digits.train.take(torch.arange(start, start + size))
        sites[slot] = Site(f"client_{slot}", own, folder, **options)
        start += size
    return sites


def together(broadcast: Broadcast, sites: dict[int, Site], slots: int | None = None, until: int | None = None) -> list[Upload]:  # fmt: skip
    return list(acts.train_group(broadcast, sites, slots or len(sites), until or broadcast.last_epoch))


def assert_alike(one: Upload, other: Upload, tolerance: float = 1e-4) -> None:
    """The same manifest, and weights, statistics and metrics up to rounding."""
    assert (one.client, one.epoch, one.recipe_digest, one.stopped) == (other.client, other.epoch, other.recipe_digest, other.stopped)  # fmt: skip
    assert torch.equal(one.class_counts, other.class_counts)
    assert one.weights.keys() == other.weights.keys() and one.statistics.keys() == other.statistics.keys()
    for name, value in {**one.weights, **one.statistics}.items():
        mine = {**other.weights, **other.statistics}[name]
        assert value.dtype == mine.dtype and value.shape == mine.shape, name
        largest = float(value.double().abs().max())
        assert float((value.double() - mine.double()).abs().max()) <= tolerance * max(largest, 1e-6), name
    assert [list(entry) for entry in one.history] == [list(entry) for entry in other.history]
    for mine, theirs in zip(one.history, other.history, strict=True):
        for key in mine.keys() - {"seconds"}:
            assert_close(mine[key], theirs[key], 30 * tolerance)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_close(value, other[key], tolerance)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=tolerance, abs=tolerance)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("fafi", {}),
        ("fafi", {"training__restart_optimizer": False, "training__weight_decay": 0.01}),
        ("fafi", {"training__schedule": "steps", "training__milestones": [1], "training__clip_norm": 0.0}),
        ("fafi", {"training__sampling": "balanced", "training__last_batch": "drop"}),
        ("fafi", {"training__views": 1, "training__augment__per_batch": True}),
        ("fafi", {"model__encoder": {"kind": "cnn", "width": 4, "norm": "group"}}),
        ("fafi+queue", {"queue__size": 50}),
        ("fafi+hard", {}),
        ("fafi+adjusted", {}),
        ("fafi+reference", {"reference__source": "sphere"}),
        ("bank", {"public": 0.2, "bank__teacher_epochs": 1, "bank__size": 64}),
        ("fedavg", {}),
        ("two-stage", {}),
        ("etf", {"alignment__target": "features"}),
        ("etf-entropy", {}),
        ("etf-equilibrium", {}),
        ("etf-uncertainty", {"alignment__classes": "present"}),
        ("etf-hinge", {"trace__every": 1}),
        ("v10", {"trace__every": 2}),
        ("v13", {}),
    ],
)
def test_clients_trained_together_upload_what_they_would_one_by_one(
    preset: str, changes: dict[str, Any], digits: Dataset
) -> None:
    """Sizes differ, so epochs have 3 or 4 steps; one slot is empty."""
    options = {"training__batch_size": 32, "training__epochs": 2, **changes}
    broadcast, sites = prepared(digits, preset, **options), sites_of(digits)
    alone = [acts.train(broadcast, site) for site in sites.values()]
    assert len({entry["steps"] for upload in alone for entry in upload.history}) > 1 or "last_batch" in str(changes)
    for one, other in zip(alone, together(broadcast, sites, slots=4), strict=True):
        assert_alike(one, other)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((100, 120), {"training__schedule": "cosine"}),
        ((100, 100), {"training__last_batch": "keep"}),
        ((20, 20, 20), {}),
        ((1, 1), {}),
    ],
)
def test_rates_and_last_batches_agree_within_a_group(
    sizes: tuple[int, ...], changes: dict[str, Any], digits: Dataset
) -> None:
    broadcast = prepared(digits, training__batch_size=32, training__epochs=2, **changes)
    sites = sites_of(digits, sizes)
    for one, other in zip([acts.train(broadcast, site) for site in sites.values()], together(broadcast, sites), strict=True):  # fmt: skip
        assert_alike(one, other)


def test_colour_images_too(digits: Dataset) -> None:
    random = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (len(digits.train), 12, 10, 3), dtype=torch.uint8, generator=random)
    data = dataset_from_arrays("noise", pixels, digits.train.labels, pixels[:5], digits.train.labels[:5])
    broadcast, sites = prepared(data, training__batch_size=32), sites_of(data)
    for one, other in zip([acts.train(broadcast, site) for site in sites.values()], together(broadcast, sites), strict=True):  # fmt: skip
        assert_alike(one, other)


def test_a_few_steps_agree_very_closely(digits: Dataset) -> None:
    broadcast, sites = prepared(digits, "v10", training__batch_size=50), sites_of(digits, (100, 100))
    for one, other in zip([acts.train(broadcast, site) for site in sites.values()], together(broadcast, sites), strict=True):  # fmt: skip
        assert_alike(one, other, 3e-6)


def test_step_shapes() -> None:
    wrap, cosine = Training(batch_size=32), Training(batch_size=32, schedule="cosine")
    keep, drop = Training(batch_size=32, last_batch="keep"), Training(batch_size=32, last_batch="drop")
    assert step_shape(100, wrap) == step_shape(40, wrap) == step_shape(32, wrap) == (32, 32, 0)
    assert step_shape(20, wrap) == step_shape(20, keep) == (20, 20, 0) != step_shape(21, wrap)
    assert step_shape(100, keep) == (32, 4, 4) != step_shape(68, keep) == (32, 4, 3)
    assert step_shape(96, keep) == (32, 32, 0) == step_shape(100, drop)
    assert step_shape(100, cosine) == (32, 32, 4) != step_shape(90, cosine)


def test_clients_of_different_shapes_are_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match="different shapes"):
        Group(prepared(digits, training__batch_size=32), sites_of(digits, (100, 20)), 2)


def test_a_client_that_was_behind_catches_up_and_the_others_wait(digits: Dataset, tmp_path: Path) -> None:
    """Killed between two states: one client is an epoch ahead. All end bit-equal to an undisturbed group of that size."""
    broadcast = prepared(digits, "etf-uncertainty", training__batch_size=32, training__epochs=4, training__restart_optimizer=False)  # fmt: skip
    calm = together(broadcast, sites_of(digits))
    sites = sites_of(digits, root=tmp_path)
    together(broadcast, sites, until=1)
    early = (tmp_path / "client_1" / "state.safetensors").read_bytes()
    together(broadcast, sites, until=2)
    (tmp_path / "client_1" / "state.safetensors").write_bytes(early)
    assert [upload.content for upload in together(broadcast, sites)] == [upload.content for upload in calm]


def test_a_client_that_is_not_due_leaves_the_others_bit_equal(digits: Dataset) -> None:
    broadcast = prepared(digits, training__batch_size=32)
    everybody = together(broadcast, sites_of(digits))
    some = {slot: site for slot, site in sites_of(digits).items() if slot != 1}
    assert [upload.content for upload in together(broadcast, some, slots=3)] == [
        upload.content for upload in (everybody[0], everybody[2])
    ]


def spoil(slot: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Make one client's weights infinite in its first epochs, as a divergence would."""
    step, done = Stepper._step, []

    def poisoned(self: Any, pixels: Any, labels: Any, numbers: Any) -> None:
        step(self, pixels, labels, numbers)
        done.append(0)
        if len(done) <= times:
            self.stage.sums[0, slot] = math.nan
            self.net.prototypes.data[slot] = math.nan

    monkeypatch.setattr(Stepper, "_step", poisoned)


def test_a_client_that_diverges_stops_by_itself(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = prepared(digits, training__batch_size=32, training__epochs=2)
    calm = together(broadcast, sites_of(digits))
    spoil(1, monkeypatch, times=10**6)
    uploads = acts.train_group(broadcast, sites_of(digits), 3, 2)
    assert [next(uploads).content for _ in range(2)] == [calm[0].content, calm[2].content]
    with pytest.raises(RunError, match="client_1, epoch 1: the loss or its gradient is not finite"):
        next(uploads)


def test_an_undone_epoch_is_repeated_while_the_others_wait(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"training__batch_size": 32, "training__epochs": 2, "safeguards__on_explosion": "clamp"}
    broadcast = prepared(digits, "v10", **options)
    calm = together(broadcast, sites_of(digits))
    spoil(1, monkeypatch)
    uploads = together(broadcast, sites_of(digits))
    assert [upload.content for upload in (uploads[0], uploads[2])] == [upload.content for upload in (calm[0], calm[2])]
    assert [entry["epoch"] for entry in uploads[1].history] == [1, 2]
    assert uploads[1].history[0]["lambda_applied"] == 0 and calm[1].history[0]["lambda_applied"] > 0


def test_at_the_deadline_all_end_their_epoch_and_save(digits: Dataset, tmp_path: Path) -> None:
    broadcast = prepared(digits, training__batch_size=32, training__epochs=3)
    calm = together(broadcast, sites_of(digits))
    with pytest.raises(OutOfTime, match="stopped after epoch 1"):
        together(broadcast, sites_of(digits, root=tmp_path, deadline=0.0))
    assert len(list(tmp_path.glob("*/state.safetensors"))) == 3
    resumed = together(broadcast, sites_of(digits, root=tmp_path))
    assert [upload.content for upload in resumed] == [upload.content for upload in calm]


def test_memory_that_is_too_small_is_said(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Stepper, "_step", short_of_memory)
    with pytest.raises(RunError, match=r"3 clients with 64 images each do not fit .* --set local.batched=false"):
        together(prepared(digits, training__batch_size=32), sites_of(digits, local=Local(device="cpu")))
