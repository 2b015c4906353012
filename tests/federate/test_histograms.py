"""A split chosen before training in a federation: histograms are asked for, kept, checked, and give the simulation's uploads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from federation import NOW, SHARES, three
from inprocess import InProcess
from oneround import acts
from oneround.errors import ProtocolError, RunError
from oneround.federate.histograms import Histograms
from oneround.federate.intake import Ending
from oneround.federate.messages import HISTOGRAM, fields_of
from oneround.federate.server_app import serve
from oneround.fusion import rules
from oneround.fusion.split import SplitExperts
from oneround.protocol import Broadcast, Upload, UploadFolder
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.site import Site

DECLARED: dict[str, Any] = {"fusion": [{"kind": "split", "chosen": "declared"}, "iffi"]}


def averaged(folder: Path) -> tuple[SplitExperts, list[Upload], Broadcast]:
    broadcast = Broadcast.read(folder / "broadcast.safetensors")
    uploads = UploadFolder(sorted((folder / "uploads").glob("*.safetensors")), broadcast, acts.statistics_of(broadcast))
    rule = rules.parse({**DECLARED["fusion"][0], "restate": "none"})
    return SplitExperts(rule, uploads, broadcast, Site("server")), list(uploads), broadcast


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["each", "client"])
def test_a_federation_chooses_the_split_of_a_simulation_and_trains_the_same_uploads(
    chosen: str, tmp_path: Path
) -> None:
    recipe = three(share={"chosen": chosen}, training__epochs=2, **DECLARED)
    run(recipe, tmp_path / "simulated")
    grid = InProcess(SHARES)
    serve(grid, recipe, tmp_path / "federated", NOW)
    asked = [message for message in grid.sent if message.metadata.message_type == HISTOGRAM]
    assert len(asked) == (3 if chosen == "each" else 0)
    contents = []
    for name in ("simulated", "federated"):
        experts, uploads, broadcast = averaged(tmp_path / name)
        assert experts.shared == [int(upload.statistics["shared_blocks"]) for upload in uploads]
        assert list(broadcast.depths.values()) == (experts.shared if chosen == "each" else [])
        contents.append([upload.content for upload in uploads])
    assert contents[0] == contents[1]
    if chosen == "each":
        split = json.loads((tmp_path / "simulated" / "partition.json").read_text())["class_counts"]
        assert json.loads((tmp_path / "federated" / "histograms.json").read_text())["histograms"] == {
            f"client_{number:03d}": row for number, row in enumerate(split)
        }


def test_a_site_s_noisy_histogram_is_drawn_once(tmp_path: Path) -> None:
    recipe = three(share={}, training__epochs=1, reveal={"class_counts": {"epsilon": 0.1}}, **DECLARED)
    answers: list[str] = []

    class Asking(InProcess):
        def push_messages(self, messages: Any) -> Any:
            keys = list(super().push_messages(messages))
            answers.extend(
                fields_of(self.replies[key])["histogram"]
                for key in keys
                if key in self.replies and "histogram" in fields_of(self.replies[key])
            )
            return keys

    sites: dict[int, dict[str, Any]] = {}
    for k in range(3):
        file = tmp_path / f"site-{k}.yaml"
        file.write_text(f"name: client_{k:03d}\nshare: {k}\nfolder: {tmp_path / f'site-{k}'}\n")
        sites[10 + k] = {"site": str(file)}
    for folder in ("one", "two"):
        serve(Asking(sites), recipe, tmp_path / folder, NOW)
    assert len(answers) == 6 and answers[:3] == answers[3:], "noise drawn anew would say more"


@pytest.fixture
def histograms(tmp_path: Path) -> Histograms:
    return Histograms(RunFolder(tmp_path), 3, ["a", "b"], 2)


def test_histograms_are_kept_over_a_restart(histograms: Histograms, tmp_path: Path) -> None:
    histograms.take("b", "[1, 0, 4]", "node 1")
    again = Histograms(RunFolder(tmp_path), 3, ["a", "b"], 2)
    assert again.counts == {"b": [1, 0, 4]} and not again.complete
    ending = Ending("the deadline of 3 s passed", "start the server again")
    with pytest.raises(
        RunError, match="1 of 2 histograms when the deadline of 3 s passed; they are kept: start the server"
    ):
        again.whole(ending)
    again.take("a", "[0, 2, 0]", "node 2")
    whole: dict[str, Tensor] = again.whole(ending)
    assert {name: counts.tolist() for name, counts in whole.items()} == {"a": [0, 2, 0], "b": [1, 0, 4]}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a", "[1, 2]", "is no histogram of 3 classes"),
        ("a", "[1, 2, -1]", "is no histogram of 3 classes"),
        ("a", "[1, 2, 0.5]", "is no histogram of 3 classes"),
        ("a", "[0, 0, 0]", "is no histogram of 3 classes"),
        ("a", "no", "is no histogram of 3 classes"),
        ("c", "[1, 2, 3]", "c takes no part"),
        ("b", "[9, 2, 3]", "another histogram of b is here already"),
    ],
)
def test_what_is_no_histogram_is_refused(histograms: Histograms, name: str, text: str, reason: str) -> None:
    histograms.take("b", "[1, 2, 3]", "node 1")
    with pytest.raises(ProtocolError, match=reason):
        histograms.take(name, text, "node 2")
    assert histograms.counts == {"b": [1, 2, 3]}
