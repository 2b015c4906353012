"""The fused kernels, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from oneround.models.norm import _fits, normalise


def test_kernels_compute_batch_norm_shortcut_and_relu() -> None:
    script = Path(__file__).parent / "fused_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert len(table) == 72
    for case, errors in table.items():
        limit = 6e-3 if "bfloat16" in case else 2e-4
        for name, error in errors.items():
            assert error < limit, (case, name, error)


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
