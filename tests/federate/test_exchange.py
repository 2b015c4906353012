"""The exchange of messages, in one process: same uploads as a simulation, and what the server does when sites misbehave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode
from inprocess import InProcess

from commands import bad, good
from conftest import small_recipe
from oneround.data import Dataset
from oneround.errors import RecipeError, RunError
from oneround.federate.carrying import COUNTED, TRAIN, parcel, words_of
from oneround.federate.client import app as client_app
from oneround.federate.reception import Desk
from oneround.federate.server import Pace, serve
from oneround.reading import change, load
from oneround.recipe import Recipe
from oneround.runs import Result
from oneround.simulate import run as simulate

NOW = Pace(poll=0.01, patience=0.0, farewell=0.0)
SHARES: dict[int, dict[str, Any]] = {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)}


def three(**changes: Any) -> Recipe:
    return small_recipe(partition__clients=3, partition__alpha=0.3, local__workers=1, **changes)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def log_of(folder: Path) -> str:
    return (folder / "run.log").read_text()


def deadline_when(patch: pytest.MonkeyPatch, true: Callable[[Desk], bool]) -> None:
    """Let the recipe's deadline pass at a moment of the test's choice, however slow the machine is."""
    patch.setattr(Desk, "waited", property(lambda desk: 1e9 if true(desk) else 0.0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"upload__encoding": "int8"},
        {"upload__encoding": "fp16"},
        {"reveal__class_counts": False, "fusion": ["iffi", "average"]},
    ],
    ids=["plain", "int8", "fp16", "hidden"],
)
def test_the_same_uploads_and_scores_as_a_simulation(digits: Dataset, tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = three(**changes)
    simulate(recipe, tmp_path / "simulated", data=digits)
    serve(InProcess(SHARES), recipe, tmp_path / "carried", NOW)
    here, there = result(tmp_path / "simulated"), result(tmp_path / "carried")
    for key in ("recipe_digest", "partition", "uploads", "rules", "clients", "remarks"):
        assert here[key] == there[key], key
    assert Result.read(tmp_path / "carried").curves == Result.read(tmp_path / "simulated").curves
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "carried" / "uploads").iterdir()}
    assert {name: told["up"] for name, told in there["traffic"].items()} == sizes


SMALL: dict[str, Any] = {"model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "training.batch_size": 64}
FEW = {"sums.features": {"kind": "patches", "size": 96}}


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("v12", SMALL),
        ("bank", {**SMALL, "bank.teacher_epochs": 1}),
        ("ridge", FEW),
        ("routed", {**SMALL, **FEW}),
        ("fafi+distilled", {**SMALL, "fusion.0.epochs": 1}),
        ("split", {**SMALL, "label_noise": {"clients": 1, "share": 0.5}}),
    ],
)
def test_every_kind_of_method_comes_through_as_in_a_simulation(
    digits: Dataset, tmp_path: Path, preset: str, more: dict[str, Any]
) -> None:
    recipe = load(preset, {**more, "partition.clients": 3, "partition.alpha": 1.0, "local.workers": 1}.items())
    simulate(recipe, tmp_path / "simulated", data=digits)
    serve(InProcess(SHARES), recipe, tmp_path / "carried", NOW)
    here, there = result(tmp_path / "simulated"), result(tmp_path / "carried")
    assert here["uploads"] == there["uploads"] and here["rules"] == there["rules"]


def test_what_only_a_simulation_can_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"alignment.schedule = consensus: .*only a simulation"):
        serve(InProcess(SHARES), three(alignment={"schedule": "consensus"}), tmp_path / "run", NOW)


def test_a_quorum_nobody_can_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"quorum = 4: must be ≤ 3, the number of sites"):
        serve(InProcess(SHARES), three(quorum=4), tmp_path / "run", NOW)


class Moody:
    """The ClientApp, except for one node, whose instructions go wrong so many times."""

    def __init__(self, node: int, error: int | None, times: int) -> None:
        self.node, self.error, self.left = node, error, times
        self.trained = 0

    def __call__(self, message: Message, context: Context) -> Message | None:
        train = message.metadata.message_type == TRAIN
        if train and context.node_id == self.node and self.left:
            self.left -= 1
            return None if self.error is None else Message(Error(self.error, "out of memory"), reply_to=message)
        self.trained += train
        return client_app(message, context)


def test_a_lost_instruction_is_pushed_again(tmp_path: Path) -> None:
    moody = Moody(11, None, times=1)
    serve(InProcess(SHARES, answer=moody), three(), tmp_path / "run", NOW)
    assert log_of(tmp_path / "run").count("node 11 has lost its instruction; asked again") == 1
    assert len(result(tmp_path / "run")["uploads"]) == 3 and moody.trained == 3


def test_a_site_that_fails_is_asked_again_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    serve(InProcess(SHARES, answer=Moody(11, crashed, times=2)), three(), tmp_path / "mended", NOW)
    assert len(result(tmp_path / "mended")["uploads"]) == 3
    deadline_when(monkeypatch, lambda desk: "given up" in log_of(desk.place.path) and len(desk.held) > 1)
    with pytest.raises(
        RunError, match=r"2 of 3 uploads when the deadline of 60 s passed, quorum = 3; nothing is fused"
    ):
        serve(InProcess(SHARES, answer=Moody(11, crashed, times=99)), three(deadline=60.0), tmp_path / "broken", NOW)
    told = log_of(tmp_path / "broken")
    assert told.count("node 11 failed (out of memory)") == 3 and "asked 3 times, given up" in told
    assert not (tmp_path / "broken" / "result.json").exists()
    monkeypatch.undo()
    serve(InProcess(SHARES), three(deadline=60.0), tmp_path / "broken", NOW)  # the operator starts it again
    assert len(result(tmp_path / "broken")["uploads"]) == 3


def test_a_site_that_went_away_is_asked_when_it_is_back(tmp_path: Path) -> None:
    moody = Moody(12, ErrorCode.NODE_UNAVAILABLE, times=5)
    serve(InProcess(SHARES, answer=moody), three(), tmp_path / "run", NOW)
    assert "node 12 went away; it is asked again when it is back" in log_of(tmp_path / "run")
    assert moody.trained == 3


def test_a_server_started_again_asks_only_for_what_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody(12, None, times=99)
    deadline_when(monkeypatch, lambda desk: len(desk.held) == 2 and moody.left < 99)
    with pytest.raises(RunError, match="start the server again to go on waiting"):
        serve(InProcess(SHARES, answer=moody), three(deadline=60.0), tmp_path / "run", NOW)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "run" / "uploads").iterdir()}
    assert len(kept) == 2
    monkeypatch.undo()
    again = Moody(0, None, times=0)
    names = {10: "client_000", 11: "client_001", 12: "client_002"}
    serve(InProcess(SHARES, names, again), three(deadline=60.0), tmp_path / "run", NOW)
    assert again.trained == 1, "two are known by their keys and told that they are counted"
    assert {name: (tmp_path / "run" / "uploads" / name).read_bytes() for name in kept} == kept


def test_a_client_keeps_its_upload_and_sends_it_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = dict(SHARES)
    site = tmp_path / "site"
    site.mkdir()
    (site / "site.yaml").write_text(f"name: client_000\nshare: 0\nfolder: {site}\n")
    nodes[10] = {"site": str(site / "site.yaml")}
    serve(InProcess(nodes), three(), tmp_path / "first", NOW)
    serve(InProcess(nodes), three(), tmp_path / "second", NOW)  # a server that lost everything
    told = (site / "site.log").read_text()
    assert told.count(" epoch 1:") == 1 and "the upload that was kept is sent again" in told
    assert result(tmp_path / "first")["uploads"] == result(tmp_path / "second")["uploads"]
    (kept,) = site.glob("*/upload.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1])
    (kept.parent / "state.safetensors").write_bytes(b"torn")
    serve(InProcess(nodes), three(), tmp_path / "third", NOW)
    assert result(tmp_path / "third")["uploads"] == result(tmp_path / "first")["uploads"]
    assert "truncated" in (site / "site.log").read_text()
    (verdict,) = site.glob("*/counted.json")
    assert json.loads(verdict.read_text())["counted"] == "yes"


def test_nobody_speaks_in_the_name_of_another(tmp_path: Path) -> None:
    names = {10: "client_000", 11: "client_002", 12: "client_002"}  # whom their keys are registered for
    serve(InProcess(SHARES, names), three(quorum=2), tmp_path / "run", NOW)
    assert "client_002: refused, it speaks for client_001 but its key is registered for client_002" in log_of(
        tmp_path / "run"
    )
    assert list(result(tmp_path / "run")["uploads"]) == ["client_000", "client_002"]
    names = {9: "mallory", 10: "client_000", 11: "client_001", 12: "client_002"}  # who has a key, but no part in this
    serve(InProcess({9: SHARES[10], **SHARES}, names), three(), tmp_path / "more", NOW)
    told = log_of(tmp_path / "more")
    assert "mallory: refused, it speaks for client_000 but its key is registered for mallory" in told
    assert len(result(tmp_path / "more")["uploads"]) == 3


# --- images of the sites' own --------------------------------------------------------------------------------------------


def own_sites(digits: Dataset, tmp_path: Path) -> tuple[Recipe, dict[int, dict[str, Any]]]:
    """Two sites with .npz files whose classes are numbered each in its own way, and a server that has test images only."""
    names = ["zero", "one", "two"]
    (tmp_path / "server").mkdir()
    test = digits.test.labels < 3
    np.savez(
        tmp_path / "server" / "test.npz",
        x=digits.test.pixels[test].numpy(),
        y=np.array(names)[digits.test.labels[test]],
    )
    nodes = {}
    for number, order in enumerate((["one", "zero"], ["two", "une"])):
        meant = [names.index({"une": "one"}.get(word, word)) for word in order]
        mine = [int(at) for at, label in enumerate(digits.train.labels) if int(label) in meant][number::2]
        labels = np.array([meant.index(int(digits.train.labels[at])) for at in mine])
        np.savez(tmp_path / f"{number}.npz", x=digits.train.pixels[mine].numpy(), y=labels, class_names=order)
        file = tmp_path / f"site_{number}.yaml"
        file.write_text(f"name: site-{number}\ndata: {tmp_path / f'{number}.npz'}\nlabels: {{une: one}}\n")
        nodes[number] = {"site": str(file)}
    recipe = small_recipe(
        data={"kind": "sites", "classes": names, "size": 8, "grey": True}, partition__clients=2, training__epochs=3,
        training__augment__flip=0.0, fusion=["typicality-gated", "iffi"], local__data_path=str(tmp_path / "server"),
    )  # fmt: skip
    return recipe, nodes


def test_sites_bring_their_own_images_and_classes_are_matched_by_name(digits: Dataset, tmp_path: Path) -> None:
    recipe, nodes = own_sites(digits, tmp_path)
    serve(InProcess(nodes), recipe, tmp_path / "run", NOW)
    found = result(tmp_path / "run")
    assert found["rules"]["typicality-gated"]["accuracy"] > 0.8, "matched by number it would be a third at most"
    assert list(found["uploads"]) == ["site-0", "site-1"]


def test_a_server_without_images_makes_the_model_all_the_same(digits: Dataset, tmp_path: Path) -> None:
    recipe, nodes = own_sites(digits, tmp_path)
    (tmp_path / "server" / "test.npz").unlink()
    serve(InProcess(nodes), recipe, tmp_path / "run", NOW)
    assert "no test images here to score it" in log_of(tmp_path / "run")
    assert (tmp_path / "run" / "model" / "manifest.json").exists() and result(tmp_path / "run")["rules"] == {}
    folder = str(tmp_path / "run")
    assert "no test images here; name some with --data-dir" in bad("evaluate", folder)
    assert (
        "typicality-gated"
        in good("report", folder, "--out", str(tmp_path / "page.html"), cwd=tmp_path)
        + (tmp_path / "page.html").read_text()
    )
    assert "left out: " not in good("diagnose", folder)
    assert "model written to" in good("fuse", folder, "--rule", "iffi", cwd=tmp_path)


def test_a_class_the_recipe_does_not_know_is_told_before_training(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_when(monkeypatch, lambda desk: "does not know" in log_of(desk.place.path))
    recipe, nodes = own_sites(digits, tmp_path)
    file = Path(nodes[1]["site"])
    file.write_text(file.read_text().replace("labels: {une: one}", f"folder: {tmp_path / 'kept'}"))
    with pytest.raises(RunError, match="1 of 2 uploads"):
        serve(InProcess(nodes), change(recipe, {"deadline": 1.0}), tmp_path / "run", NOW)
    told = "the recipe does not know 'une'; it knows 'zero', 'one', 'two'"
    assert told in log_of(tmp_path / "run") and told in (tmp_path / "kept" / "site.log").read_text()
    assert "epoch" not in (tmp_path / "kept" / "site.log").read_text()


def test_a_site_that_refused_is_asked_again_when_it_comes_back(digits: Dataset, tmp_path: Path) -> None:
    """What was wrong there is put right while the server waits; it keeps its number, as a registered key does."""
    recipe, nodes = own_sites(digits, tmp_path)
    file = Path(nodes[1]["site"])
    right = file.read_text()
    file.write_text(right.replace("labels: {une: one}", ""))

    class Mended(InProcess):
        looks = 0

        def get_nodes(self) -> Any:
            self.looks += 1
            assert self.looks < 500, "it is never asked again"
            if self.looks == 4:
                file.write_text(right)
            return [info for info in super().get_nodes() if not (self.looks in (3, 4) and info.node_id == 1)]

    grid = Mended(nodes)
    serve(grid, recipe, tmp_path / "run", NOW)
    assert sorted(result(tmp_path / "run")["uploads"]) == ["site-0", "site-1"]
    asked = [message for message in grid.sent if message.metadata.message_type == TRAIN]
    assert [message.metadata.dst_node_id for message in asked] == [0, 1, 1], "and not while it is still there"
    assert "does not know 'une'" in log_of(tmp_path / "run") and "asked again when it comes back" in log_of(
        tmp_path / "run"
    )


class Visits(InProcess):
    """Sites that come and go: `away` says which are not there at the moment."""

    def __init__(self, nodes: dict[int, dict[str, Any]], away: Callable[[int], set[int]], **options: Any) -> None:
        super().__init__(nodes, **options)
        self.away, self.looks = away, 0

    def get_nodes(self) -> Any:
        self.looks += 1
        assert self.looks < 500, "it waits for somebody it does not ask"
        return [info for info in super().get_nodes() if info.node_id not in self.away(self.looks)]

    def kinds(self, node: int) -> list[str]:
        return [each.metadata.message_type for each in self.sent if each.metadata.dst_node_id == node]


def test_a_site_that_was_given_up_or_whose_upload_was_refused_is_asked_again_when_it_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    crash = Moody(11, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, times=3)
    bad_once = iter([parcel({"name": "client_002"}, b"no upload")])

    def answer(message: Message, context: Context) -> Message | None:
        lie = next(bad_once, None) if context.node_id == 12 and message.metadata.message_type == TRAIN else None
        return crash(message, context) if lie is None else Message(lie, reply_to=message)

    def away(look: int) -> set[int]:
        told = log_of(run) if look > 1 else ""
        return ({11} if look == 9 and "given up until it comes back" in told else set()) | (
            {12} if look == 9 else set()
        )

    grid = Visits(SHARES, away, answer=answer)
    serve(grid, three(), run, NOW)
    assert len(result(run)["uploads"]) == 3
    assert grid.kinds(11).count(TRAIN) == 4 and grid.kinds(12).count(TRAIN) == 2 and grid.kinds(10).count(TRAIN) == 1
    assert [path.name.partition(".")[0] for path in (run / "quarantine").iterdir()] != []


def test_a_counted_site_that_comes_back_is_told_so_and_trains_nothing(tmp_path: Path) -> None:
    moody = Moody(0, None, times=0)
    grid = Visits(
        SHARES, lambda look: ({12} if look < 12 else set()) | ({10} if look in (6, 7) else set()), answer=moody
    )
    serve(grid, three(), tmp_path / "run", NOW)
    assert grid.kinds(10).count(COUNTED) == 2 and grid.kinds(11).count(COUNTED) == 1
    assert len(result(tmp_path / "run")["uploads"]) == 3
    assert moody.trained == 4, "asked once more, as it has no registered name, it answers that it is counted"


def test_names_of_a_site_s_files_stay_at_the_site(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a file's name may be a patient's."""
    deadline_when(monkeypatch, lambda desk: "asked again when it comes back" in log_of(desk.place.path))
    recipe, nodes = own_sites(digits, tmp_path)
    images = tmp_path / "patients" / "one"
    images.mkdir(parents=True)
    (images / "Jane Doe 1970.png").write_bytes(b"not an image")
    Path(nodes[1]["site"]).write_text(f"name: site-1\ndata: {images.parent}\nfolder: {tmp_path / 'kept'}\n")
    said: list[dict[str, str]] = []

    def overheard(message: Message, context: Context) -> Message:
        said.append(words_of(answer := client_app(message, context)))
        return answer

    with pytest.raises(RunError, match="1 of 2 uploads"):
        serve(InProcess(nodes, answer=overheard), change(recipe, {"deadline": 1.0}), tmp_path / "run", NOW)
    assert "Jane Doe 1970.png" in (tmp_path / "kept" / "site.log").read_text()
    assert {"refused": "site-1: cannot take part as it is; its own log says why", "name": "site-1"} in said
    assert not any(word in str(said) for word in ("Jane", "patients"))


def test_an_answer_without_a_file_is_refused(tmp_path: Path) -> None:
    def empty(message: Message, context: Context) -> Message:
        if context.node_id == 10 and message.metadata.message_type == TRAIN:
            return Message(parcel({"name": "x"}), reply_to=message)
        return client_app(message, context)

    serve(InProcess(SHARES, answer=empty), three(quorum=2), tmp_path / "run", NOW)
    assert "node 10: refused, there is no safetensors file in the message" in log_of(tmp_path / "run")
