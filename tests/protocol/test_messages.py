"""Messages come back as they went; whatever is wrong with a file is said, with its name."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oneround import acts
from oneround.errors import ProtocolError
from oneround.protocol import Broadcast, Upload, UploadFolder, blob
from oneround.recipe import Recipe

Federation = tuple[Recipe, Broadcast, list[Upload]]


def test_a_broadcast_comes_back_equal(federation: Federation, tmp_path: Path) -> None:
    _, broadcast, _ = federation
    broadcast.write(tmp_path / "b.safetensors")
    again = Broadcast.read(tmp_path / "b.safetensors")
    assert (again.recipe, again.class_names, again.shape) == (broadcast.recipe, broadcast.class_names, broadcast.shape)
    assert again.digest == broadcast.digest
    assert blob.checksum(again.weights) == blob.checksum(broadcast.weights)
    assert Broadcast.unpack(broadcast.pack()).pack() == broadcast.pack()


def test_an_upload_comes_back_equal(federation: Federation, tmp_path: Path) -> None:
    _, broadcast, uploads = federation
    asked = acts.statistics_of(broadcast)
    for upload in uploads:
        upload.write(tmp_path / f"{upload.client}.safetensors")
        again = Upload.read(tmp_path / f"{upload.client}.safetensors", broadcast, asked)
        assert again.content == upload.content
        assert again.history == upload.history
        assert again.samples == upload.samples
    folder = UploadFolder(sorted(tmp_path.glob("*")), broadcast, asked)
    assert [upload.client for upload in folder] == [upload.client for upload in uploads]
    assert folder[1].content == uploads[1].content and len(folder[1:]) == 2


def test_many_bytes_are_hashed_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(number): torch.arange(number * 1000) for number in range(5)}
    few = blob.checksum(tensors)
    monkeypatch.setattr(blob, "MANY", 0)  # side by side, as if there were megabytes
    assert blob.checksum(tensors) == few


def test_content_is_what_was_learned_not_when(federation: Federation) -> None:
    upload = federation[2][0]
    assert replace(upload, history=[]).content == upload.content
    changed = {**upload.weights, "prototypes": upload.weights["prototypes"] + 1e-6}
    assert replace(upload, weights=changed).content != upload.content
    assert replace(upload, epoch=1).content != upload.content


def test_reading_needs_no_pickle_and_no_history(federation: Federation) -> None:
    raw = federation[2][0].pack()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["oneround"])
    assert {"format", "kind", "shapes", "sha256", "recipe_digest"} <= manifest.keys()
    assert manifest["format"] == blob.FORMAT and manifest["kind"] == "upload"


def refuse(federation: Federation, raw: bytes, words: str) -> None:
    _, broadcast, _ = federation
    with pytest.raises(ProtocolError, match=words) as caught:
        Upload.unpack(raw, broadcast, acts.statistics_of(broadcast), "from-site-7")
    assert str(caught.value).startswith("from-site-7: refused")
    assert "\n" not in str(caught.value)


def altered(upload: Upload, **changes: Any) -> bytes:
    return replace(upload, **changes).pack()


def test_what_is_refused_and_why(federation: Federation) -> None:
    upload = federation[2][0]
    prototypes = upload.weights["prototypes"]
    weights = upload.weights
    refuse(federation, altered(upload, recipe_digest="0" * 64), "answers another recipe")
    refuse(
        federation,
        altered(upload, weights={**weights, "prototypes": prototypes * torch.nan}),
        "prototypes holds values that are not finite",
    )
    refuse(
        federation,
        altered(upload, weights={**weights, "prototypes": prototypes[:-1].clone()}),
        r"prototypes is torch.float32 \(9, 16\), expected torch.float32 \(10, 16\)",
    )
    refuse(federation, altered(upload, weights={**weights, "prototypes": prototypes.double()}), "float64")
    refuse(federation, altered(upload, weights={**weights, "more": prototypes.clone()}), "more is not asked for")
    refuse(
        federation,
        altered(upload, weights={k: v for k, v in weights.items() if k != "prototypes"}),
        "prototypes is missing",
    )
    refuse(federation, altered(upload, statistics={}), "statistics.* is missing")
    refuse(federation, altered(upload, class_counts=torch.zeros(10, dtype=torch.int64)), "at least one above 0")
    refuse(federation, altered(upload, class_counts=torch.ones(9, dtype=torch.int64)), "must be 10 counts")
    refuse(federation, altered(upload, class_counts=torch.tensor([-1] + [1] * 9)), "must be 10 counts")
    refuse(federation, altered(upload, epoch=3), "epoch 3; expected a name and 0 to 2")
    refuse(federation, federation[1].pack(), "of the kind broadcast, expected upload")
    refuse(federation, safetensors.torch.save(weights), "not written by oneround")
    refuse(federation, pickle.dumps(weights["prototypes"].tolist()), "a pickle or zip file")
    refuse(federation, b"PK\x03\x04" + bytes(100), "a pickle or zip file")
    refuse(federation, b"", "too short")
    refuse(federation, b"hello, this is no model", "truncated or foreign")
    refuse(federation, upload.pack() + bytes(40_000_000), "more than the")


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
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(federation: Federation, place: float, flip: int) -> None:
    """One changed byte is refused, or it changed nothing that counts (a space in the header, a figure in the history)."""
    _, broadcast, (upload, *_) = federation
    raw = bytearray(upload.pack())
    raw[int(place * len(raw))] ^= flip
    try:
        again = Upload.unpack(bytes(raw), broadcast, acts.statistics_of(broadcast))
    except ProtocolError:
        return
    assert blob.checksum(again.weights) == blob.checksum(upload.weights)
    assert blob.checksum(again.statistics) == blob.checksum(upload.statistics)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    blob.write_durably(path, b"first")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        blob.write_durably(path, b"second")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        blob.write_durably(tmp_path / "wanted", b"content")
    assert caught.value.filename == str(tmp_path / "wanted")


def test_a_copy_under_another_name_is_refused(federation: Federation, tmp_path: Path) -> None:
    _, broadcast, uploads = federation
    for upload in uploads:
        upload.write(tmp_path / f"{upload.client}.safetensors")
    uploads[0].write(tmp_path / "late.safetensors")
    folder = UploadFolder(sorted(tmp_path.glob("*")), broadcast, acts.statistics_of(broadcast))
    with pytest.raises(
        ProtocolError, match=r"late\.safetensors: refused, it is the upload of client_0; give it that name"
    ):
        list(folder)
    with pytest.raises(ProtocolError, match=r"late\.safetensors: refused"):
        folder[3]


def test_a_damaged_upload_is_at_no_epoch(federation: Federation, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    federation[2][0].write(path)
    assert Upload.epoch_of(path) == 2
    raw = path.read_bytes()
    for damaged in (raw[:-1], bytes([*raw[:-1], raw[-1] ^ 1])):
        path.write_bytes(damaged)
        assert Upload.epoch_of(path) is None and not blob.is_whole(path, "upload")


def test_a_broadcast_with_a_damaged_manifest_is_refused(federation: Federation) -> None:
    raw = federation[1].pack()
    with pytest.raises(ProtocolError, match=r"sent: refused, damaged manifest"):
        Broadcast.unpack(raw.replace(b"class_names", b"class_nomes"), "sent")


def test_an_unreadable_file_is_named(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=r"nowhere\.safetensors: cannot be read"):
        Upload.read(tmp_path / "nowhere.safetensors", federation[1], {})
    assert Upload.epoch_of(tmp_path / "nowhere.safetensors") is None
