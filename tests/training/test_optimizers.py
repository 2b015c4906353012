"""SGD, Adam and AdamW descend as those of `torch.optim` do, with a learning rate for each group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oneround.training.optimizers import SGD, Adam, AdamW


def parameters(seed: int = 0) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    one, two, three = (nn.Parameter(torch.randn(4, 3, generator=random)) for _ in range(3))
    return one, two, three


def backward(one: nn.Parameter, two: nn.Parameter, other: nn.Parameter) -> None:
    ((one * two).sin().sum() + one.square().sum() + (other - 1).square().sum()).backward()


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_pytorch(momentum: float, nesterov: bool, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    rates = torch.tensor(0.05), torch.tensor(0.5)
    optimizer = SGD(momentum, nesterov=nesterov)
    optimizer.add(ours[:2], rates[0], weight_decay)
    optimizer.add(ours[2:], rates[1])
    groups = [{"params": theirs[:2], "lr": 0.05, "weight_decay": weight_decay}, {"params": theirs[2:], "lr": 0.5}]
    reference = torch.optim.SGD(groups, lr=0.05, momentum=momentum, nesterov=nesterov)
    for step in range(5):
        rates[0].fill_(0.05 / (step + 1))  # a rate may change between steps
        reference.param_groups[0]["lr"] = 0.05 / (step + 1)
        for each in (optimizer, reference):
            each.zero_grad()
        backward(*ours)
        backward(*theirs)
        optimizer.step()
        reference.step()
        assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(ours, theirs, strict=True))


def test_a_parameter_without_a_gradient_stays() -> None:
    one, two, _ = parameters()
    before = two.detach().clone()
    optimizer = SGD(0.9)
    optimizer.add([one, two], torch.tensor(0.1), weight_decay=0.5)
    one.square().sum().backward()
    optimizer.step()
    assert torch.equal(two, before) and not optimizer.buffers[two].any() and optimizer.buffers[one].any()
    optimizer.zero_grad()
    assert one.grad is None and two.grad is None


def test_momentum_stays_at_its_address_and_without_momentum_nothing_is_kept() -> None:
    one, two, other = parameters()
    optimizer = SGD(0.9)
    optimizer.add([one, two], torch.tensor(0.1))
    addresses = {parameter: buffer.data_ptr() for parameter, buffer in optimizer.buffers.items()}
    backward(one, two, other)
    optimizer.step()
    assert {parameter: buffer.data_ptr() for parameter, buffer in optimizer.buffers.items()} == addresses
    plain = SGD(0.0)
    plain.add([one], torch.tensor(0.1))
    assert plain.buffers == {}


@pytest.mark.parametrize(
    ("kind", "theirs_kind", "beta2"), [(Adam, torch.optim.Adam, 0.999), (AdamW, torch.optim.AdamW, 0.95)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_of_adam_are_those_of_pytorch(
    kind: type[Adam], theirs_kind: type[torch.optim.Adam], beta2: float, weight_decay: float
) -> None:
    ours, theirs = parameters(), parameters()
    rates = torch.tensor(0.05), torch.tensor(0.5)
    optimizer = kind(0.8, beta2)
    optimizer.add(ours[:2], rates[0], weight_decay)
    optimizer.add(ours[2:], rates[1])
    groups = [
        {"params": theirs[:2], "lr": 0.05, "weight_decay": weight_decay},
        {"params": theirs[2:], "lr": 0.5, "weight_decay": 0.0},
    ]
    reference = theirs_kind(groups, lr=0.05, betas=(0.8, beta2))
    addresses = [tensor.data_ptr() for buffers in optimizer.state.values() for tensor in buffers.values()]
    for _ in range(5):
        for each in (optimizer, reference):
            each.zero_grad()
        backward(*ours)
        backward(*theirs)
        optimizer.step()
        reference.step()
        assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(ours, theirs, strict=True))
    assert [tensor.data_ptr() for buffers in optimizer.state.values() for tensor in buffers.values()] == addresses
