"""A split chosen before training: who shares how many blocks, what training leaves of them, and what the server averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clients import broadcast_of, few, series
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError, RunError
from oneround.fusion import rules
from oneround.models.blocks import blocks
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast, Upload
from oneround.site import Site
from oneround.training import Trainer
from oneround.training.alignment.aligner import label_entropy
from oneround.training.shared_base import depths_of, number_of_blocks, own_choices, shared_blocks

DECLARED = {"fusion": [{"kind": "split", "chosen": "declared"}, "iffi"]}


def trained_at(digits: Dataset, depth: int, name: str = "a", trainer: Trainer | None = None, **changes: Any) -> Upload:
    broadcast = broadcast_of(digits, "split-trained", 4, fusion=DECLARED["fusion"], **changes)
    surveyed = Broadcast(
        broadcast.recipe, broadcast.class_names, broadcast.shape, broadcast.weights, depths={"a": depth, "b": 3}
    )
    return acts.train(surveyed, Site(name, few(digits, 4)), trainer=trainer)


def moved(digits: Dataset, upload: Upload, **changes: Any) -> list[float]:
    """How far the parameters of each block are from the broadcast's."""
    broadcast = broadcast_of(digits, "split-trained", 4, fusion=DECLARED["fusion"], **changes)
    net = network_from(broadcast.recipe.encoder, 1, 10, dict(broadcast.weights))
    parameters = dict(net.named_parameters())
    names = [[name for name in block if name in parameters] for block in blocks(net)]
    return [float(sum((upload.weights[name] - broadcast.weights[name]).norm() for name in block)) for block in names]


def test_frozen_blocks_stay_and_the_others_learn(digits: Dataset) -> None:
    for depth in (1, 2):
        upload = trained_at(digits, depth, share__hold="frozen")
        distances = moved(digits, upload)
        assert distances[:depth] == [0.0] * depth and min(distances[depth:]) > 0.01
        assert series(upload, "shared_blocks") == [depth] * 4 and float(upload.statistics["shared_blocks"]) == depth


def test_pulled_blocks_stay_nearer_the_stronger_they_are_pulled(digits: Dataset) -> None:
    free, weak, strong = (
        moved(digits, trained_at(digits, 2, share__strength=strength)) for strength in (1e-9, 1.0, 10.0)
    )
    for block in (0, 1):
        assert strong[block] < 0.7 * weak[block] < 0.7 * 0.95 * free[block]
    assert strong[-1] > 0.5 * free[-1], "the head is the client's own"


def test_clients_that_take_turns_on_one_network_each_hold_their_own_depth(digits: Dataset) -> None:
    trainer = Trainer()
    together = [trained_at(digits, 1, name, trainer, share__hold="frozen") for name in ("a", "b", "a")]
    alone = [trained_at(digits, 1, name, share__hold="frozen") for name in ("a", "b")]
    for one, other in zip(together, [*alone, alone[0]], strict=True):
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
    assert moved(digits, together[1])[:3] == [0.0] * 3 and moved(digits, together[2])[1] > 0


def test_the_server_chooses_from_histograms_and_a_client_from_its_own_labels(digits: Dataset) -> None:
    histograms = {"x": torch.tensor([9, 1, 0, 0]), "y": torch.tensor([8, 2, 0, 0]), "z": torch.tensor([0, 0, 7, 0])}
    counts = torch.stack(list(histograms.values()))
    for chosen in ("all", "each"):
        recipe = broadcast_of(digits, "split-trained", share__chosen=chosen, **DECLARED).recipe
        total = number_of_blocks(recipe, 1)
        assert total == 4 and list(depths_of(recipe, 1, histograms).values()) == shared_blocks(counts, total, chosen)
    assert len(set(depths_of(recipe, 1, histograms).values())) > 1, "each has its own"
    broadcast = broadcast_of(digits, "split-trained-local", 1, **DECLARED)
    for classes in (1, 10):
        images = few(digits, classes)
        upload = acts.train(broadcast, Site("site", images))
        expected = min(max(round(label_entropy(images.class_counts(10)) * 4), 1), 3)
        assert float(upload.statistics["shared_blocks"]) == expected == own_choices(images.class_counts(10)[None], 4)[0]
    assert expected == 3


def test_a_client_that_sent_no_histogram_is_told_so(digits: Dataset) -> None:
    with pytest.raises(RunError, match=r"share: c sent no histogram before training.* \(known: a, b\)"):
        trained_at(digits, 1, "c")


@pytest.mark.parametrize(
    ("preset", "changes", "text"),
    [
        ("fafi", DECLARED, "split with chosen: declared needs a split that clients train under; add share"),
        ("split-trained", {"reveal.class_counts": False, **DECLARED}, "share.chosen = all: follows from class counts"),
        (
            "split-trained",
            {"share.hold": "frozen", "training.weight_decay": 1e-4},
            "weight_decay = 0.0001: would move frozen blocks",
        ),
        ("split-trained", {"share.strength": 0}, "share.strength = 0: must be > 0"),
    ],
)
def test_what_does_not_fit_is_refused(preset: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(preset, changes)
    assert text in str(caught.value)


def test_hidden_counts_go_with_a_split_that_clients_choose(digits: Dataset) -> None:
    broadcast = broadcast_of(digits, "split-trained-local", 1, reveal__class_counts=False, **DECLARED)
    upload = acts.train(broadcast, Site("site", few(digits, 3)))
    assert len(set(upload.class_counts.tolist())) <= 2 and float(upload.statistics["shared_blocks"]) == 2


def test_older_recipes_keep_their_digest() -> None:
    plain = load("fafi")
    assert plain.share is None and load("fafi", {"share": None}).digest == plain.digest
    assert load("fafi", {"share": {}}).digest != plain.digest


def test_an_impossible_depth_in_an_upload_is_refused(digits: Dataset) -> None:
    rule = rules.parse(DECLARED["fusion"][0])
    for value in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="counts blocks, at least one"):
            rule.check_statistics({"shared_blocks": torch.tensor(value)})
    rule.check_statistics({"shared_blocks": torch.tensor(2.0)})
