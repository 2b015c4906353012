"""The exchange of messages in one process: who is asked, who is asked again, and replies that come in parts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from conftest import small_recipe
from federation import NOW, SHARES, Moody, deadline_when, log_of, own_sites, result, three
from inprocess import InProcess
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.federate.exchange import ReplyPuller
from oneround.federate.intake import UploadIntake
from oneround.federate.messages import COUNTED, TRAIN, blob_of, pack_message
from oneround.federate.server_app import Pace, serve
from oneround.server.plan import DealtPlan


@pytest.mark.slow
def test_a_lost_instruction_is_pushed_again(tmp_path: Path) -> None:
    moody = Moody(11, None, times=1)
    serve(InProcess(SHARES, answer=moody), three(), tmp_path / "run", NOW)
    assert log_of(tmp_path / "run").count("node 11 has lost its instruction; asked again") == 1
    assert len(result(tmp_path / "run")["uploads"]) == 3 and moody.trained == 3


@pytest.mark.slow
def test_a_site_that_fails_is_asked_again_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    serve(InProcess(SHARES, answer=Moody(11, crashed, times=2)), three(), tmp_path / "mended", NOW)
    assert len(result(tmp_path / "mended")["uploads"]) == 3
    deadline_when(
        monkeypatch, lambda intake: "no answer after" in log_of(intake.folder.path) and len(intake.received) > 1
    )
    with pytest.raises(
        RunError, match=r"2 of 3 uploads when the deadline of 60 s passed, quorum = 3; nothing is fused"
    ):
        serve(InProcess(SHARES, answer=Moody(11, crashed, times=99)), three(deadline=60.0), tmp_path / "broken", NOW)
    log = log_of(tmp_path / "broken")
    assert log.count("node 11 failed (out of memory)") == 3 and "no answer after 3 attempts" in log
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
    deadline_when(monkeypatch, lambda intake: len(intake.received) == 2 and moody.left < 99)
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
    bad_once = iter([pack_message({"name": "client_002"}, b"no upload")])

    def answer(message: Message, context: Context) -> Message | None:
        lie = next(bad_once, None) if context.node_id == 12 and message.metadata.message_type == TRAIN else None
        return crash(message, context) if lie is None else Message(lie, reply_to=message)

    def away(look: int) -> set[int]:
        log = log_of(run) if look > 1 else ""
        return ({11} if look == 9 and "asked again when it reconnects" in log else set()) | (
            {12} if look == 9 else set()
        )

    grid = Visits(SHARES, away, answer=answer)
    serve(grid, three(), run, NOW)
    assert len(result(run)["uploads"]) == 3
    assert grid.kinds(11).count(TRAIN) == 4 and grid.kinds(12).count(TRAIN) == 2 and grid.kinds(10).count(TRAIN) == 1
    assert [path.name.partition(".")[0] for path in (run / "quarantine").iterdir()] != []


def looks_at_most(count: int, *args: Any, **options: Any) -> InProcess:
    """Sites that are all connected; the server may not look for others more often than that."""

    class Watched(Visits):
        def get_nodes(self) -> Any:
            assert self.looks < count, "it waits for nobody"
            return super().get_nodes()

    return Watched(*args, away=lambda look: set(), **options)


def test_where_no_other_site_can_come_the_waiting_ends_when_all_have_refused_or_failed(
    digits: Dataset, tmp_path: Path
) -> None:
    """Two that cannot be asked again, one counted; what is here is kept, and the next start goes on."""
    run = tmp_path / "run"
    crash = Moody(11, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, times=99)

    def answer(message: Message, context: Context) -> Message | None:
        if context.node_id == 12 and message.metadata.message_type == TRAIN:
            refusal = pack_message({"name": "client_002", "refused": "client_002: its data are gone"})
            return Message(refusal, reply_to=message)
        return crash(message, context)

    with pytest.raises(RunError, match="1 of 3 uploads when no site was left to wait for") as caught:
        serve(looks_at_most(20, SHARES, answer=answer), three(), run, NOW, num_nodes=3)
    message = str(caught.value)
    assert "\n" not in message and "client_002: its data are gone" in message
    assert "node 11 failed (out of memory); no answer after 3 attempts" in message
    assert f"repeat the command with --out {run}, or fuse what is here with oneround fuse {run}" in message
    assert "when it comes back" not in log_of(run) and "when it reconnects" not in log_of(run)
    (kept,) = (run / "uploads").iterdir()
    before = kept.read_bytes()
    serve(InProcess(SHARES), three(), run, NOW, num_nodes=3)
    assert len(result(run)["uploads"]) == 3 and kept.read_bytes() == before


def test_a_quorum_is_fused_at_once_when_nobody_is_left_and_the_deadline_is_far(tmp_path: Path) -> None:
    crash = Moody(11, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, times=99)
    recipe = three(quorum=2, deadline=3600.0)
    serve(looks_at_most(20, SHARES, answer=crash), recipe, tmp_path / "run", NOW, num_nodes=3)
    assert "no site was left to wait for (node 11 failed" in log_of(tmp_path / "run")
    assert len(result(tmp_path / "run")["uploads"]) == 2


def test_a_site_that_is_not_here_yet_is_waited_for(tmp_path: Path) -> None:
    """The others have failed before the last one connects."""
    crashes = {node: Moody(node, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, times=99) for node in (10, 11)}

    def answer(message: Message, context: Context) -> Message | None:
        return crashes.get(context.node_id, Moody(0, None, 0))(message, context)

    grid = Visits(SHARES, lambda look: {12} if look < 20 else set(), answer=answer)
    with pytest.raises(RunError, match="1 of 3 uploads when no site was left to wait for"):
        serve(grid, three(), tmp_path / "run", NOW, num_nodes=3)
    assert grid.looks >= 20


def test_a_site_without_images_is_not_named_as_a_reason(digits: Dataset, tmp_path: Path) -> None:
    """Nobody expects it: the partition leaves it empty."""
    recipe = small_recipe(partition__clients=6, partition__alpha=0.001, fusion=["iffi"])
    plan = DealtPlan.of(recipe, digits)
    assert len(plan.split.empty) == 2
    shares = {10 + number: {"partition-id": number, "num-partitions": 6} for number in range(6)}
    crash = Moody(10, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, times=99)
    with pytest.raises(RunError, match="3 of 4 uploads when no site was left to wait for") as caught:
        serve(looks_at_most(20, shares, answer=crash), recipe, tmp_path / "run", NOW, num_nodes=6)
    assert "(node 10 failed (out of memory); no answer after 3 attempts)" in str(caught.value)


def test_a_counted_site_that_comes_back_is_told_so_and_trains_nothing(tmp_path: Path) -> None:
    moody = Moody(0, None, times=0)
    grid = Visits(
        SHARES, lambda look: ({12} if look < 12 else set()) | ({10} if look in (6, 7) else set()), answer=moody
    )
    serve(grid, three(), tmp_path / "run", NOW)
    assert grid.kinds(10).count(COUNTED) == 2 and grid.kinds(11).count(COUNTED) == 1
    assert len(result(tmp_path / "run")["uploads"]) == 3
    assert moody.trained == 4, "asked once more, as it has no registered name, it answers that it is counted"


class HalfSent(HttpGrid):
    """A SuperLink that has announced the reply "r" to the message "m"; `arrived` has the parts that came, None: given up."""

    def __init__(self, reply: Message) -> None:
        super().__init__(token="t")
        self._run, self.node = SimpleNamespace(run_id=1), None
        self.parts = {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
        self.arrived: dict[str, bytes] | None = {}
        self.reply, self.pulled, self.confirmed = reply, 0, 0

    @property
    def _runtime_client(self) -> Any:
        return self

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        if self.pulled:
            return PullAppMessagesResponse()
        self.pulled += 1
        self.reply.metadata.__dict__["_message_id"] = self.reply.object_id
        bare = Message(pack_message({}), 1, TRAIN)
        bare.metadata.__dict__["_message_id"] = self.reply.object_id
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(bare)], message_object_trees=[get_object_tree(self.reply)]
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        if self.arrived is None:
            return PullObjectResponse(object_found=False)
        content = self.arrived.get(request.object_id, b"")
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: object) -> None:
        self.confirmed += 1


@pytest.fixture
def half_sent(monkeypatch: pytest.MonkeyPatch) -> HalfSent:
    def no_waiting(*_: object) -> None:
        pytest.fail("it waits")

    monkeypatch.setattr("flwr.supercore.inflatable.inflatable_utils.random.uniform", no_waiting)  # before it sleeps
    InProcess({})
    return HalfSent(Message(pack_message({"name": "a"}, b"an upload"), 1, TRAIN))


def test_a_reply_is_pulled_once_all_of_it_is_here(half_sent: HalfSent) -> None:
    puller = ReplyPuller(half_sent)
    assert half_sent.arrived is not None
    for key, content in half_sent.parts.items():
        assert puller.pull("m") is None and not half_sent.confirmed
        half_sent.arrived[key] = content
    reply = puller.pull("m")
    assert isinstance(reply, Message) and blob_of(reply) == b"an upload" and half_sent.confirmed == 1
    assert not puller.announced and puller.pull("m") is None


def test_a_reply_whose_sender_is_given_up_is_an_error(half_sent: HalfSent) -> None:
    puller = ReplyPuller(half_sent)
    assert puller.pull("m") is None
    half_sent.arrived = None
    reply = puller.pull("m")
    assert isinstance(reply, Error) and "announced a reply and did not send it all" in str(reply.reason)
    assert not puller.announced


class Silent(HalfSent):
    """A SuperLink that has ended: a look at all but the last part is tried again and again, as Flower does."""

    waited_out = False

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        last = list(self.parts)[-1]
        until = time.monotonic() + (0 if request.object_id == last else 20)
        while time.monotonic() < until:
            time.sleep(0.05)
        self.waited_out = self.waited_out or request.object_id != last
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self.parts[request.object_id]
        )


def test_a_server_whose_superlink_is_gone_can_be_interrupted() -> None:
    """Flower raises the signal in a thread of its own; only a main thread that waits for no other thread sees it."""

    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    InProcess({})
    silent = Silent(Message(pack_message({"name": "a"}, b"an upload"), 1, TRAIN))
    before = signal.signal(signal.SIGUSR1, end)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGUSR1]).start()
    try:
        with pytest.raises(Ended):
            ReplyPuller(silent).pull("m")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not silent.waited_out


def test_an_answer_that_is_ready_when_the_deadline_passes_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(InProcess):
        passed = False

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = [key for key in message_ids if self.passed or self.sent[int(key)].metadata.dst_node_id != 12]
            return super().pull_messages(ids)

    grid = Slow(SHARES)

    def passed(intake: UploadIntake) -> bool:
        grid.passed = grid.passed or len(intake.received) == 2
        return grid.passed

    deadline_when(monkeypatch, passed)
    serve(grid, three(deadline=60.0), tmp_path / "run", Pace(poll=0.01, patience=60.0, farewell=0.0))
    assert len(result(tmp_path / "run")["uploads"]) == 3
