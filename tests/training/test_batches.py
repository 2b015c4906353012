"""Every sample is used; balanced batches have every class equally often."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneround.config.sections import Training
from oneround.training.batches import batches, steps_per_epoch


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


def test_balanced_batches_have_every_class_equally_often() -> None:
    labels = torch.tensor([0] * 70 + [3] * 25 + [7] * 5)
    training = Training(batch_size=20, sampling="balanced")
    plan = batches(labels, training, torch.Generator().manual_seed(1))
    drawn = torch.cat(plan)
    assert [len(batch) for batch in plan] == [20] * 5
    assert sorted(labels[drawn].bincount()[[0, 3, 7]].tolist()) == [33, 33, 34]
    assert drawn[labels[drawn] == 3].unique(return_counts=True)[1].tolist().count(2) in (8, 9), "all before any again"
    assert max(int((labels[batch] == 7).sum()) for batch in plan) <= 9, "mixed evenly"
    assert torch.cat(batches(labels, Training(batch_size=20), torch.Generator().manual_seed(1))).unique().numel() == 100
