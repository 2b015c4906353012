"""Where the fused kernels apply, and what is computed elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oneround.models.norm import _fits, batch_statistics, has_batch_norm, normalise


def test_where_kernels_apply() -> None:
    norm = nn.BatchNorm2d(32).train()
    good = torch.zeros(2, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    assert _fits(norm, good)
    assert not _fits(norm, torch.zeros(2, 32, 4, 4))
    assert not _fits(norm.eval(), good)
    assert not _fits(nn.GroupNorm(4, 32), good)
    assert not _fits(nn.BatchNorm2d(12), torch.zeros(2, 12, 4, 4).contiguous(memory_format=torch.channels_last))


def test_without_a_gpu_it_is_plain_pytorch() -> None:
    torch.manual_seed(0)
    norm, x, r = nn.BatchNorm2d(8), torch.randn(3, 8, 4, 4), torch.randn(3, 8, 4, 4)
    again = nn.BatchNorm2d(8)
    assert torch.equal(normalise(norm, x, r), torch.relu(again(x) + r))
    assert torch.equal(normalise(norm, x, then=None), again(x))
    for each in (norm, again):
        nn.init.constant_(each.weight, 9.0)  # so that a part is cut at six
    assert torch.equal(normalise(norm, x, then="relu6"), again(x).clamp(0, 6))
    assert float(normalise(norm, x).max()) == float(again(x).max()) > 6
    assert torch.equal(norm.running_mean, again.running_mean)


def test_batch_statistics_are_the_batch_s_and_leave_the_running_ones_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    nn.init.uniform_(net[1].running_mean)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(16, 3, 6, 6)
    y = net[0](x)
    expected = (y - y.mean((0, 2, 3), keepdim=True)) / (y.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    with batch_statistics(net):
        torch.testing.assert_close(net(x), expected)
    assert not torch.allclose(net(x), expected)
    with pytest.raises(ZeroDivisionError), batch_statistics(net):
        net(x)
        raise ZeroDivisionError
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert has_batch_norm(net) and not has_batch_norm(nn.GroupNorm(2, 8))
