"""One pass that sums fixed features at a site; what it found is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients import prepared, some
from oneround import acts, sums
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.fusion.ridge import total_sums
from oneround.privacy.masks import simulated_masker
from oneround.server.plan import DealtPlan
from oneround.site import Site
from oneround.sums import unpacked
from oneround.training.feature_sums import feature_sums
from small_sums import SMALL, broadcast_of, upload_of


def test_sums_are_kept_between_snapshots(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [("model.encoder", {"kind": "cnn", "width": 4}), ("training.epochs", 3), ("training.batch_size", 64)]
    broadcast = DealtPlan.of(load("routed", [*SMALL.items(), *small]), digits).prepare()
    site = Site("site", digits.train.take(np.arange(80)), tmp_path)
    first = acts.train(broadcast, site, until=1)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("summed again")

    monkeypatch.setattr(sums, "gather", again)
    second = acts.train(broadcast, site, until=2)
    assert all(torch.equal(second.sums[name], value) for name, value in first.sums.items()) and second.epoch == 2
    (kept,) = tmp_path.glob("sums/*")
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(AssertionError, match="summed again"):
        acts.train(broadcast, site)


def test_a_recipe_without_sums_gets_none(digits: Dataset) -> None:
    assert feature_sums(prepared(digits), some(digits, 10)) == {}


def test_a_pass_reports_its_progress(digits: Dataset) -> None:
    done: list[int] = []
    feature_sums(broadcast_of(digits), some(digits, 600), done.append)
    assert done == [1, 2]


@pytest.mark.slow
def test_masks_need_a_secret_with_every_other_site(digits: Dataset) -> None:
    masked = replace(broadcast_of(digits, sums__secure=True, reveal__class_counts=False), roster={"a": "", "b": ""})
    images = {name: digits.train.take(np.arange(start, start + 50)) for name, start in (("a", 0), ("b", 50))}
    with pytest.raises(RunError, match=r"a: sums.secure needs a secret with each other site, and knows 0"):
        feature_sums(masked, Site("a", images["a"]))
    with pytest.raises(RunError, match=r"and knows 2"):
        feature_sums(masked, Site("a", images["a"], masker=simulated_masker("a", "abc", 1)))
    uploads = [
        acts.train(masked, Site(name, own, masker=simulated_masker(name, "ab", 1))) for name, own in images.items()
    ]
    total = total_sums(uploads, masked, torch.device("cpu"))
    plain = unpacked(upload_of(broadcast_of(digits), digits, "all", np.arange(100)).sums)
    assert torch.allclose(total.gram, plain.gram, rtol=1e-4, atol=1e-4) and torch.equal(total.counts, plain.counts)
