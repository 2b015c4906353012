"""Sums add: whoever held what, the answer is the pooled one."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as SklearnRidge
from small_sums import sent
from torch import Tensor

from oneround import acts, sums
from oneround.data import Dataset, Images
from oneround.errors import ProtocolError, RunError
from oneround.fusion import rules
from oneround.fusion.ridge import added
from oneround.models.features import Features
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.sections import Sums
from oneround.site import Site
from oneround.sums import Moments, gather, packed, solve, unpacked
from oneround.sums.gather import ROWS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return sent(digits)


def upload_of(broadcast: Broadcast, data: Dataset, name: str, index: np.ndarray) -> Upload:
    return acts.train(broadcast, Site(name, data.train.take(index)))


@pytest.fixture(scope="module")
def pooled(broadcast: Broadcast, digits: Dataset) -> GlobalModel:
    return acts.fuse([upload_of(broadcast, digits, "all", np.arange(len(digits.train)))], broadcast)


@st.composite
def partitions(draw: st.DrawFn) -> list[np.ndarray]:
    """1 to 100 clients: random, or shards of samples sorted by class; every sample once, nobody without any."""
    samples, clients = 1442, draw(st.integers(1, 100))
    random = np.random.RandomState(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        owner = random.choice(clients, samples, p=random.dirichlet(np.full(clients, draw(st.sampled_from([0.1, 1.0])))))
    else:
        owner = np.arange(samples) * clients // samples  # digits come sorted by nothing; sort by label below
    return [np.flatnonzero(owner == client) for client in range(clients) if (owner == client).any()]


@given(partitions(), st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_partition_gives_the_pooled_answer(
    broadcast: Broadcast, digits: Dataset, pooled: GlobalModel, split: list[np.ndarray], by_class: bool
) -> None:
    order = np.argsort(digits.train.labels.numpy(), kind="stable") if by_class else np.arange(len(digits.train))
    uploads = [upload_of(broadcast, digits, f"client_{number:03d}", order[index]) for number, index in enumerate(split)]
    found = acts.fuse(uploads, broadcast)
    assert float((found.predict(digits.test.pixels) - pooled.predict(digits.test.pixels)).abs().max()) < 1e-5


def test_a_client_comes_and_goes_without_a_trace(broadcast: Broadcast, digits: Dataset) -> None:
    parts = np.array_split(np.arange(len(digits.train)), 4)
    uploads = [upload_of(broadcast, digits, f"client_{k}", index) for k, index in enumerate(parts)]
    three, all_four = added(uploads[:3], broadcast, CPU), added(uploads, broadcast, CPU)
    without = all_four - unpacked(uploads[3].sums)
    assert float((without.gram - three.gram).abs().max()) <= 1e-12 * float(three.gram.abs().max())
    late = three + unpacked(uploads[3].sums)
    for one, other in ((without, three), (late, all_four)):
        apart = solve(one).weights - solve(other).weights
        assert float(apart.abs().max()) < 1e-9
    assert float((solve(three).weights - solve(all_four).weights).abs().max()) > 1e-3


def test_sums_and_solution_are_their_formulas(broadcast: Broadcast, digits: Dataset) -> None:
    mine = digits.train.take(np.arange(300))
    constants = sums.constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
    features = sums.features_of(broadcast.recipe, broadcast.shape, constants)
    seen = features((mine.pixels.float() / 255 - 0.5) / 0.5).double().numpy()
    targets = np.eye(10)[mine.labels.numpy()]
    moments = unpacked(acts.train(broadcast, Site("site", mine)).sums)
    for found, wanted in (
        (moments.gram, seen.T @ seen),
        (moments.cross, seen.T @ targets),
        (moments.total, seen.sum(0)),
        (moments.counts, targets.sum(0)),
    ):
        assert np.abs(found.numpy() - wanted).max() <= 1e-5 * np.abs(wanted).max()
    solution = solve(moments, penalty=0.03)
    ridge = 0.03 * np.var(seen, 0).mean() * len(seen)
    oracle = SklearnRidge(alpha=ridge).fit(seen, targets)
    assert np.abs(solution.weights.numpy().T - oracle.coef_).max() < 1e-4
    assert np.abs((solution.bias - solution.centre @ solution.weights).numpy() - oracle.intercept_).max() < 1e-4
    centred = seen - seen.mean(0)
    hat = centred @ np.linalg.solve(centred.T @ centred + ridge * np.eye(96), centred.T)
    assert abs(solution.freedom - 1 - np.trace(hat)) < 0.1 * np.trace(hat)


def test_the_penalty_is_the_one_cross_validation_would_choose(broadcast: Broadcast, digits: Dataset) -> None:
    """Against leave-one-out, computed directly for every λ: the sums alone find one that is as good."""
    mine = digits.train.take(np.arange(120))
    constants = sums.constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
    seen = sums.features_of(broadcast.recipe, broadcast.shape, constants)((mine.pixels.float() / 255 - 0.5) / 0.5)
    centred = (seen - seen.mean(0)).double().numpy()
    targets = np.eye(10)[mine.labels.numpy()]
    targets = targets - targets.mean(0)
    level = (centred**2).sum(0).mean()

    def left_out(penalty: float) -> float:
        hat = centred @ np.linalg.solve(centred.T @ centred + penalty * level * np.eye(96), centred.T) + 1 / 120
        return float((((targets - hat @ targets) / (1 - np.diag(hat))[:, None]) ** 2).mean())

    chosen = solve(unpacked(acts.train(broadcast, Site("site", mine)).sums)).penalty
    grid = [10**power for power in np.arange(-5, 2, 0.25)]
    best = min(grid, key=left_out)
    assert left_out(chosen) < 1.03 * left_out(best)
    assert left_out(chosen) < 0.8 * max(left_out(chosen / 100), left_out(chosen * 100))


def test_features_are_never_all_held() -> None:
    """However many images: of the features, at most a block and what is being added to it are alive."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Counted(Features):
        size = 8

        def forward(self, images: Tensor) -> Tensor:
            nonlocal most
            most = max(most, sum(len(seen) for ref in alive if (seen := ref()) is not None))
            given = images.flatten(1)[:, :8].clone()
            alive.append(weakref.ref(given))
            return given

    pixels = torch.randint(0, 256, (6 * ROWS + 7, 1, 8, 8), dtype=torch.uint8)
    found = gather(Counted(), Images(pixels, torch.zeros(len(pixels), dtype=torch.int64)), 2, 0.5, 0.5)
    assert most <= ROWS and len(alive) > 12
    images = ((pixels.double() / 255 - 0.5) / 0.5).flatten(1)[:, :8]
    assert torch.allclose(found.gram, images.T @ images, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("how", "close"),
    [
        ({}, 1e-6),
        ({"precision": "int16"}, 2e-5),
        ({"precision": "fp16"}, 1e-3),
        ({"precision": "bf16"}, 5e-3),
        ({"rank": 96}, 1e-5),
        ({"rank": 60}, 0.05),
    ],
)
def test_smaller_uploads_stay_close(
    broadcast: Broadcast, digits: Dataset, how: dict[str, object], close: float
) -> None:
    exact = added([upload_of(broadcast, digits, "site", np.arange(400))], broadcast, CPU)
    asked = Sums.model_validate({"features": broadcast.recipe.sums.features, **how})  # type: ignore[union-attr]
    again = unpacked(packed(exact, asked))
    scale = exact.gram.diagonal().sqrt()
    assert float(((again.gram - exact.gram) / scale / scale[:, None]).abs().max()) < close
    assert torch.allclose(again.gram.diagonal(), exact.gram.diagonal(), rtol=1e-3)
    told = sent(digits, **{f"sums__{key}": value for key, value in how.items()})
    upload = upload_of(told, digits, "site", np.arange(400))
    assert {name: (tuple(value.shape), value.dtype) for name, value in upload.sums.items()} == told.sums
    assert Upload.unpack(upload.pack(), told, {}).content == upload.content


def test_priors_and_mirrored_answers(broadcast: Broadcast, digits: Dataset) -> None:
    held = np.concatenate([np.flatnonzero(digits.train.labels == label)[: 14 * label] for label in range(10)])
    uploads = [upload_of(broadcast, digits, "site", held)]

    def scores(images: Tensor, **options: object) -> Tensor:
        with torch.no_grad():
            return acts.fuse(uploads, broadcast, rule=rules.parse({"kind": "ridge", **options}))(images)

    images = digits.test.pixels[:30].float() / 255
    raised = scores(images, priors="uniform") - scores(images)
    wanted = -torch.tensor([126.0, 14, 28, 42, 56, 70, 84, 98, 112, 126]).log()  # nobody holds a 0
    assert torch.allclose(raised, wanted.expand(30, 10), atol=1e-3)
    both = (scores(images) + scores(images.flip(3))) / 2
    assert torch.allclose(scores(images, mirrored=True), both, atol=1e-3)
    assert float((both - scores(images)).abs().max()) > 0.1


def test_mirrored_copies_count_as_images(digits: Dataset) -> None:
    told = sent(digits, sums__mirror="copies")
    mine = digits.train.take(np.arange(50))
    found = unpacked(acts.train(told, Site("site", mine)).sums)
    both = Images(torch.cat([mine.pixels, mine.pixels.flip(3)]), mine.labels.repeat(2))
    wanted = unpacked(acts.train(sent(digits, sums__mirror="none"), Site("site", both)).sums)
    assert torch.allclose(found.gram, wanted.gram, rtol=1e-5) and float(found.counts.sum()) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"triangle": None}, "sums.triangle is missing"),
        ({"more": torch.zeros(3)}, "sums.more is not asked for"),
        ({"total": torch.zeros(96)}, "sums.total is torch.float32"),
        ({"counts": torch.full((10,), 7.0)}, "over other numbers of images than its class_counts say"),
        ({"cross": torch.full((96, 10), torch.nan)}, "sums.cross holds values that are not finite"),
        ({"total": torch.full((96,), 1e160, dtype=torch.float64)}, r"features of 3.3e\+158 on average"),
        ({"triangle": torch.full((96 * 97 // 2,), -1.0)}, r"negative squares \(-1\)"),
    ],
)
def test_sums_that_do_not_fit_are_refused(
    broadcast: Broadcast, digits: Dataset, change: dict[str, Tensor | None], words: str
) -> None:
    upload = upload_of(broadcast, digits, "site", np.arange(30))
    given = {name: value for name, value in {**upload.sums, **change}.items() if value is not None}
    with pytest.raises(ProtocolError, match=words):
        Upload.unpack(replace(upload, sums=given).pack(), broadcast, {}, "site-7")


@pytest.mark.parametrize("how", [{"precision": "int16"}, {"precision": "fp16"}, {"rank": 20}])
def test_negative_squares_are_refused_in_smaller_uploads_too(
    broadcast: Broadcast, digits: Dataset, how: dict[str, object]
) -> None:
    told = sent(digits, **{f"sums__{key}": value for key, value in how.items()})
    upload = upload_of(told, digits, "site", np.arange(30))
    name = "rest" if "rank" in how else "diagonal"
    given = {**upload.sums, name: upload.sums[name] - 1}
    with pytest.raises(ProtocolError, match="negative squares"):
        Upload.unpack(replace(upload, sums=given).pack(), told, {}, "site-7")


def test_images_that_are_all_alike_are_sums_all_the_same(broadcast: Broadcast, digits: Dataset) -> None:
    """Around their mean nothing is left but rounding, of either sign."""
    alike = Images(digits.train.pixels[:1].expand(500, -1, -1, -1), digits.train.labels[:500])
    upload = acts.train(broadcast, Site("site", alike))
    again = Upload.unpack(upload.pack(), broadcast, {})
    assert torch.isfinite(acts.fuse([again], broadcast).predict(digits.test.pixels)).all()


def test_sums_of_no_features_end_the_search(broadcast: Broadcast) -> None:
    wrong = Moments(torch.eye(4).double(), torch.zeros(4, 2).double(), torch.zeros(4).double(), torch.ones(2).double())
    wrong.gram[0, 1] = wrong.gram[1, 0] = 1e12
    with pytest.raises(RunError, match="no second moments of any features"):
        solve(wrong)


@pytest.mark.parametrize("images", [20, 60, 120, 250])
def test_few_images_are_no_reason_to_be_sure(broadcast: Broadcast, digits: Dataset, images: int) -> None:
    """Fewer than features, or hardly more: λ is not at the end of the search, and wrong answers are not given for certain."""
    told = sent(digits, sums__features={"kind": "patches", "size": 160, "patch": 3})
    upload = upload_of(told, digits, "site", np.arange(images))
    found = solve(unpacked(upload.sums))
    assert images - found.freedom >= 1 and 1e-6 < found.penalty < 1e3
    probabilities = acts.fuse([upload], told).predict(digits.test.pixels)
    right = probabilities.gather(1, digits.test.labels[:, None])
    assert float(-right.clamp(min=1e-30).log().mean()) < 4


def test_copies_are_no_images_of_their_own_when_errors_are_counted(broadcast: Broadcast, digits: Dataset) -> None:
    once = unpacked(upload_of(broadcast, digits, "site", np.arange(200)).sums)
    one, two = solve(once, 0.1), solve(once + once, 0.1, copies=2)
    assert two.noise == pytest.approx(one.noise, rel=1e-6) and two.freedom == pytest.approx(one.freedom, rel=1e-6)
    assert solve(once + once, 0.1).noise < 0.9 * one.noise
    assert solve(once + once, copies=2).penalty == pytest.approx(solve(once).penalty)


def test_nobody_left_is_one_line() -> None:
    with pytest.raises(RunError, match="over no images at all"):
        solve(Moments.zero(4, 2))
