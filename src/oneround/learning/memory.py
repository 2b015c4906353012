"""Which batch size would have fitted: asked when a GPU has run out of memory."""

from __future__ import annotations

import torch

from oneround.models import PrototypeNet
from oneround.protocol import Broadcast
from oneround.site import Site


def largest_batch(net: PrototypeNet, broadcast: Broadcast, site: Site) -> int:
    """Measure a step's memory at two small batches and extend the line to what the device has; a little is kept free."""
    device = site.device
    small, large = (_peak(net, samples, broadcast.shape, device, site.bf16) for samples in (4, 8))
    per_sample = max((large - small) / 4, 1)
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return fitting(room, small - 4 * per_sample, per_sample)


def fitting(room: float, fixed: float, per_sample: float) -> int:
    """The largest power of two, at most, of samples that fit into 90 % of the room."""
    samples = max(1, int((0.9 * room - fixed) / per_sample))
    return 1 << (samples.bit_length() - 1)


def _peak(net: PrototypeNet, samples: int, shape: tuple[int, int, int], device: torch.device, bf16: bool) -> float:
    """Bytes a step on that many samples (two views each) takes beyond what is allocated already."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    images = torch.zeros(2 * samples, *shape, device=device).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        net.encoder(images).float().sum().backward()
    net.zero_grad(set_to_none=True)
    return float(torch.cuda.max_memory_allocated(device) - before)
