"""One file format, and damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oneround import acts
from oneround.errors import ProtocolError
from oneround.protocol import Upload, blob
from tampering import Federation, framed, refuse


def test_many_bytes_are_hashed_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(number): torch.arange(number * 1000) for number in range(5)}
    few = blob.checksum(tensors)
    monkeypatch.setattr(blob, "THREADED_BYTES", 0)  # side by side, as if there were megabytes
    assert blob.checksum(tensors) == few


def test_reading_needs_no_pickle_and_no_history(federation: Federation) -> None:
    raw = federation[2][0].pack()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["oneround"])
    assert {"format", "kind", "shapes", "sha256", "recipe_digest"} <= manifest.keys()
    assert manifest["format"] == blob.FORMAT and manifest["kind"] == "upload"


def test_a_newer_format_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(blob, "FORMAT", 99)
        raw = federation[2][0].pack()
    refuse(federation, raw, f"format 99; this version reads format {blob.FORMAT}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.9999))
def test_a_truncated_file_is_refused_wherever_it_ends(federation: Federation, share: float) -> None:
    raw = federation[2][0].pack()
    refuse(federation, raw[: int(share * len(raw))], "refused")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(federation: Federation, position: float, flip: int) -> None:
    """One changed byte is refused, or it changed nothing that counts (a space in the header, a figure in the history)."""
    _, broadcast, (upload, *_) = federation
    raw = bytearray(upload.pack())
    raw[int(position * len(raw))] ^= flip
    try:
        again = Upload.unpack(bytes(raw), broadcast, acts.statistics_of(broadcast))
    except ProtocolError:
        return
    assert blob.checksum(again.weights) == blob.checksum(upload.weights)
    assert blob.checksum(again.statistics) == blob.checksum(upload.statistics)


def test_json_that_is_nested_too_deep_is_refused(federation: Federation) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    raw = federation[2][0].pack()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    refuse(federation, framed(deep.encode(), b""), "its header is nested too deep")
    header["__metadata__"]["oneround"] = deep
    refuse(federation, framed(json.dumps(header).encode(), raw[8 + length :]), "damaged manifest")


def test_the_bytes_are_those_of_the_library() -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        f'{dtype} ü "{number}"': (100 * torch.rand(shape, generator=random)).to(dtype)
        for dtype in blob.TYPES
        for number, shape in enumerate([(3, 5), (), (0, 4), (7,)])
    }
    tensors["not contiguous"] = torch.rand(4, 6, 2, 2, generator=random).contiguous(memory_format=torch.channels_last)
    raw = blob.pack("state", tensors, {"client": "ä", "epoch": 3})
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert raw == safetensors.torch.save(contiguous, metadata=header["__metadata__"])
    assert all(torch.equal(value, tensors[name]) for name, value in safetensors.torch.load(raw).items())


def test_a_message_is_written_without_a_copy_of_its_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    _, (_, content) = blob.pieces("state", {"a": tensor}, {})
    tensor[0] = 9
    assert np.frombuffer(content, np.float32)[0] == 9
    blob.write(
        tmp_path / "file", "state", {"a": tensor}, {"client": "a", "recipe_digest": "0", "epoch": 1, "history": []}
    )
    assert torch.equal(blob.read(tmp_path / "file", "state")[1]["a"], tensor)


def test_a_file_that_was_written_here_is_not_checked_again_and_one_that_came_later_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = tmp_path / "file", {"weights.a": torch.arange(3.0), "sums.b": torch.ones(2)}
    checked: list[str] = []
    unpack = blob._unpack
    monkeypatch.setattr(blob, "_unpack", lambda raw, where, *rest: checked.append(where) or unpack(raw, where, *rest))
    blob.write(path, "shard", tensors, {}, read_soon=True)
    again = blob.read(path, "shard")[1]
    assert not checked and all(torch.equal(again[name], tensors[name]) for name in tensors)
    later = tmp_path / "later"
    blob.write(later, "shard", {**tensors, "weights.a": torch.zeros(3)}, {})
    sums, weights = (blob.read_parts(path, "shard")[2][part] for part in ("sums", "weights"))
    later.replace(path)
    assert torch.equal(again["weights.a"], tensors["weights.a"]), "what was read stays as it was"
    assert torch.equal(blob.read(path, "shard")[1]["weights.a"], torch.zeros(3))
    assert checked == [str(path)]
    assert blob.read_parts(path, "shard")[2]["sums"] == sums
    assert blob.read_parts(path, "shard")[2]["weights"] != weights
    assert len(checked) == 1, "known by now"


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_by_whom_they_were_written(tmp_path: Path, kind: torch.dtype) -> None:
    largest = torch.full((10,), torch.finfo(kind).max, dtype=kind)
    blob.write(tmp_path / "large", "shard", {"a": largest}, {}, read_soon=True)
    assert torch.equal(blob.read(tmp_path / "large", "shard")[1]["a"], largest)
    for value in (float("inf"), float("-inf"), float("nan")):
        blob.write(tmp_path / "file", "shard", {"a": torch.tensor([1.0, value], dtype=kind)}, {}, read_soon=True)
        with pytest.raises(ProtocolError, match="a holds values that are not finite"):
            blob.read(tmp_path / "file", "shard")


def test_a_file_that_is_moved_is_as_known_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, target, tensors = tmp_path / "ahead", tmp_path / "target", {"weights.a": torch.arange(3.0)}
    blob.write(target, "shard", {"weights.a": torch.zeros(3)}, {}, read_soon=True)
    blob.write(ahead, "shard", tensors, {}, read_soon=True)
    blob.move(ahead, target, "shard")
    with monkeypatch.context() as patch:
        patch.setattr(blob, "_unpack", None)  # it need not be checked
        assert torch.equal(blob.read(target, "shard")[1]["weights.a"], tensors["weights.a"])
    blob.write(ahead, "shard", tensors, {}, read_soon=True)
    raw = bytearray(ahead.read_bytes())
    raw[-1] ^= 1
    ahead.write_bytes(raw)
    blob.move(ahead, target, "shard")
    with pytest.raises(ProtocolError, match="does not match its checksum"):
        blob.read(target, "shard")
