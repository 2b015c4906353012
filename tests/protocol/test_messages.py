"""Messages come back as they went; a message that is wrong is refused with its name and the reason."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from oneround import acts
from oneround.errors import ProtocolError
from oneround.protocol import Broadcast, Upload, UploadFolder, blob
from oneround.protocol.messages import check_norms
from tampering import Federation, altered, refuse


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


def test_content_is_what_was_learned_not_when(federation: Federation) -> None:
    upload = federation[2][0]
    assert replace(upload, history=[]).content == upload.content
    changed = {**upload.weights, "prototypes": upload.weights["prototypes"] + 1e-6}
    assert replace(upload, weights=changed).content != upload.content
    assert replace(upload, epoch=1).content != upload.content


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
    refuse(federation, altered(upload, epoch=3), "client_0 at epoch 3; expected 0 to 2")
    refuse(federation, federation[1].pack(), "of the kind broadcast, expected upload")
    refuse(federation, safetensors.torch.save(weights), "not written by oneround")
    refuse(federation, pickle.dumps(weights["prototypes"].tolist()), "a pickle or zip file")
    refuse(federation, b"PK\x03\x04" + bytes(100), "a pickle or zip file")
    refuse(federation, b"", "too short")
    refuse(federation, b"hello, this is no model", "truncated or foreign")
    refuse(federation, upload.pack() + bytes(40_000_000), "more than the")


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


def test_norms_are_bounded_by_the_broadcast(federation: tuple[object, object, list[Upload]]) -> None:
    _, broadcast, uploads = federation
    for upload in uploads:
        check_norms(upload, broadcast, "honest")
    upload = uploads[0]
    for name, start in broadcast.weights.items():
        if not start.is_floating_point():
            continue
        huge = torch.full_like(start, 11.0 * max(1.0, float(start.abs().max())))
        huge = huge**2 if name.endswith("running_var") else huge
        with pytest.raises(ProtocolError, match=rf"liar: refused, {name} has norm .* \(upload.largest_norm = 10\)"):
            check_norms(replace(upload, weights={**upload.weights, name: huge}), broadcast, "liar")
