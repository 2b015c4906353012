"""Local training: every sample is used, randomness is its own, a killed client goes on where it was, odd clients train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.learning.batches import batches, steps_per_epoch
from oneround.learning.loop import learning_rate
from oneround.protocol import Broadcast, Upload
from oneround.recipe import Local
from oneround.sections import Training
from oneround.site import Site


def prepared(digits: Dataset, **changes: object) -> Broadcast:
    return acts.prepare(acts.settle(small_recipe(**changes), digits), digits.class_names, digits.shape)


def some(digits: Dataset, n: int) -> Site:
    return Site("site", digits.train.take(torch.arange(n)))


# --- batches ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(0, 300), size=st.integers(1, 80), last=st.sampled_from(["wrap", "keep", "drop"]))
def test_batches(samples: int, size: int, last: str) -> None:
    training = Training(batch_size=size, last_batch=last)
    plan = batches(torch.zeros(samples), training, torch.Generator().manual_seed(1))
    assert len(plan) == steps_per_epoch(samples, training)
    used = torch.cat(plan).tolist() if plan else []
    if samples <= size:
        assert [len(index) for index in plan] == ([samples] if samples else [])
    elif last == "keep":
        assert all(len(index) == size for index in plan[:-1]) and 0 < len(plan[-1]) <= size
    else:
        assert all(len(index) == size for index in plan)
    if last == "drop" and samples > size:
        assert len(set(used)) == len(used) == samples // size * size
    else:
        assert set(used) == set(range(samples))
    if last == "wrap" and samples > size:
        assert used[samples:] == used[: len(used) - samples]


# --- randomness ------------------------------------------------------------------------------------------------------


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
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in told.history] for told in (parts[-1], whole)
    ]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 4


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


# --- odd clients -----------------------------------------------------------------------------------------------------


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


def test_no_data_is_said(digits: Dataset) -> None:
    with pytest.raises(RunError, match="empty: no data to train on"):
        acts.train(prepared(digits), Site("empty", digits.train.take(torch.tensor([], dtype=torch.int64))))


@pytest.mark.parametrize("kind", ["resnet18", "mobilenet-v2"])
def test_large_encoders_train_a_step(digits: Dataset, kind: str) -> None:
    upload = acts.train(prepared(digits, model__encoder=kind), some(digits, 4))
    assert upload.history[0]["steps"] == 1


# --- what is learned -------------------------------------------------------------------------------------------------


def test_training_lowers_every_trained_term(digits: Dataset) -> None:
    upload = acts.train(prepared(digits, training__epochs=8), some(digits, 400))
    for name in ("loss", "cross-entropy", "supervised-contrastive"):
        assert upload.history[-1][name] < 0.9 * upload.history[0][name], name


def test_gradients_are_clipped(digits: Dataset) -> None:
    """With a tiny norm allowed the weights hardly move; without clipping they do."""
    broadcast = {norm: prepared(digits, training__clip_norm=norm) for norm in (1e-6, 0.0)}
    moved = {}
    for norm, each in broadcast.items():
        upload = acts.train(each, some(digits, 100))
        moved[norm] = float((upload.weights["prototypes"] - each.weights["prototypes"]).norm())
    assert moved[1e-6] < 1e-5 < 1e-2 < moved[0.0]


def test_a_loss_that_is_not_finite_stops_with_what_to_do(digits: Dataset) -> None:
    broadcast = prepared(digits, training__learning_rate=1e30, training__clip_norm=0.0, training__epochs=5)
    with pytest.raises(
        RunError,
        match=r"site, epoch \d: the loss or its gradient is not finite; likely cause: the steps are too large \(training.learning_rate = 1e\+30",
    ):
        acts.train(broadcast, some(digits, 200))


def test_the_learning_rate_over_the_whole_training() -> None:
    training = Training(learning_rate=0.4, schedule="cosine")
    assert [round(learning_rate(training, epoch, 50), 6) for epoch in (0, 25, 50)] == [0.4, 0.2, 0.0]
    assert learning_rate(Training(learning_rate=0.4), 45, 50) == 0.4


def test_milestones_are_counted_anew_in_every_round() -> None:
    training = Training(epochs=5, learning_rate=0.1, schedule="steps", milestones=[3, 8], factor=0.2)
    rates = [round(learning_rate(training, epoch, 10), 6) for epoch in range(10)]
    assert rates == [0.1, 0.1, 0.1, 0.02, 0.02] * 2


def test_compiled_training_learns_the_same(digits: Dataset) -> None:
    broadcast = prepared(digits, training__batch_size=50)
    data = digits.train.take(torch.arange(100))
    plain, compiled = (acts.train(broadcast, Site("site", data, local=Local(compile=how))) for how in (False, True))
    for name, value in plain.weights.items():
        assert torch.allclose(value.float(), compiled.weights[name].float(), atol=1e-4), name


def test_initial_weights_from_a_file(digits: Dataset, tmp_path: Path) -> None:
    import safetensors.torch

    from oneround.errors import ProtocolError
    from oneround.reading import change

    recipe = acts.settle(small_recipe(seeds__initialisation=7), digits)
    given = acts.prepare(recipe, digits.class_names, digits.shape).weights
    encoder = {name.removeprefix("encoder."): value for name, value in given.items() if name.startswith("encoder.")}
    other = change(recipe, {"seeds.initialisation": 8, "local.initial_weights": str(tmp_path / "start.safetensors")})
    for content, full in ((given, True), (encoder, False)):
        safetensors.torch.save_file(content, tmp_path / "start.safetensors")
        made = acts.prepare(other, digits.class_names, digits.shape).weights
        assert torch.equal(made["encoder.convolutions.1.weight"], given["encoder.convolutions.1.weight"])
        assert torch.equal(made["prototypes"], given["prototypes"]) == full
    wrong = {**encoder, "convolutions.1.weight": torch.zeros(2, 2)}
    for content, words in (
        (wrong, r"convolutions.1.weight is \(2, 2\)"),
        ({"a": torch.zeros(1)}, "encoder.a is not part"),
    ):
        safetensors.torch.save_file(content, tmp_path / "start.safetensors")
        with pytest.raises(ProtocolError, match=words):
            acts.prepare(other, digits.class_names, digits.shape)
    (tmp_path / "start.safetensors").write_bytes(b"junk")
    with pytest.raises(ProtocolError, match="not a readable safetensors file"):
        acts.prepare(other, digits.class_names, digits.shape)


@pytest.mark.parametrize(
    ("room", "words"), [(25, "16 would \\(--set training.batch_size=16\\)"), (0, "not even 1 would")]
)
def test_a_batch_that_does_not_fit_is_answered_with_one_that_does(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, room: int, words: str
) -> None:
    """Memory for so many samples, and no more."""
    from oneround.learning.step import Stepper

    step = Stepper._step

    def short_of_memory(self: Stepper, pixels: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> None:
        if len(labels) > 2 * room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, pixels, labels, numbers)

    monkeypatch.setattr(Stepper, "_step", short_of_memory)
    with pytest.raises(RunError, match=rf"site: training.batch_size = 64 does not fit into the memory of cpu; {words}"):
        acts.train(prepared(digits), some(digits, 100))


def steps_of(digits: Dataset, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[tuple[torch.Tensor, float]]:
    """The random numbers and the learning rate of every step of a training."""
    from oneround.learning.step import Stepper

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
    wanted = [0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert [rate for _, rate in seen] == pytest.approx(wanted)
