"""Local training: randomness is its own, a killed client goes on where it was, odd clients train, a trainer belongs to its broadcast."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clients import broadcast_of, few, prepared, some
from oneround import acts
from oneround.config.recipe import Local
from oneround.config.sections import Training
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.protocol import Upload
from oneround.site import Site
from oneround.training.loop import Learner, Trainer, learning_rate
from oneround.training.step import Stepper


def test_training_repeats_bit_for_bit_and_follows_its_seed(digits: Dataset) -> None:
    broadcast = prepared(digits, training__epochs=2)
    first, second = (acts.train(broadcast, some(digits, 100)) for _ in range(2))
    strict = Site("site", digits.train.take(torch.arange(100)), local=Local(deterministic=True))
    assert first.content == second.content == acts.train(broadcast, strict).content
    assert not torch.are_deterministic_algorithms_enabled()
    other = prepared(digits, training__epochs=2, seeds__training=2)
    third = acts.train(other, some(digits, 100))
    assert not torch.equal(first.weights["prototypes"], third.weights["prototypes"])


def test_clients_differ_though_their_data_is_the_same(digits: Dataset) -> None:
    broadcast = prepared(digits)
    a, b = (acts.train(broadcast, Site(name, digits.train.take(torch.arange(100)))) for name in ("a", "b"))
    assert not torch.equal(a.weights["prototypes"], b.weights["prototypes"])


def test_batches_and_views_of_a_client_are_its_own(digits: Dataset) -> None:
    """Both follow the client's name, not the order in which clients take turns."""
    broadcast, data = prepared(digits, training__batch_size=50), few(digits, samples=100)
    a, b, again = (
        [torch.cat(each) for each in zip(*Learner(broadcast, Site(name, data))._draw_batches(0), strict=True)]
        for name in "aba"
    )
    assert all(torch.equal(one, other) for one, other in zip(a, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_another_client_in_between_changes_nothing(digits: Dataset, tmp_path: Path) -> None:
    broadcast = prepared(digits, training__epochs=2)
    alone = acts.train(broadcast, some(digits, 100))
    site = Site("site", digits.train.take(torch.arange(100)), tmp_path / "site")
    acts.train(broadcast, site, until=1)
    acts.train(broadcast, Site("other", digits.train.take(torch.arange(100, 400)), tmp_path / "other"), until=1)
    assert acts.train(broadcast, site).content == alone.content


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_stopped_and_resumed_is_the_same_as_undisturbed(
    digits: Dataset, tmp_path: Path, restart: bool, schedule: str
) -> None:
    broadcast = prepared(digits, training__epochs=4, training__restart_optimizer=restart, training__schedule=schedule)
    whole = acts.train(broadcast, some(digits, 150))
    site = Site("site", digits.train.take(torch.arange(150)), tmp_path)
    parts = [acts.train(broadcast, site, until=epoch) for epoch in (1, 3, 4)]
    assert [part.epoch for part in parts] == [1, 3, 4]
    assert parts[-1].content == whole.content
    timeless = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in upload.history]
        for upload in (parts[-1], whole)
    ]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 4


@pytest.mark.parametrize("preset", ["v10", "v13", "etf-equilibrium", "v6", "v8", "fedsra"])
@pytest.mark.parametrize("restart", [True, False])
def test_stopped_and_resumed_is_the_same(digits: Dataset, tmp_path: Path, preset: str, restart: bool) -> None:
    broadcast = broadcast_of(digits, preset, 4, training__restart_optimizer=restart)
    data = few(digits, 4)
    whole = acts.train(broadcast, Site("site", data))
    for until in (1, 3):
        acts.train(broadcast, Site("site", data, tmp_path), until)
        acts.train(broadcast, Site("other", few(digits, 2)))  # somebody else has a turn in between
    parted = acts.train(broadcast, Site("site", data, tmp_path))
    assert parted.content == whole.content
    strip = [{key: value for key, value in entry.items() if key != "seconds"} for entry in whole.history]
    assert strip == [{key: value for key, value in entry.items() if key != "seconds"} for entry in parted.history]


def test_momentum_is_really_kept_or_forgotten(digits: Dataset) -> None:
    kept, forgot = (
        acts.train(prepared(digits, training__epochs=2, training__restart_optimizer=restart), some(digits, 150))
        for restart in (False, True)
    )
    assert not torch.equal(kept.weights["prototypes"], forgot.weights["prototypes"])


def test_a_state_of_another_recipe_is_refused(digits: Dataset, tmp_path: Path) -> None:
    site = Site("site", digits.train.take(torch.arange(100)), tmp_path)
    acts.train(prepared(digits, training__epochs=2), site, until=1)
    with pytest.raises(RunError, match=r"state\.safetensors: state of another client or recipe"):
        acts.train(prepared(digits, training__epochs=3), site, until=2)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("index", [[7], [3, 3], list(range(30))])
def test_a_client_with_one_sample_one_class_or_less_than_a_batch_trains(
    digits: Dataset, norm: str, index: list[int]
) -> None:
    broadcast = prepared(digits, model__encoder={"kind": "cnn", "width": 4, "norm": norm}, training__epochs=2)
    upload = acts.train(broadcast, Site("odd", digits.train.take(torch.tensor(index))))
    assert upload.samples == len(index)
    moved = upload.weights["prototypes"] - broadcast.weights["prototypes"]
    assert float(moved.abs().max()) > 0
    again = Upload.unpack(upload.pack(), broadcast, acts.statistics_of(broadcast))
    assert again.content == upload.content


def test_one_class_only(digits: Dataset) -> None:
    ones = torch.nonzero(digits.train.labels == 1).flatten()
    upload = acts.train(prepared(digits), Site("ones", digits.train.take(ones)))
    assert upload.class_counts.tolist() == [0, len(ones), 0, 0, 0, 0, 0, 0, 0, 0]


def test_no_data_is_refused(digits: Dataset) -> None:
    with pytest.raises(RunError, match="empty: no data to train on"):
        acts.train(prepared(digits), Site("empty", digits.train.take(torch.tensor([], dtype=torch.int64))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet18", "mobilenet-v2"])
def test_large_encoders_train_a_step(digits: Dataset, kind: str) -> None:
    upload = acts.train(prepared(digits, model__encoder=kind), some(digits, 4))
    assert upload.history[0]["steps"] == 1


def test_training_lowers_every_trained_term(digits: Dataset) -> None:
    upload = acts.train(prepared(digits, training__epochs=8), some(digits, 400))
    for name in ("loss", "cross-entropy", "supervised-contrastive"):
        assert upload.history[-1][name] < 0.9 * upload.history[0][name], name


def test_the_learning_rate_over_the_whole_training() -> None:
    training = Training(learning_rate=0.4, schedule="cosine")
    assert [round(learning_rate(training, epoch, 50), 6) for epoch in (0, 25, 50)] == [0.4, 0.2, 0.0]
    assert learning_rate(Training(learning_rate=0.4), 45, 50) == 0.4
    triangle = Training(learning_rate=0.4, schedule="triangular")
    assert [round(learning_rate(triangle, epoch, 50), 6) for epoch in (0, 5, 10, 30, 50)] == [0.0, 0.2, 0.4, 0.2, 0.0]


def test_milestones_are_counted_anew_in_every_round() -> None:
    training = Training(epochs=5, learning_rate=0.1, schedule="steps", milestones=[3, 8], factor=0.2)
    rates = [round(learning_rate(training, epoch, 10), 6) for epoch in range(10)]
    assert rates == [0.1, 0.1, 0.1, 0.02, 0.02] * 2


def steps_of(digits: Dataset, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[tuple[torch.Tensor, float]]:
    """The random numbers and the learning rate of every step of a training."""
    seen: list[tuple[torch.Tensor, float]] = []
    step = Stepper._step

    def look(self: Stepper, pixels: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> None:
        seen.append((numbers.clone(), float(self.rate)))
        step(self, pixels, labels, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "_step", look)
        acts.train(prepared(digits, training__batch_size=50, **changes), some(digits, 150))
    return seen


def test_the_two_views_of_a_sample_are_drawn_apart(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is drawn twice: not for the two views, not in two steps, not in two epochs."""
    numbers = torch.cat([drawn for drawn, _ in steps_of(digits, monkeypatch, training__epochs=2)])
    assert len(numbers) == 2 * 2 * 150
    assert len(numbers.unique(dim=0)) == len(numbers)
    assert all(len(column.unique()) > 0.99 * len(column) for column in numbers.T)


def test_the_cosine_falls_with_every_step(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = steps_of(digits, monkeypatch, training__epochs=2, training__schedule="cosine", training__learning_rate=0.1)
    expected = [0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert [rate for _, rate in seen] == pytest.approx(expected)


# --- a trainer is bound to one broadcast at a time ---------------------------------------------------------------------


def test_clients_that_share_a_trainer_learn_as_they_do_alone(digits: Dataset) -> None:
    broadcast = prepared(
        digits, training__epochs=2, queue={"size": 64, "warm_up": 0}, alignment={"weight": "uncertainty"}
    )
    sites = [some(digits, 100), Site("other", few(digits, 3)), some(digits, 100)]
    trainer = Trainer()
    shared = [acts.train(broadcast, site, trainer=trainer).content for site in sites]
    assert shared == [acts.train(broadcast, site).content for site in sites] and shared[0] == shared[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("fafi", {"training__restart_optimizer": False}),
        ("v10", {"training__restart_optimizer": False}),
        ("fafi+adjusted", {}),
        ("v10", {"alignment__weight__rate": 1e6, "safeguards__on_explosion": "clamp"}),
        ("mergenet-single", {"fusion": ["average"], "companion": {"teacher": {"encoder": {"kind": "cnn", "width": 4}}, "adapter": {"width": 4}, "every": 2}}),
    ],
    ids=["momentum", "momentum of σ", "class shares", "alignment that was dropped", "companion"],
)  # fmt: skip
def test_nothing_of_the_client_before_stays_in_a_trainer(digits: Dataset, preset: str, changes: dict[str, Any]) -> None:
    """Clients with other classes and other sizes take turns; each learns what it learns with a trainer of its own."""
    broadcast, trainer = broadcast_of(digits, preset, 2, **changes), Trainer()
    sites = [Site("a", few(digits, 2, 40)), Site("b", few(digits, 5, 90)), Site("a", few(digits, 2, 40))]
    shared = [acts.train(broadcast, site, trainer=trainer).content for site in sites]
    assert shared == [acts.train(broadcast, site).content for site in sites] and shared[0] == shared[2] != shared[1]


@pytest.mark.parametrize(
    ("preset", "extra", "changes"),
    [
        ("bank", "bank.features", {}),
        ("bank", "bank.labels", {"objective__terms__bank-contrastive__same_class": "ignored"}),
        ("etf", "anchors", {}),
        ("fafi+reference", "reference.features", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trainer_uses_what_the_new_broadcast_carries(
    digits: Dataset, preset: str, extra: str, changes: dict[str, Any]
) -> None:
    """The same recipe and other values: a trainer that kept the old ones would learn something else than a fresh one."""
    first = broadcast_of(digits, preset, 2, **changes)
    values = first.extras[extra]
    other = replace(first, extras={**first.extras, extra: 9 - values if extra == "bank.labels" else -values})
    assert other.digest == first.digest
    site, trainer = Site("site", few(digits, samples=64)), Trainer()
    before, after = (acts.train(broadcast, site, trainer=trainer) for broadcast in (first, other))
    fresh = acts.train(other, site, trainer=Trainer())
    assert after.content == fresh.content, f"the new {extra} is used"
    assert before.content != fresh.content, f"{extra} changes what is learned"


def test_a_client_that_failed_within_an_epoch_leaves_nothing_in_the_trainer(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast, trainer, site = broadcast_of(digits, "etf", 1), Trainer(), Site("b", few(digits, 5, 90))
    step, steps = Stepper._step, iter(range(10**6))

    def fails(self: Stepper, *batch: torch.Tensor) -> None:
        step(self, *batch)
        if next(steps) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stepper, "_step", fails)
        acts.train(broadcast, Site("a", few(digits)), trainer=trainer)
    shared, fresh = (acts.train(broadcast, site, trainer=each) for each in (trainer, Trainer()))
    assert shared.content == fresh.content
    timeless = [[{**entry, "seconds": 0} for entry in upload.history] for upload in (shared, fresh)]
    assert timeless[0] == timeless[1]


def test_a_second_round_starts_from_its_own_prototypes(digits: Dataset) -> None:
    """Progressive anchors (V8 of the FAFI family) move from the prototypes that this round begins with."""
    first = broadcast_of(digits, "etf-progressive", 2, rounds=2, fusion=["average"])
    site, trainer = Site("site", few(digits, samples=64)), Trainer()
    upload = acts.train(first, site, trainer=trainer)
    second = acts.advance(acts.fuse([upload], first), first)
    assert not torch.equal(second.weights["prototypes"], first.weights["prototypes"])
    kept, fresh = (acts.train(second, site, trainer=each) for each in (trainer, Trainer()))
    assert kept.content == fresh.content and kept.epoch == 4
    aligner = trainer.bind(second, site).aligner
    assert aligner is not None and torch.equal(aligner.start, second.weights["prototypes"])
