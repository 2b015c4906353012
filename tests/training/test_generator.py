"""A client with a generator: repeats and resumes bit for bit, whatever trains beside it, and every option counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clients import some
from generating import sent
from oneround import acts
from oneround.config.load import parse_federated
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.protocol import Broadcast, Upload
from oneround.protocol.messages import check_norms
from oneround.training.generator import GeneratorLearner
from oneround.training.loop import Trainer

ALONE: dict[str, Any] = {
    "objective": {"terms": {}},
    "sums": {"features": {"kind": "patches", "size": 96, "patch": 4}},
    "fusion": ["ridge"],
}


@pytest.fixture(scope="module")
def quick(digits: Dataset) -> Broadcast:
    """Of generators alone, whose average is near their weights from the start."""
    return sent(digits, **ALONE, generator__average=0.3)


def changed_in(broadcast: Broadcast, **options: Any) -> Broadcast:
    """The broadcast with other options of its generator."""
    plain = broadcast.recipe.plain()
    return replace(
        broadcast, recipe=parse_federated({**plain, "generator": {**plain["generator"], **options}}), digest=""
    )


def trained(broadcast: Broadcast, digits: Dataset, **arguments: Any) -> Upload:
    return acts.train(broadcast, some(digits, 100), **arguments)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_killed_and_resumed_it_ends_as_undisturbed_network_by_network(digits: Dataset, tmp_path: Path) -> None:
    broadcast = sent(digits, training__epochs=2, generator__epochs=3)
    whole, site = trained(broadcast, digits), replace(some(digits, 100), folder=tmp_path)
    parts = [acts.train(broadcast, site, until=epoch) for epoch in (1, 2, 4, 5)]
    assert [part.epoch for part in parts] == [1, 2, 4, 5] and parts[-1].content == whole.content
    assert same(parts[1].generator, broadcast.generator) and same(parts[1].weights, whole.weights)
    assert [(entry["epoch"], entry.get("network")) for entry in whole.history] == [
        (1, None), (2, None), (3, "generator"), (4, "generator"), (5, "generator"),
    ]  # fmt: skip
    assert acts.train(broadcast, site, trainer=Trainer()).content == whole.content, "from the last state"


def test_a_generator_is_the_same_alone_and_beside_another_network(digits: Dataset) -> None:
    beside, alone = trained(sent(digits), digits), trained(sent(digits, **ALONE), digits)
    assert (
        same(beside.generator, alone.generator) and not alone.weights and alone.sums and beside.epoch == alone.epoch + 1
    )
    without = sent(digits, generator=None, generator__network=None)
    assert same(trained(without, digits).weights, beside.weights)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 20), ("learning_rate", 1e-3), ("betas", [0.5, 0.99]), ("betas", [0.9, 0.9]), ("weight_decay", 0.5), ("warm_up", 0),
        ("fall", 0.9), ("lowest", 0.5), ("clip_norm", 0.1), ("average", 0.1), ("drop_label", 0.5), ("flip", 0.5), ("epochs", 3),
    ],
)  # fmt: skip
def test_every_option_changes_what_is_sent(digits: Dataset, quick: Broadcast, option: str, value: Any) -> None:
    changed = trained(changed_in(quick, **{option: value}), digits)
    assert not same(trained(quick, digits).generator, changed.generator)


def test_what_is_sent_is_the_average_and_the_seed_decides(digits: Dataset, quick: Broadcast) -> None:
    broadcast = quick
    learner = GeneratorLearner(broadcast, some(digits, 100))
    learner.train(2)
    assert same(trained(broadcast, digits).generator, learner.average)
    assert not torch.equal(learner.average["first.weight"], learner.state.net.get_parameter("first.weight"))
    seeds = {**broadcast.recipe.plain()["seeds"], "training": 2}
    other = replace(broadcast, recipe=parse_federated({**broadcast.recipe.plain(), "seeds": seeds}))
    assert not same(trained(other, digits).generator, learner.average)


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
def test_a_small_encoding_travels(digits: Dataset, encoding: str) -> None:
    plain, broadcast = sent(digits), sent(digits, upload__encoding=encoding)
    upload, whole = trained(broadcast, digits), trained(plain, digits)
    received = Upload.unpack(upload.pack(), broadcast, acts.statistics_of(broadcast))
    assert received.content == upload.content and len(upload.pack()) < 0.7 * len(whole.pack())
    for name, value in whole.generator.items():
        assert torch.allclose(received.generator[name], value, atol=2e-2 * float(value.abs().max()))
    traffic = [acts.traffic(each.recipe, 10, digits.shape, 0) for each in (broadcast, plain)]
    assert traffic[0].up < traffic[1].up and traffic[0].parameters == broadcast.parameters
    assert abs(len(upload.pack()) - traffic[0].up) < 20_000


def test_a_generator_that_cannot_be_is_refused(digits: Dataset) -> None:
    broadcast = sent(digits)
    upload, statistics = trained(broadcast, digits), acts.statistics_of(broadcast)
    acts.check_usable(upload, broadcast, "upload")
    check_norms(upload, broadcast, "upload")
    for change, message in (
        ({"generator": {}}, "generator.* is missing"),
        ({"generator": {**upload.generator, "more": torch.zeros(1)}}, "generator.more is not asked for"),
    ):
        with pytest.raises(ProtocolError, match=message):
            Upload.unpack(replace(upload, **change).pack(), broadcast, statistics)
    large = replace(
        upload, generator={**upload.generator, "last.weight": torch.full_like(upload.generator["last.weight"], 99.0)}
    )
    with pytest.raises(ProtocolError, match=r"generator\.last\.weight has norm"):
        check_norms(large, broadcast, "upload")
    infinite = replace(upload, generator={**upload.generator, "last.bias": torch.full((1,), torch.inf)})
    with pytest.raises(ProtocolError, match="its generator's outputs are not finite"):
        acts.check_usable(infinite, broadcast, "upload")


def test_a_loss_that_is_not_finite_is_undone_and_said(digits: Dataset, quick: Broadcast) -> None:
    broadcast = quick
    broken = replace(broadcast, generator={**broadcast.generator, "last.bias": torch.full((1,), 1e30)})
    with pytest.raises(
        RunError, match=r"the generator's loss or its gradient is not finite; .*generator\.learning_rate"
    ):
        acts.train(broken, some(digits, 100))


def test_hidden_counts_hide_what_follows_from_them(digits: Dataset) -> None:
    upload = trained(sent(digits, reveal__class_counts=False), digits)
    assert [sorted(entry) for entry in upload.history][-1] == ["epoch", "learning_rate", "loss", "network"]


def test_what_does_not_go_with_a_generator_is_refused(digits: Dataset) -> None:
    with pytest.raises(RecipeError, match="generators are for one round"):
        sent(digits, rounds=2, fusion=["average"])
    with pytest.raises(RecipeError, match=r"generator\.network: halves images 4 times"):
        sent(digits, generator__network={"kind": "unet", "widths": [8] * 5, "blocks": [1] * 5, "attention": []})
