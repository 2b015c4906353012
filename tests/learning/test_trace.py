"""What the trace says of gradients is what autograd says; the rails see what goes wrong, say it and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from oneround import acts
from oneround.data import Dataset, Images
from oneround.errors import RunError
from oneround.folder import RunFolder
from oneround.learning import Batch, rails
from oneround.learning.objective import active
from oneround.learning.trace import gradients, spread
from oneround.protocol import Broadcast, Upload
from oneround.reading import load
from oneround.runs import Plan
from oneround.simulate import run
from oneround.site import Site

SMALL = {"model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 32, "fusion": ["iffi"]}


def some_batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    unit = F.normalize(torch.randn(24, 8, generator=random), dim=1)
    return Batch(unit, torch.randint(0, 4, (24,), generator=random), torch.randn(4, 8, generator=random))


def test_gradients_of_terms_at_features_and_prototypes() -> None:
    batch, chosen = some_batch(), active(load("fafi").objective)
    anchors = torch.zeros(4, 8)
    told = gradients(chosen, batch, lambda seen: (seen.prototypes - anchors).square().mean())
    z, y, p = batch.unit.double().numpy(), batch.labels.numpy(), batch.prototypes.double().numpy()
    softmax = np.exp(z @ p.T) / np.exp(z @ p.T).sum(1, keepdims=True)
    error = (softmax - np.eye(4)[y]) / 24
    at_z, at_p, align = error @ p, error.T @ z, 2 * p / 32
    assert told["features"]["norm"]["cross-entropy"] == pytest.approx(np.linalg.norm(at_z), rel=1e-5)
    assert told["prototypes"]["norm"]["cross-entropy"] == pytest.approx(np.linalg.norm(at_p), rel=1e-5)
    assert told["prototypes"]["norm"]["alignment"] == pytest.approx(np.linalg.norm(align), rel=1e-5)
    assert told["features"]["cosine"]["cross-entropy · prototype-feature"] == pytest.approx(1, abs=1e-5)
    similarity = z @ z.T / 0.07
    np.fill_diagonal(similarity, -np.inf)
    share = np.exp(similarity) / np.exp(similarity).sum(1, keepdims=True)
    same = (y[:, None] == y) & ~np.eye(24, dtype=bool)
    pull = (share - same / same.sum(1, keepdims=True)) / 24 / 0.07
    contrast = (pull + pull.T) @ z
    wanted = (at_z * contrast).sum() / np.linalg.norm(at_z) / np.linalg.norm(contrast)
    assert told["features"]["cosine"]["cross-entropy · supervised-contrastive"] == pytest.approx(wanted, abs=1e-4)
    separation = torch.from_numpy(p).requires_grad_()
    F.cross_entropy(separation @ separation.T, torch.arange(4)).backward()
    base = 2 * at_p + separation.grad.numpy()  # type: ignore[union-attr]
    wanted = (base * align).sum() / np.linalg.norm(base) / np.linalg.norm(align)
    assert told["prototypes"]["cosine"]["base · alignment"] == pytest.approx(wanted, abs=1e-4)
    # a gradient that vanishes has no direction
    assert told["prototypes"]["cosine"]["cross-entropy · supervised-contrastive"] is None
    assert told["features"]["cosine"]["base · alignment"] is None


def few(digits: Dataset, samples: int = 96, classes: int = 10) -> Images:
    return digits.train.take(torch.nonzero(digits.train.labels < classes)[:samples, 0])


def sent(digits: Dataset, preset: str, **changes: Any) -> Broadcast:
    given = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return Plan.of(load(preset, given.items()), digits).prepare()


def trained(digits: Dataset, preset: str, **changes: Any) -> Upload:
    return acts.train(sent(digits, preset, **changes), Site("site", few(digits)))


def test_every_term_is_in_the_trace_and_tracing_changes_nothing(digits: Dataset) -> None:
    upload = trained(digits, "v12", training__epochs=3, trace__every=1)
    wanted = {"loss", "base", "align", "cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation", "lambda_raw",
              "s", "lambda_effective", "lambda_applied", "sigma_base", "sigma_align", "entropy", "gradient_norm", "gradients", "spread"}  # fmt: skip
    assert all(wanted <= entry.keys() for entry in upload.history)
    untraced = trained(digits, "v12", training__epochs=3, trace__every=0)
    assert all("gradients" not in entry for entry in untraced.history)
    assert all(torch.equal(value, untraced.weights[name]) for name, value in upload.weights.items())


def test_gradients_are_looked_at_once_in_so_many_steps(digits: Dataset) -> None:
    upload = trained(digits, "fafi", training__epochs=10, trace__every=12)  # 3 steps an epoch
    traced = [entry["epoch"] for entry in upload.history if "gradients" in entry]
    assert traced == [1, 4, 8, 10]


def test_conflict_with_a_bank_is_visible(digits: Dataset) -> None:
    upload = trained(digits, "v5", training__epochs=2, trace__every=1)
    assert "bank-contrastive · cross-entropy" in upload.history[0]["gradients"]["features"]["cosine"]


def test_spread_is_zero_when_features_are_one_point() -> None:
    assert abs(float(spread(F.normalize(torch.ones(5, 3), dim=1)))) < 1e-6
    assert float(spread(torch.eye(4))) == 0.75


# --- rails -----------------------------------------------------------------------------------------------------------

EXPLODING = {"training__epochs": 6, "alignment__weight__rate": 2.0, "rails__largest_weight": 8.0}


def test_a_weight_out_of_range_is_told_with_client_epoch_weight_and_cause(digits: Dataset) -> None:
    told: list[dict[str, Any]] = []
    upload = acts.train(sent(digits, "etf-decoupled", **EXPLODING), Site("ward", few(digits)), emit=told.append)
    trouble = [event["text"] for event in told if event["event"] == "trouble"]
    assert len(trouble) == 1, "told once, not every epoch"
    first = next(entry for entry in upload.history if entry["lambda_effective"] > 8)
    assert trouble[0].startswith(
        f"ward, epoch {first['epoch']}, λ = {first['lambda_effective']:.4g}: λ is out of range"
    )
    assert "rails.largest_weight = 8" in trouble[0] and "L_base/(s·L_align)" in trouble[0]
    assert upload.epoch == 6 and not upload.stopped


def test_what_acted_is_judged_also_in_the_last_epoch(digits: Dataset) -> None:
    """s falls to 0 at the end, so λ·s as logged for the epoch to come is 0, whatever acted in the last."""
    upload = trained(digits, "v12", training__epochs=4)
    for entry in upload.history:
        s = 1 - (entry["epoch"] - 1) / 4
        assert entry["lambda_applied"] == pytest.approx(entry["lambda_raw"] * s)
    assert upload.history[-1]["lambda_effective"] == 0 < upload.history[-1]["lambda_applied"]
    recipe = load("v12", [("rails.largest_weight", 100.0)])
    seen = {"epoch": 9, "loss": 1.0, "gradient_norm": 1.0, "base": 1.0, "align": 0.1, "s": 0.1, "sigma_align": 0.1}
    assert rails.look(recipe, {**seen, "lambda_raw": 500.0, "lambda_applied": 99.0}, 1e9) is None
    told = rails.look(recipe, {**seen, "lambda_raw": 500.0, "lambda_applied": 101.0, "lambda_effective": 0.0}, 1e9)
    assert told is not None and told.kind == "weight" and "λ = 101" in told.text


def test_sigma_that_runs_away_is_named_and_a_client_can_go_on_without_it(digits: Dataset) -> None:
    told: list[dict[str, Any]] = []
    wild = {"training__epochs": 3, "alignment__weight__rate": 1e6}
    acting = sent(digits, "v10", **wild, rails__on_explosion="clamp")
    upload = acts.train(acting, Site("ward", few(digits)), emit=told.append)
    (text,) = {event["text"] for event in told if event["event"] == "trouble"}
    assert "σ ran away" in text and "alignment.weight.rate = 1e+06" in text and "its alignment is dropped" in text
    assert upload.epoch == 3 and not upload.stopped


def test_clamp_holds_the_weight_at_the_limit(digits: Dataset) -> None:
    upload = trained(digits, "etf-decoupled", **EXPLODING, rails__on_explosion="clamp")
    assert max(entry["lambda_effective"] for entry in upload.history) == pytest.approx(8)
    assert max(entry["lambda_raw"] for entry in upload.history) > 8
    free = trained(digits, "etf-decoupled", **EXPLODING)
    assert not torch.equal(upload.weights["prototypes"], free.weights["prototypes"])


def test_stop_ends_the_run_and_keeps_what_was_learned(digits: Dataset, tmp_path: Path) -> None:
    given = {**SMALL, **{key.replace("__", "."): value for key, value in EXPLODING.items()}, "rails.on_explosion": "stop",
             "partition.clients": 2, "partition.alpha": 0.5, "local.workers": 1, "snapshots": 0}  # fmt: skip
    with pytest.raises(
        RunError, match=r"client_00\d, epoch \d, λ = .*out of range.*stopped, what it learned .* is kept"
    ):
        run(load("etf-decoupled", given.items()), tmp_path / "run", data=digits)
    uploads = RunFolder(tmp_path / "run").uploads()
    assert len(uploads) == 2 and all(0 < upload.epoch < 6 and upload.stopped for upload in uploads)
    assert acts.fuse(uploads, uploads.broadcast)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


class Poison:
    """Makes the loss infinite from a step on, by way of the anchors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        from oneround.learning.alignment import Aligner

        plain, self.steps = Aligner.distance, 0

        def distance(aligner: Aligner, batch: Batch) -> torch.Tensor:
            self.steps += 1
            return plain(aligner, batch) * (torch.inf if self.steps > after and float(aligner.ceiling) > 0 else 1.0)

        monkeypatch.setattr(Aligner, "distance", distance)


def test_an_epoch_that_is_not_finite_is_undone(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"training__epochs": 5, "trace__every": 0}
    good = acts.train(sent(digits, "etf", **options), Site("site", few(digits)), until=2)
    Poison(monkeypatch, after=7)  # in the third epoch of three steps
    stopped = trained(digits, "etf", **options)
    assert stopped.epoch == 2 and "epoch 3" in stopped.stopped and "not finite" in stopped.stopped
    assert all(torch.equal(value, good.weights[name]) for name, value in stopped.weights.items())


def test_clamp_drops_the_alignment_of_a_client_that_diverges(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(monkeypatch, after=7)
    upload = trained(digits, "etf", training__epochs=5, trace__every=0, rails__on_explosion="clamp")
    assert upload.epoch == 5 and not upload.stopped
    assert [entry["lambda_effective"] for entry in upload.history] == [5, 5, 0, 0, 0]
    assert all(np.isfinite(entry["loss"]) for entry in upload.history)


def test_collapsed_features_are_told_unless_there_is_one_class() -> None:
    measured = {"epoch": 3, "loss": 1.0, "gradient_norm": 1.0, "spread": 1e-6, "classes_seen": 4}
    trouble = rails.look(load("fafi"), measured, 1e5)
    assert trouble is not None and trouble.kind == "collapse" and "epoch 3" in trouble.text
    assert rails.look(load("fafi"), {**measured, "classes_seen": 1}, 1e5) is None
    assert rails.look(load("fafi"), {**measured, "spread": 0.2}, 1e5) is None
