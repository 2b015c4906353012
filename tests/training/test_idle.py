"""States of idle clients: kept where they are, written from time to time, whole on disk when it matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clients import prepared, some
from oneround import acts
from oneround.data import Dataset
from oneround.protocol import blob
from oneround.site import Site
from oneround.training import Trainer
from oneround.training.idle import IdleStates


def tensors(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((100,), value), "b": torch.tensor(3)}


def epoch_on_disk(path: Path) -> int:
    manifest, _ = blob.read(path, "state")
    return int(manifest["epoch"])


def manifest(epoch: int) -> dict[str, Any]:
    return {"client": "a", "recipe_digest": "0", "epoch": epoch, "history": []}


def test_a_state_is_a_copy_and_its_file_is_written_when_the_last_is_old(tmp_path: Path) -> None:
    idle, path, live = IdleStates(10**6), tmp_path / "state", tensors(1)
    idle.keep(path, manifest(1), live, seconds=1000)
    live["a"].zero_()
    kept = idle.get(path)
    assert kept is not None and kept.manifest["epoch"] == 1
    assert torch.equal(kept.tensors["a"], tensors(1)["a"])
    assert not path.exists()
    idle.keep(path, manifest(2), tensors(2), seconds=0)
    idle.settle()
    assert epoch_on_disk(path) == 2
    idle.keep(path, manifest(3), tensors(3), seconds=1000)
    assert epoch_on_disk(path) == 2
    idle.close()
    assert epoch_on_disk(path) == 3 and idle.get(path) is None
    assert torch.equal(blob.read(path, "state")[1]["a"], tensors(3)["a"])


def test_where_there_is_no_room_the_oldest_are_on_disk_only(tmp_path: Path) -> None:
    idle = IdleStates(2 * 408)
    for number in range(4):
        idle.keep(tmp_path / str(number), manifest(number + 1), tensors(float(number)), seconds=1000)
    assert [idle.get(tmp_path / str(number)) is None for number in range(4)] == [True, True, False, False]
    assert [(tmp_path / str(number)).exists() for number in range(4)] == [True, True, False, False]
    assert epoch_on_disk(tmp_path / "1") == 2


def test_a_forgotten_state_is_not_written_later(tmp_path: Path) -> None:
    idle = IdleStates(10**6)
    idle.keep(tmp_path / "state", manifest(1), tensors(1), seconds=1000)
    idle.forget(tmp_path / "state")
    idle.close()
    assert not (tmp_path / "state").exists()


def test_a_state_that_cannot_be_written_is_an_error_at_the_latest_when_it_must_be_there(tmp_path: Path) -> None:
    idle = IdleStates(10**6)
    (tmp_path / "file").write_text("")
    idle.keep(tmp_path / "file" / "state", manifest(1), tensors(1), seconds=0)
    with pytest.raises(OSError):
        idle.settle()
    idle.close()


@pytest.mark.parametrize("preset", ["fafi", "etf-progressive", "fafi+queue"])
def test_clients_in_turn_end_as_if_each_were_trained_at_once(digits: Dataset, tmp_path: Path, preset: str) -> None:
    """By states kept, by states read from files, and through; momentum is carried over too."""
    broadcast = prepared(digits, preset, training__epochs=4, training__restart_optimizer=False)
    whole = acts.train(broadcast, some(digits, 150))
    idle = IdleStates(10**9)
    site = Site("site", digits.train.take(torch.arange(150)), tmp_path / "site")
    other = Site("other", digits.train.take(torch.arange(150, 300)), tmp_path / "other")
    trainer = Trainer(idle)
    for epoch in (1, 3):
        for each in (site, other):
            acts.train(broadcast, each, epoch, trainer=trainer)
        assert not (tmp_path / "site" / "state.safetensors").exists()
    ended = acts.train(broadcast, site, trainer=trainer)
    idle.close()
    assert ended.content == whole.content
    assert not (tmp_path / "site" / "state.safetensors").exists(), "nobody continues from it"
    assert (
        acts.train(broadcast, other, trainer=Trainer()).content
        == acts.train(broadcast, Site("other", other.data)).content
    ), "goes on from the file"
    assert (tmp_path / "other" / "state.safetensors").exists()
