"""Smaller uploads: what they cost in bytes and in precision, and that nobody downstream notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import ProtocolError
from oneround.protocol import Upload, blob
from oneround.protocol.encoding import as_received, bytes_of, decode, encode, encoded_layout, layout_of
from oneround.site import Site


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=4), exponent=st.integers(-30, 30), seed=st.integers(0, 2**31)
)
def test_int8_is_as_near_as_a_byte_can_be_and_stays_put(shape: list[int], exponent: int, seed: int) -> None:
    """Within half a step of each channel's own scale; and what was decoded encodes to the same bytes."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    tensor[0] *= 0
    sent = encode({"w": tensor}, "int8")
    again = decode(sent, "int8")["w"]
    step = tensor.abs().flatten(1).amax(1).reshape(-1, *[1] * (tensor.dim() - 1)) / 127
    assert (again - tensor).abs().le(0.501 * step).all()
    assert blob.checksum(encode({"w": again}, "int8")) == blob.checksum(sent)
    assert encoded_layout(layout_of({"w": tensor}), "int8") == layout_of(sent)


def test_small_tensors_and_counters_are_left_alone() -> None:
    tensors = {
        "bias": torch.tensor([1e-9, 1e9]),
        "counter": torch.tensor(7),
        "grid": torch.zeros(2, 3, dtype=torch.int64),
    }
    assert blob.checksum(encode(tensors, "int8")) == blob.checksum(tensors)


def test_half_precision_that_would_overflow_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"upload.encoding = fp16: w holds 7e\+04, more than the 65,504 of fp16"):
        encode({"w": torch.tensor([7e4])}, "fp16")


@pytest.mark.parametrize(("encoding", "most"), [("fp16", 0.51), ("int8", 0.27)])
@pytest.mark.parametrize("encoder", ["cnn", "resnet18", "mobilenet-v2"])
def test_bytes_of_an_upload(encoding: str, most: float, encoder: str) -> None:
    plain, small = (
        acts.traffic(load("fafi", [("model.encoder", encoder), ("upload.encoding", word)]), 10, (3, 32, 32), 0).up
        for word in ("fp32", encoding)
    )
    assert small / plain <= most


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
def test_an_encoded_upload_comes_back_as_the_site_saw_it(digits: Dataset, encoding: str) -> None:
    recipe = acts.resolve(small_recipe(upload__encoding=encoding), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    upload = acts.train(broadcast, Site("a", digits.train.take(torch.arange(64))))
    asked = acts.statistics_of(broadcast)
    again = Upload.unpack(upload.pack(), broadcast, asked)
    assert again.content == upload.content
    assert blob.checksum(again.weights) == blob.checksum(upload.weights)
    assert all(value.dtype != torch.float16 for value in again.weights.values())
    _, sent = blob.unpack(upload.pack(), "upload", "upload")
    up = acts.traffic(recipe, 10, (1, 8, 8), 0).up
    assert bytes_of(layout_of(sent)) == up < bytes_of(layout_of(broadcast.weights))
    plain = replace(upload, encoding="fp32")
    with pytest.raises(ProtocolError, match=r"refused, (statistics\S+ is torch\.float32|tensor scale\.\S+ is missing)"):
        Upload.unpack(plain.pack(), broadcast, asked)
    assert bytes_of(layout_of(as_received(upload.weights, encoding))) == bytes_of(layout_of(broadcast.weights))


def test_a_scale_that_overflows_is_refused(digits: Dataset) -> None:
    recipe = acts.resolve(small_recipe(upload__encoding="int8", fusion=["iffi"]), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    upload = acts.train(broadcast, Site("a", digits.train.take(torch.arange(64))))
    tensors = encode({f"weights.{name}": value for name, value in upload.weights.items()}, "int8")
    tensors["scale.weights.prototypes"] = torch.full_like(tensors["scale.weights.prototypes"], 3e38)
    manifest = {"client": "a", "recipe_digest": broadcast.digest, "epoch": 1, "class_counts": [1] * 10, "history": []}
    with pytest.raises(ProtocolError, match="not finite once decoded"):
        Upload.unpack(blob.pack("upload", tensors, manifest), broadcast, {})
