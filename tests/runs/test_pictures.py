"""Pictures of a run show its numbers."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from oneround.data import Dataset, partitions
from oneround.errors import OneroundError
from oneround.runs.pictures import draw_accuracy, draw_partition, picture_file


@pytest.fixture(autouse=True)
def text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "none")


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_curves(tmp_path: Path) -> None:
    long = "mergenet teacher.encoder=cnn width=16 teacher.epochs=4 adapter.width=8 adapter.heads=2 adapter.layers=1"
    draw_accuracy({long: [{1: 0.2, 2: 0.4}], "average": [{1: 0.3, 2: 0.5}]}, tmp_path / "a.png", "a run")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_line_per_rule_one_per_run_behind_it_and_the_reference(tmp_path: Path) -> None:
    runs = {"iffi": [{1: 0.2, 2: 0.4}, {1: 0.4, 2: 0.6}], "average": [{1: 0.3}]}
    draw_accuracy(runs, tmp_path / "a.svg", "title", {"all data": 0.9})
    drawn = (tmp_path / "a.svg").read_text()
    assert {"title", "iffi", "average", "all data", "test accuracy, %"} <= set(texts(tmp_path / "a.svg"))
    assert drawn.count("stroke-opacity: 0.4") == 2, "the two runs of iffi, thin"
    assert "stroke-dasharray" in drawn


def test_a_partition_shows_every_count_and_who_is_empty(digits: Dataset, tmp_path: Path) -> None:
    split = partitions.parse({"kind": "dirichlet", "alpha": 0.05, "clients": 5}).split(digits, 6)
    draw_partition(split, digits.class_names, tmp_path / "p.svg", "partition 6")
    written = texts(tmp_path / "p.svg")
    assert set(map(str, split.counts[np.nonzero(split.counts)].tolist())) <= set(written)
    names = [f"{number} ({size})" if size else f"{number} (empty)" for number, size in enumerate(split.sizes)]
    assert set(names) <= set(written) and any("empty" in name for name in names)


def test_a_partition_of_many_clients_has_shades_in_place_of_numbers(digits: Dataset, tmp_path: Path) -> None:
    split = partitions.parse({"kind": "dirichlet", "alpha": 0.3, "clients": 200}).split(digits, 1)
    draw_partition(split, digits.class_names, tmp_path / "p.svg", "many")
    written = texts(tmp_path / "p.svg")
    assert {f"client ({min(split.sizes):,} to {max(split.sizes):,} samples)", "samples (white: none)"} <= set(written)
    assert len(written) < 60 and "<image" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize(
    ("given", "file"),
    [("", "p.png"), ("a.svg", "a.svg"), ("a.PDF", "a.PDF"), ("new", "new.png"), ("v1.2/x", "v1.2/x.png")],
)
def test_where_a_picture_goes(given: str, file: str, tmp_path: Path) -> None:
    assert picture_file(tmp_path / given, "p.png") == tmp_path / file


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OneroundError, match=r"a\.gifx: no picture format 'gifx'; use one of .*png.*svg"):
        picture_file(tmp_path / "a.gifx", "p.png")


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"/file'"):
        draw_accuracy({"iffi": [{1: 0.5}]}, tmp_path / "file" / "a.png", "t")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OSError, match=r"/a\.png"):
        draw_accuracy({"iffi": [{1: 0.5}]}, tmp_path / "a.png", "t")


def test_an_interrupted_picture_is_not_there_and_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(figure: Figure, target: Path | io.BytesIO, **_: object) -> None:
        with target.open("wb") if isinstance(target, Path) else target as file:
            file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Figure, "savefig", interrupted)
        draw_accuracy({"iffi": [{1: 0.5}]}, tmp_path / "a.png", "t")
    assert list(tmp_path.iterdir()) == []
