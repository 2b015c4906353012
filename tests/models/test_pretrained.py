"""Weights from a file are compared with the network they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from conftest import small_recipe
from oneround import acts
from oneround.config.load import change
from oneround.data import Dataset
from oneround.errors import ProtocolError
from oneround.models import encoders, initialise
from oneround.models.pretrained import load_weights


def test_initial_weights_from_a_file(digits: Dataset, tmp_path: Path) -> None:
    recipe = acts.resolve(small_recipe(seeds__initialisation=7), digits)
    saved = acts.prepare(recipe, digits.class_names, digits.shape).weights
    encoder = {name.removeprefix("encoder."): value for name, value in saved.items() if name.startswith("encoder.")}
    other = change(recipe, {"seeds.initialisation": 8, "local.initial_weights": str(tmp_path / "start.safetensors")})
    for content, full in ((saved, True), (encoder, False)):
        safetensors.torch.save_file(content, tmp_path / "start.safetensors")
        prepared = acts.prepare(other, digits.class_names, digits.shape).weights
        assert torch.equal(prepared["encoder.convolutions.1.weight"], saved["encoder.convolutions.1.weight"])
        assert torch.equal(prepared["prototypes"], saved["prototypes"]) == full
    wrong = {**encoder, "convolutions.1.weight": torch.zeros(2, 2)}
    for content, words in (
        (wrong, r"convolutions.1.weight is \(2, 2\)"),
        ({"a": torch.zeros(1)}, "encoder.a is not part"),
    ):
        safetensors.torch.save_file(content, tmp_path / "start.safetensors")
        with pytest.raises(ProtocolError, match=words):
            acts.prepare(other, digits.class_names, digits.shape)
    (tmp_path / "start.safetensors").write_bytes(b"junk")
    with pytest.raises(ProtocolError, match="not a readable safetensors file"):
        acts.prepare(other, digits.class_names, digits.shape)


def test_a_prefix_is_optional_and_values_must_be_finite(tmp_path: Path) -> None:
    part, path = encoders.parse({"kind": "cnn", "width": 4}), tmp_path / "encoder.safetensors"
    source = initialise(part, 1, 10, 5)
    encoder = {name: value.contiguous() for name, value in source.encoder.state_dict().items()}
    for prefix in ("", "encoder.", "weights.encoder."):
        safetensors.torch.save_file({f"{prefix}{name}": value for name, value in encoder.items()}, path)
        net = initialise(part, 1, 10, 6)
        before = net.prototypes.clone()
        load_weights(path, net, "initial_weights")
        assert all(torch.equal(net.encoder.state_dict()[name], value) for name, value in encoder.items())
        assert torch.equal(net.prototypes, before), "an encoder alone leaves the head"
    broken = {**encoder, "norms.0.weight": encoder["norms.0.weight"] * torch.nan}
    safetensors.torch.save_file(broken, path)
    with pytest.raises(ProtocolError, match=r"encoder.norms.0.weight holds values that are not finite"):
        load_weights(path, initialise(part, 1, 10, 6), "initial_weights")
    safetensors.torch.save_file(encoder, path)
    with pytest.raises(ProtocolError, match=r"local.teacher_weights = .*: tensor prototypes is missing"):
        load_weights(path, initialise(part, 1, 10, 6), "teacher_weights", whole=True)
