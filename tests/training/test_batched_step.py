"""Several networks as one: every client's outputs, gradients and statistics are its own, and a step is few operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clients import prepared
from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.config.parts import load_plugin
from oneround.data import Dataset
from oneround.models.encoders import encoders
from oneround.site import Site
from oneround.training import Trainer
from oneround.training.batched_loop import Group
from oneround.training.batched_step import BatchedStepper, group, not_batchable


def stacked(nets: list[nn.Module], name: str) -> Tensor:
    return torch.stack([net.state_dict()[name] for net in nets])


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "cnn", "width": 4},
        {"kind": "cnn", "width": 4, "norm": "group"},
        pytest.param({"kind": "resnet18"}, marks=pytest.mark.slow),
        pytest.param({"kind": "mobilenet-v2"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_grouped_encoder_is_its_clients_encoders_side_by_side(kind: dict[str, Any]) -> None:
    """Outputs, gradients and norm statistics, in double precision."""
    clients, part = 3, encoders.parse(kind)
    torch.manual_seed(1)
    nets: list[nn.Module] = [part.build(3).double() for _ in range(clients)]
    grouped = part.build(3)
    group(grouped, clients)
    grouped.double()
    with torch.no_grad():
        for name, value in grouped.state_dict().items():
            value.copy_(stacked(nets, name).view(value.shape))
    images = torch.randn(clients, 5, 3, 8, 8, dtype=torch.float64)
    outputs = grouped(images.transpose(0, 1).flatten(1, 2)).view(5, clients, -1).transpose(0, 1)
    direction = torch.randn_like(outputs)
    (outputs * direction).sum().backward()
    alone = torch.stack([net(each) for net, each in zip(nets, images, strict=True)])
    (alone * direction).sum().backward()
    torch.testing.assert_close(outputs, alone, rtol=1e-9, atol=1e-9)
    assert float(alone.detach().abs().mean()) > 0.01
    for name, parameter in grouped.named_parameters():
        own = torch.stack([dict(net.named_parameters())[name].grad for net in nets])  # type: ignore[arg-type]
        assert parameter.grad is not None and own.isfinite().all()
        torch.testing.assert_close(parameter.grad.view(own.shape), own, rtol=1e-7, atol=1e-9)
    for name, buffer in grouped.named_buffers():
        own = stacked(nets, name)
        torch.testing.assert_close(buffer.view(own.shape), own, rtol=1e-9, atol=1e-9)


def test_a_layer_that_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(TypeError, match="a Linear of several clients cannot be grouped"):
        group(nn.Sequential(nn.Linear(2, 2)), 2)


@pytest.mark.parametrize(
    ("preset", "changes", "why"),
    [
        ("fafi", {}, None),
        ("v10", {}, None),
        ("bank", {"public": 0.2}, None),
        ("ridge", {}, "trains no network"),
        ("mergenet-single", {}, "a companion learns beside one client"),
    ],
)
def test_what_cannot_be_batched_is_known_before_it_runs(
    preset: str, changes: dict[str, Any], why: str | None, digits: Dataset
) -> None:
    recipe = acts.resolve(load(preset, changes.items()), digits)
    reason = not_batchable(recipe, 1)
    assert reason is None if why is None else why in str(reason)


PLUGIN = """
from oneround.models.encoders import Cnn, Encoder, encoders
from oneround.training.objective import CrossEntropy, terms

@terms.register("mine")
class Mine(CrossEntropy): pass

class MyNet(Encoder): pass

@encoders.register("my-cnn")
class MyCnn(Cnn):
    def build(self, channels):
        net = super().build(channels)
        net.__class__ = type("Other", (type(net),), {})
        return net
"""


def test_plug_ins_are_written_for_one_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Dataset) -> None:
    (tmp_path / "my_batched_parts.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin("my_batched_parts")
    term = acts.resolve(small_recipe(objective__terms={"mine": {}}), digits)
    assert not_batchable(term, 1) == "objective.terms.mine is a plug-in's, written for one client"
    encoder = acts.resolve(small_recipe(model__encoder="my-cnn"), digits)
    assert "model.encoder = my-cnn may mix channels" in str(not_batchable(encoder, 1))


def test_slots_are_parts_of_the_step_at_fixed_addresses(digits: Dataset) -> None:
    trainer, broadcast, site = Trainer(), prepared(digits, "v10"), Site("a", digits.train.take(torch.arange(9)))
    stepper = trainer.bind_batched(broadcast, site, 3, 18)
    assert trainer.bind_batched(broadcast, site, 3, 18) is stepper
    for slot in stepper.slots:
        for name, value in broadcast.weights.items():
            assert torch.equal(slot.net.state_dict()[name], value), name
    second, third = stepper.slots[1:]
    assert second.aligner is not None and third.aligner is not None and stepper.aligner is not None
    second.begin_client(torch.tensor([9, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    third.begin_client(torch.ones(10))
    assert stepper.aligner.entropy[1:].tolist() == pytest.approx([0, 1])
    second.net.prototypes.data.fill_(7)
    assert (stepper.net.prototypes[1] == 7).all() and not (stepper.net.prototypes[2] == 7).any()
    second.restart({name: torch.full_like(value, 2) for name, value in second.momentum.items()})
    assert all((value[1] == 2).all() and not value[2].any() for value in stepper.momentum.values())
    assert trainer.bind_batched(broadcast, site, 2, 18) is not stepper


def test_kept_clients_get_back_what_they_were(digits: Dataset) -> None:
    broadcast = prepared(digits, "fafi+queue", training__batch_size=8, training__momentum=0.9)
    sites = {slot: Site(f"c{slot}", digits.train.take(torch.arange(8) + 8 * slot)) for slot in range(3)}
    group_of_three = Group(broadcast, sites, 3)
    stepper: BatchedStepper = group_of_three.stepper
    plan, _ = group_of_three._draw(group_of_three.learners)
    stepper.begin_epoch(5, 1.0)
    before = {name: value.clone() for name, value in stepper.learned.items()}
    stepper.keep([0, 2])
    images = group_of_three.images
    for index, numbers in plan:
        stepper(images.pixels[index], images.labels[index], numbers, 0.05)
    stepper.give_back()
    for name, value in stepper.learned.items():
        assert torch.equal(value[[0, 2]], before[name][[0, 2]]), name
    assert not torch.equal(stepper.learned["net.prototypes"][1], before["net.prototypes"][1])
    assert stepper.learned["queue.labels"][1].max() >= 0


class Operations(TorchDispatchMode):
    """Counts operations, and those for which a GPU has to be waited for, which no recording allows."""

    WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.waits += str(func).startswith(self.WAITING)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("preset", "limit"), [("fafi", 550), ("v10", 650), ("fafi+queue", 570), ("fafi+hard", 620)])
def test_a_step_of_many_clients_is_as_many_operations_as_of_few_and_waits_for_nothing(
    preset: str, limit: int, digits: Dataset
) -> None:
    counts = {}
    for clients in (2, 8):
        broadcast = prepared(digits, preset, training__batch_size=16)
        sites = {slot: Site(f"c{slot}", digits.train.take(torch.arange(16) + 16 * slot)) for slot in range(clients)}
        several = Group(broadcast, sites, clients)
        (batch,), _ = several._draw(several.learners)
        several.stepper.begin_epoch(0, 1.0)
        with Operations() as operations:
            several.stepper(several.images.pixels[batch[0]], several.images.labels[batch[0]], batch[1], 0.05)
        counts[clients] = operations.count
        assert operations.waits == 0
    assert counts[2] == counts[8] <= limit
