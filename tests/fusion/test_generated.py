"""Generated images: how many of which class by whom, the same again, kept where the server keeps things."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generating import sent
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.fusion.generated import Generated, generated_images
from oneround.protocol import Broadcast, Upload
from oneround.site import Site

FEW = Generated(count=40, steps=2, fewest=1)


@pytest.fixture(scope="module")
def trained(digits: Dataset) -> tuple[Broadcast, list[Upload]]:
    """Two clients whose generators have learned next to nothing."""
    broadcast = sent(digits, objective={"terms": {}}, fusion=["student"], generator__epochs=1)
    sites = [Site(name, digits.train.take(torch.arange(60) + start)) for name, start in (("a", 0), ("b", 60))]
    return broadcast, [acts.train(broadcast, site) for site in sites]


def test_images_follow_the_clients_classes_and_leave_out_rare_ones() -> None:
    counts = torch.tensor([[100, 19, 0], [20, 80, 200]])
    shares = Generated(count=1000, fewest=20).shares(counts)
    assert shares.tolist() == [[250, 0, 0], [50, 200, 500]]
    with pytest.raises(RunError, match=r"no client has 300 images of a class \(most: 200\)"):
        Generated(fewest=300).shares(counts)


def test_they_repeat_and_each_client_s_are_its_own(trained: tuple[Broadcast, list[Upload]]) -> None:
    broadcast, uploads = trained
    (both, key), (same, same_key) = (
        generated_images(uploads, broadcast, Site("server"), FEW, lambda text, done, total: None) for _ in range(2)
    )
    assert torch.equal(both.pixels, same.pixels) and key == same_key and both.pixels.dtype == torch.uint8
    shares = FEW.shares(torch.stack([upload.class_counts for upload in uploads]))
    assert torch.equal(both.class_counts(10), shares.sum(0))
    swapped, other_key = generated_images(uploads[::-1], broadcast, Site("server"), FEW, lambda text, done, total: None)
    first = int(shares[0].sum())
    assert torch.equal(swapped.pixels, torch.cat([both.pixels[first:], both.pixels[:first]])) and other_key != key
    assert not torch.equal(both.pixels[:4], both.pixels[first : first + 4])


def test_a_file_is_used_again_only_for_the_same_upload(
    trained: tuple[Broadcast, list[Upload]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast, uploads = trained
    server, texts = Site("server", folder=tmp_path), list[str]()

    def made(some: list[Upload], options: Generated = FEW) -> torch.Tensor:
        texts.clear()
        images, _ = generated_images(some, broadcast, server, options, lambda text, done, total: texts.append(text))
        return images.pixels

    first = made(uploads)
    assert texts == ["images of a", "images of b"]
    assert torch.equal(made(uploads), first) and texts == []
    changed = replace(uploads[1], generator={name: value + 0.1 for name, value in uploads[1].generator.items()})
    assert not torch.equal(made([uploads[0], changed]), first) and texts == ["images of b"]
    path = next(tmp_path.glob("server/*/a.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    assert torch.equal(made(uploads), first) and texts == ["images of a", "images of b"]
    assert not torch.equal(made(uploads, Generated(count=40, steps=3, fewest=1)), first) and len(texts) == 2
