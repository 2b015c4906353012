"""A queue holds one client's own past features, the newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clients import prepared
from conftest import small_recipe
from oneround import acts
from oneround.config.sections import Queue
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.site import Site
from oneround.training import Learner
from oneround.training.feature_queue import FeatureQueue
from random_batches import random_batch


def test_a_queue_starts_empty_and_keeps_the_newest_first() -> None:
    queue = FeatureQueue(Queue(size=40, warm_up=1), 6, torch.device("cpu"))
    first, second = (random_batch(24, 4, seed, features=6) for seed in (3, 4))
    assert (queue.features.labels == -1).all()
    queue.begin_epoch(0)
    queue.push(first)
    assert (queue.features.labels == -1).all(), "what warms up is not kept"
    queue.begin_epoch(1)
    queue.push(first)
    queue.push(second)
    kept = torch.cat([second.unit, first.unit])[:40]
    assert torch.equal(queue.features.unit, kept), "the newest first, the oldest fall out"
    assert torch.equal(queue.features.labels, torch.cat([second.labels, first.labels])[:40])
    queue.clear()
    assert (queue.features.labels == -1).all() and not queue.features.unit.any()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"queue": {"size": 0}}, "queue.size"),
        ({"queue": {}, "objective__terms": {"cross-entropy": {}}}, "queue: no term uses it"),
    ],
)
def test_a_queue_that_means_nothing_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        small_recipe("fafi", **changes)


def test_a_queue_never_holds_another_clients_features(digits: Dataset, tmp_path: Path) -> None:
    """Clients take turns on one network in one process; what one leaves behind must not reach the next."""
    broadcast = prepared(digits, queue={"size": 256, "warm_up": 0}, training__epochs=4)
    mine, theirs = digits.train.take(torch.arange(100)), digits.train.take(torch.arange(200, 330))
    alone = acts.train(broadcast, Site("mine", mine))
    acts.train(broadcast, Site("theirs", theirs, tmp_path / "theirs"), until=2)
    after = acts.train(broadcast, Site("mine", mine, tmp_path / "mine"), until=2)
    acts.train(broadcast, Site("theirs", theirs, tmp_path / "theirs"), until=3)
    resumed = acts.train(broadcast, Site("mine", mine, tmp_path / "mine"))
    assert after.epoch == 2 and resumed.content == alone.content
    labels = set(Learner(broadcast, Site("mine", mine)).stepper.queue.features.labels.tolist())  # type: ignore[union-attr]
    assert labels == {-1}
    assert alone.content != acts.train(prepared(digits, training__epochs=4), Site("mine", mine)).content, "it counts"
