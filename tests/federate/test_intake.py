"""Uploads as they come in: whose they are, which are refused, and which spoil a fusion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from federation import NOW, SHARES, deadline_when, log_of, result, three
from inprocess import InProcess
from oneround.errors import RunError
from oneround.evaluate import score_uploads
from oneround.federate.client_app import app as client_app
from oneround.federate.messages import TRAIN, blob_of, fields_of, pack_message
from oneround.federate.server_app import serve
from oneround.global_model import GlobalModel
from oneround.protocol import blob
from oneround.server import loop
from tampering import repacked


@pytest.mark.slow
def test_nobody_speaks_in_the_name_of_another(tmp_path: Path) -> None:
    names = {10: "client_000", 11: "client_002", 12: "client_002"}  # whom their keys are registered for
    serve(InProcess(SHARES, names), three(quorum=2), tmp_path / "run", NOW)
    assert "client_002: refused, it speaks for client_001 but its key is registered for client_002" in log_of(
        tmp_path / "run"
    )
    assert list(result(tmp_path / "run")["uploads"]) == ["client_000", "client_002"]
    names = {9: "mallory", 10: "client_000", 11: "client_001", 12: "client_002"}  # who has a key, but no part in this
    serve(InProcess({9: SHARES[10], **SHARES}, names), three(), tmp_path / "more", NOW)
    log = log_of(tmp_path / "more")
    assert "mallory: refused, it speaks for client_000 but its key is registered for mallory" in log
    assert len(result(tmp_path / "more")["uploads"]) == 3


def test_an_answer_without_a_file_is_refused(tmp_path: Path) -> None:
    def empty(message: Message, context: Context) -> Message:
        if context.node_id == 10 and message.metadata.message_type == TRAIN:
            return Message(pack_message({"name": "x"}), reply_to=message)
        return client_app(message, context)

    serve(InProcess(SHARES, answer=empty), three(quorum=2), tmp_path / "run", NOW)
    assert "node 10: refused, there is no safetensors file in the message" in log_of(tmp_path / "run")


def answering(node: int, change: Callable[[bytes], bytes]) -> Callable[[Message, Context], Message]:
    """The ClientApp, but this node's upload is changed on its way."""

    def answer(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if context.node_id == node and message.metadata.message_type == TRAIN:
            return Message(pack_message(fields_of(reply), change(blob_of(reply))), reply_to=message)
        return reply

    return answer


def test_a_history_that_is_none_is_refused_and_the_others_are_fused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    serve(InProcess(SHARES, answer=answering(11, lambda raw: repacked(raw, history=[{}]))), three(quorum=2), run, NOW)
    assert sorted(result(run)["uploads"]) == ["client_000", "client_002"]
    assert "node 11: refused, damaged manifest (history.0.epoch: Field required)" in log_of(run)


def test_an_upload_counted_before_its_history_was_checked_does_not_end_the_server(tmp_path: Path) -> None:
    run = tmp_path / "run"
    serve(InProcess(SHARES), three(), run, NOW)
    (run / "result.json").unlink()
    counted = run / "uploads" / "client_001.safetensors"
    counted.write_bytes(repacked(counted.read_bytes(), history=[{}]))
    serve(InProcess(SHARES), three(), run, NOW)
    assert len(result(run)["uploads"]) == 3
    assert "moved to quarantine, it is asked for again" in log_of(run)


FORGED = "x\n2026-01-02 03:04:05,678 INFO client_001: upload counted\x1b[2K"


def test_no_site_writes_lines_of_its_own_into_the_log(tmp_path: Path) -> None:
    """Neither by the name of a tensor nor by the text of a refusal."""
    lying = answering(11, lambda raw: repacked(raw, {FORGED: torch.zeros(1)}))

    def answer(message: Message, context: Context) -> Message:
        if context.node_id == 12 and message.metadata.message_type == TRAIN:
            return Message(pack_message({"name": "client_002", "refused": FORGED}), reply_to=message)
        return lying(message, context)

    run = tmp_path / "run"
    serve(InProcess(SHARES, answer=answer), three(quorum=1), run, NOW)
    log = log_of(run)
    assert (
        "node 11: refused, tensor x 2026" in log
        and "x 2026-01-02 03:04:05,678 INFO client_001: upload counted?[2K; it" in log
    )
    assert "\n2026-01-02" not in log and "\x1b" not in log


def with_negative_variance(raw: bytes) -> bytes:
    _, tensors = blob.unpack(raw, "upload", "upload")
    name = next(name for name in tensors if name.endswith("running_var"))
    return repacked(raw, {name: -tensors[name]})


def test_a_negative_variance_is_refused_and_the_model_of_the_others_is_good(tmp_path: Path) -> None:
    run = tmp_path / "run"
    serve(InProcess(SHARES, answer=answering(11, with_negative_variance)), three(quorum=2), run, NOW)
    assert sorted(result(run)["uploads"]) == ["client_000", "client_002"]
    assert "running_var holds -" in log_of(run)
    assert torch.isfinite(GlobalModel.load(run / "model")(torch.rand(1, 1, 8, 8))).all()


def poison(patch: pytest.MonkeyPatch, spoiled: Callable[[set[str]], bool]) -> None:
    """Fusion fails when it is about these clients, though each upload was accepted."""

    def score(rules: Any, uploads: Any, *rest: Any) -> Any:
        if spoiled({path.stem for path in uploads.paths}):
            raise ZeroDivisionError("division by zero")
        return score_uploads(rules, uploads, *rest)

    patch.setattr(loop, "score_uploads", score)


@pytest.mark.parametrize("alone", [True, False], ids=["fails alone", "fails among others"])
def test_what_fails_at_fusion_because_of_one_upload_is_fused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    run = tmp_path / "run"
    poison(monkeypatch, lambda names: "client_001" in names and (alone or len(names) > 1))
    serve(InProcess(SHARES), three(quorum=2), run, NOW)
    assert sorted(result(run)["uploads"]) == ["client_000", "client_002"]
    assert result(run)["remarks"][-1] == "client_001 is left out: its upload could not be fused"
    assert "client_001: its upload cannot be fused; moved to quarantine/client_001." in log_of(run)
    assert [path.name.partition(".")[0] for path in (run / "quarantine").iterdir()] == ["client_001"]


def test_below_the_quorum_the_server_waits_on_and_does_not_take_the_same_upload_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    poison(monkeypatch, lambda names: "client_001" in names)
    deadline_when(monkeypatch, lambda intake: "could not be fused before" in log_of(run))
    with pytest.raises(RunError, match="2 of 3 uploads when the deadline"):
        serve(InProcess(SHARES), three(deadline=60.0), run, NOW)
    assert "waiting for 1 of 3 uploads" in log_of(run)
    monkeypatch.undo()
    serve(InProcess(SHARES), three(deadline=60.0), run, NOW)
    assert len(result(run)["uploads"]) == 3


def test_a_failure_that_is_nobody_s_fault_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, lambda names: True)
    with pytest.raises(ZeroDivisionError):
        serve(InProcess(SHARES), three(quorum=2), tmp_path / "run", NOW)
    assert len(list((tmp_path / "run" / "uploads").iterdir())) == 3, "nobody's upload is blamed"
