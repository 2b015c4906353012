"""A site: it keeps its upload, says what is wrong before it trains, and keeps the names of its files to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, Message

from federation import NOW, SHARES, deadline_when, log_of, own_sites, result, three
from inprocess import InProcess
from oneround.config.load import change
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.federate.client_app import app as client_app
from oneround.federate.messages import fields_of
from oneround.federate.server_app import serve


@pytest.mark.slow
def test_a_client_keeps_its_upload_and_sends_it_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = dict(SHARES)
    site = tmp_path / "site"
    site.mkdir()
    (site / "site.yaml").write_text(f"name: client_000\nshare: 0\nfolder: {site}\n")
    nodes[10] = {"site": str(site / "site.yaml")}
    serve(InProcess(nodes), three(), tmp_path / "first", NOW)
    serve(InProcess(nodes), three(), tmp_path / "second", NOW)  # a server that lost everything
    log = (site / "site.log").read_text()
    assert log.count(" epoch 1:") == 1 and "the upload that was kept is sent again" in log
    assert result(tmp_path / "first")["uploads"] == result(tmp_path / "second")["uploads"]
    (kept,) = site.glob("*/upload.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1])
    (kept.parent / "state.safetensors").write_bytes(b"torn")
    serve(InProcess(nodes), three(), tmp_path / "third", NOW)
    assert result(tmp_path / "third")["uploads"] == result(tmp_path / "first")["uploads"]
    assert "truncated" in (site / "site.log").read_text()
    (verdict,) = site.glob("*/counted.json")
    assert json.loads(verdict.read_text())["counted"] == "yes"


def test_a_class_the_recipe_does_not_know_is_reported_before_training(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_when(monkeypatch, lambda intake: "does not know" in log_of(intake.folder.path))
    recipe, nodes = own_sites(digits, tmp_path)
    file = Path(nodes[1]["site"])
    file.write_text(file.read_text().replace("labels: {une: one}", f"folder: {tmp_path / 'kept'}"))
    with pytest.raises(RunError, match="1 of 2 uploads"):
        serve(InProcess(nodes), change(recipe, {"deadline": 1.0}), tmp_path / "run", NOW)
    reason = "the recipe does not know 'une'; it knows 'zero', 'one', 'two'"
    assert reason in log_of(tmp_path / "run") and reason in (tmp_path / "kept" / "site.log").read_text()
    assert "epoch" not in (tmp_path / "kept" / "site.log").read_text()
    assert reason in json.loads((tmp_path / "kept" / "refused.json").read_text())["error"]


def test_names_of_a_site_s_files_stay_at_the_site(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a file's name may be a patient's."""
    deadline_when(monkeypatch, lambda intake: "asked again when it comes back" in log_of(intake.folder.path))
    recipe, nodes = own_sites(digits, tmp_path)
    images = tmp_path / "patients" / "one"
    images.mkdir(parents=True)
    (images / "Jane Doe 1970.png").write_bytes(b"not an image")
    Path(nodes[1]["site"]).write_text(f"name: site-1\ndata: {images.parent}\nfolder: {tmp_path / 'kept'}\n")
    replies: list[dict[str, str]] = []

    def overheard(message: Message, context: Context) -> Message:
        replies.append(fields_of(answer := client_app(message, context)))
        return answer

    with pytest.raises(RunError, match="1 of 2 uploads"):
        serve(InProcess(nodes, answer=overheard), change(recipe, {"deadline": 1.0}), tmp_path / "run", NOW)
    assert "Jane Doe 1970.png" in (tmp_path / "kept" / "site.log").read_text()
    assert {"refused": "site-1: cannot take part; the reason is in the site's own log", "name": "site-1"} in replies
    assert not any(word in str(replies) for word in ("Jane", "patients"))
