"""How an encoder lays out images."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from diagnosis.doctored import PLAIN, Ran, record_of
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.analysis.diagnosis.geometry import Geometry, deep_findings, effective_rank, geometry_of
from oneround.data import Dataset


def test_the_geometry_of_known_features() -> None:
    labels = torch.arange(4).repeat_interleave(25)
    simplex = F.normalize(torch.eye(4, dtype=torch.float64) - 0.25, dim=1)
    geometry = geometry_of(simplex[labels], labels + 3)
    assert (
        geometry.classes == 4
        and geometry.nc1 == pytest.approx(0, abs=1e-12)
        and geometry.nc2 == pytest.approx(0, abs=1e-12)
    )
    assert geometry.effective_rank == pytest.approx(3)
    assert effective_rank(torch.ones(9, 5)) == pytest.approx(1, abs=1e-3) and effective_rank(
        torch.eye(5)
    ) == pytest.approx(5)
    noise = F.normalize(torch.randn(4000, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    assert geometry_of(noise, torch.arange(4000) % 4).nc1 > 100
    two = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double().repeat(5, 1)
        + torch.tensor([[0.1, 0.0]]) * torch.tensor([1, 1, -1, -1, 0, 0, 0, 0, 0, 0])[:, None]
    )
    assert geometry_of(two, torch.arange(10) % 2).nc1 == pytest.approx(
        0.004 / 0.5
    )  # 4 of 10 are 0.1 off; means (±½, ∓½) apart
    skewed = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 0, 1, 2])]
    cosines = geometry_of(torch.stack([skewed[0], skewed[0], skewed[2], -skewed[2]]), torch.tensor([0, 0, 1, 2])).nc2
    means = torch.stack([skewed[0], skewed[2], -skewed[2]])
    unit = F.normalize(means - means.mean(0), dim=1)
    assert cosines == pytest.approx(float(sum(abs(unit[i] @ unit[j] + 0.5) for i, j in ((0, 1), (0, 2), (1, 2))) / 3))


def test_the_deep_check_measures_every_encoder(collapsed: Ran, healthy: Ran, digits: Dataset) -> None:
    deep, well = diagnose(collapsed.folder, deep=True, data=digits), diagnose(healthy.folder, deep=True)
    assert deep.geometry.keys() == {"client_000", "client_001"} == well.geometry.keys()
    flat, full = max(each.effective_rank for each in deep.geometry.values()), [*well.geometry.values()]
    assert flat < 3 < min(each.effective_rank for each in full) and all(
        each.nc1 < 1 and each.classes == 10 for each in full
    )
    clients = {
        each.client
        for each in deep.findings
        if each.rule == "feature-collapse" and each.about in ("effective rank", "NC1")
    }
    assert clients == deep.geometry.keys()


def test_collapse_is_few_directions_or_blurred_classes() -> None:
    """Doctored: the limits themselves, either side of them."""
    run = record_of(PLAIN, {"a": [{"epoch": 4}]})

    def about(effective_rank: float, nc1: float) -> list[str]:
        collapsed = list(deep_findings(run, {"a": Geometry(5, effective_rank, nc1, 0.1)}))
        assert all((each.client, each.epoch, each.rule) == ("a", 4, "feature-collapse") for each in collapsed)
        return [each.about for each in collapsed]

    assert about(2.0, 1.99) == [] and about(1.99, 1.99) == ["effective rank"]
    assert about(2.0, 2.0) == ["NC1"] and about(2.0, math.nan) == ["NC1"]
