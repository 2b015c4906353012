"""Many tensors copied at once are each what `clone` and `copy_` make of it."""

from __future__ import annotations

import torch

from oneround.training.copies import copies, fetched_later, overwrite

TENSORS = {
    "floats": torch.rand(3, 4),
    "channels last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "a count": torch.tensor(7),
    "half": torch.rand(5).half(),
    "parameter": torch.nn.Parameter(torch.rand(2)),
    "empty": torch.zeros(0),
}


def test_copies_are_equal_of_the_same_layout_and_apart() -> None:
    made = copies(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(made[name], tensor) and made[name].stride() == tensor.stride()
        assert made[name].dtype == tensor.dtype and not made[name].requires_grad
        assert tensor.numel() == 0 or made[name].data_ptr() != tensor.data_ptr()


def test_values_are_copied_in_place_and_converted() -> None:
    live = {name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in TENSORS.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    overwrite(live, {**TENSORS, "half": TENSORS["half"].double(), "another": torch.ones(1)})
    assert all(torch.equal(live[name], tensor) for name, tensor in TENSORS.items())
    assert addresses == {name: tensor.data_ptr() for name, tensor in live.items()}


def test_what_is_fetched_later_is_what_it_was() -> None:
    live = copies(TENSORS)
    later = fetched_later(live)
    overwrite(live, {name: torch.zeros_like(tensor) for name, tensor in live.items()})
    assert all(torch.equal(value, TENSORS[name]) for name, value in later().items())
