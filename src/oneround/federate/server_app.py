"""The ServerApp: in every round one broadcast down to each site and one upload up, checked and written when it arrives.

For masked sums a survey comes first: the broadcast then has every site's public key. For a split that is chosen before training
one of class histograms does: the broadcast then has every site's number of shared blocks. What happens to the uploads is in
server/loop.py, as in a simulation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from oneround.analysis.diagnosis.diagnose import LiveDiagnosis
from oneround.analysis.diagnosis.rules import Finding
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import load_dataset
from oneround.errors import OneroundError, ProtocolError, RecipeError
from oneround.federate.exchange import Exchange, Pace
from oneround.federate.histograms import Histograms
from oneround.federate.intake import Ending, UploadIntake, Verdict
from oneround.federate.messages import COUNTED, HISTOGRAM, KEY, TRAIN, blob_of, pack_message
from oneround.federate.roster import Roster
from oneround.federate.sites import OUTCOME
from oneround.files import logging_to
from oneround.formatting import duration
from oneround.protocol import Broadcast
from oneround.runs.folder import RunFolder, client_name
from oneround.server import loop
from oneround.server.plan import Plan, plan_run

app = ServerApp()
log = logging.getLogger("oneround")

MOST_REASONS = 3  # of sites that send nothing, in one message
LOCK_TIMEOUT = 120.0  # seconds; the process of a killed server takes a while to end


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the federation that the run config describes: `recipe` and `out` are required."""
    config = context.run_config
    if not config.get("recipe") or not config.get("out"):
        raise RecipeError("the run config needs recipe (a file or preset) and out (a folder), both with whole paths")
    pace = Pace(**{key: float(config[key]) for key in ("poll", "patience", "farewell") if key in config})
    num_nodes = int(config.get("sites", 0)) or None
    serve(grid, load(str(config["recipe"])), Path(str(config["out"])), pace, num_nodes)


def serve(grid: Grid, recipe: Recipe, folder: Path, pace: Pace, num_nodes: int | None = None) -> None:
    """Serve a whole federation; if started again, it resumes with the keys and uploads it has.

    `num_nodes`: the number of sites where no other can connect, as in a federation on one machine. When nothing more is to be
    expected of them, the waiting ends.
    """
    run_folder = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with logging_to(folder / "run.log"):
        try:
            with run_folder.locked(patience=LOCK_TIMEOUT):
                (folder / OUTCOME).unlink(missing_ok=True)  # of an earlier start
                _serve(grid, recipe, run_folder, pace, num_nodes)
                run_folder.write_json(OUTCOME, {"ok": True})
        except OneroundError as error:
            log.error("%s", error)
            run_folder.write_json(OUTCOME, {"error": str(error)})
            raise


def _serve(grid: Grid, recipe: Recipe, folder: RunFolder, pace: Pace, num_nodes: int | None) -> None:
    plan = plan_run(recipe, load_dataset(recipe.data, recipe.local.data_path))
    loop.check_federation(plan)
    loop.open_run(plan, folder)
    sites = FlowerSites(grid, pace, plan, folder, num_nodes)
    if folder.result.exists():
        sites.take_late()
    else:
        loop.serve(plan, folder, sites, LiveDiagnosis(folder.path, _log_finding))


def _log_finding(finding: Finding) -> None:
    """Log a finding of the diagnosis, unless it is only a note."""
    if finding.severity != "note":
        log.warning(finding.summary)


class FlowerSites:
    """The transport: sites on other machines, reached through Flower's messages."""

    snapshots = live = trusted = False

    def __init__(self, grid: Grid, pace: Pace, plan: Plan, folder: RunFolder, num_nodes: int | None = None) -> None:
        self.grid, self.pace, self.plan, self.folder, self.num_nodes = grid, pace, plan, folder, num_nodes
        self.intake = UploadIntake(plan, folder)

    def agree(self, broadcast: Broadcast) -> Broadcast:
        """Collect the public keys of all sites; each is on disk before it counts."""
        roster = Roster(self.folder, self.intake.participants, self.plan.num_sites)
        log.info("waiting for %d of %d keys", roster.expected - len(roster.keys), roster.expected)
        survey = KeySurvey(self.grid, self.pace, self.intake, roster, self.num_nodes)
        survey.run()
        return replace(broadcast, roster=roster.complete_keys(self._ending(survey)))

    def survey(self, broadcast: Broadcast) -> dict[str, Tensor]:
        """Collect the class histograms of all sites; each is on disk before it counts."""
        histograms = Histograms(self.folder, broadcast.classes, self.intake.participants, self.plan.num_sites)
        log.info("waiting for %d of %d histograms", histograms.expected - len(histograms.counts), histograms.expected)
        survey = HistogramSurvey(self.grid, self.pace, self.intake, histograms, broadcast, self.num_nodes)
        survey.run()
        return histograms.whole(self._ending(survey))

    def begin(self, broadcast: Broadcast, epoch: int) -> None:
        """Sites train a round in one go."""

    def collect(self, broadcast: Broadcast, epoch: int) -> list[str]:
        if broadcast.context != self.intake.broadcast.context:
            self.intake.begin_round(broadcast)
        self.intake.check_quorum(self._take_uploads())
        self.intake.count_traffic()
        return sorted(self.intake.received)

    def discard(self, client: str) -> None:
        self.intake.discard(client)

    def traffic(self) -> dict[str, tuple[int, int]]:
        return self.intake.traffic()

    def remarks(self) -> list[str]:
        return self.intake.remarks()

    def _take_uploads(self) -> Ending:
        """Wait for uploads; returns why the waiting has ended."""
        if not self.intake.done():
            missing = self.intake.expected - len(self.intake.received)
            log.info("waiting for %d of %d uploads", missing, self.intake.expected)
        collection = UploadCollection(self.grid, self.pace, self.intake, self.num_nodes)
        collection.run()
        return self._ending(collection)

    def _ending(self, exchange: Exchange) -> Ending:
        """Why the waiting in this exchange has ended, and how to go on."""
        again = "start the server again to go on waiting"
        if self.intake.overdue:
            return Ending(f"the deadline of {duration(self.plan.recipe.deadline or 0)} passed", again)
        if exchange.done():
            return Ending("the quorum is here", again)
        split = self.plan.split
        empty = {client_name(number, len(split.clients)) for number in split.empty} if split else set()  # not expected
        reasons = [text for text in exchange.refusals.values() if text.partition(":")[0] not in empty]
        if len(reasons) > MOST_REASONS:
            reasons[MOST_REASONS:] = [f"{len(reasons) - MOST_REASONS} more"]
        again = f"put that right and repeat the command with --out {self.folder.path}"
        if self.intake.received and not self.intake.broadcast.masked:
            again += f", or fuse what is here with oneround fuse {self.folder.path}"
        return Ending(f"no site was left to wait for ({'; '.join(reasons)})", again)

    def take_late(self) -> None:
        """Keep the uploads that come after the model is made, until all are here or the deadline has passed."""
        self._take_uploads()
        log.info("the model was made before; fuse again with oneround fuse %s", self.folder.path)


class KeySurvey(Exchange):
    """Asks every site for its public key."""

    kind = KEY

    def __init__(
        self, grid: Grid, pace: Pace, intake: UploadIntake, roster: Roster, num_nodes: int | None = None
    ) -> None:
        super().__init__(grid, pace, num_nodes)
        self.intake, self.roster = intake, roster

    def done(self) -> bool:
        return self.roster.complete or self.intake.overdue

    def on_connect(self, node: int, name: str) -> None:
        if name not in self.roster.keys and self.intake.takes_part(name):
            self.instruct(node)

    def instruction(self) -> RecordDict:
        return pack_message({"run": self.roster.run})

    def on_reply(self, node: int, fields: dict[str, str], reply: Message) -> None:
        try:
            name, key = fields.get("name", ""), fields.get("key", "")
            self.roster.take(name, key, self.sender(node), self.names.get(node, ""))
        except ProtocolError as error:
            self.refusals[node] = str(error)
            log.warning("%s", error)


class HistogramSurvey(Exchange):
    """Asks every site for its class histogram."""

    kind = HISTOGRAM

    def __init__(
        self,
        grid: Grid,
        pace: Pace,
        intake: UploadIntake,
        histograms: Histograms,
        broadcast: Broadcast,
        num_nodes: int | None = None,
    ) -> None:
        super().__init__(grid, pace, num_nodes)
        self.intake, self.histograms = intake, histograms
        self.question = replace(broadcast, weights={}, extras={}).pack()
        """The broadcast without its tensors: what a site needs to count its own images."""

    def done(self) -> bool:
        return self.histograms.complete or self.intake.overdue

    def on_connect(self, node: int, name: str) -> None:
        if name not in self.histograms.counts and self.intake.takes_part(name):
            self.instruct(node)

    def instruction(self) -> RecordDict:
        return pack_message({}, self.question)

    def on_reply(self, node: int, fields: dict[str, str], reply: Message) -> None:
        try:
            name, counts = fields.get("name", ""), fields.get("histogram", "")
            self.histograms.take(name, counts, self.sender(node), self.names.get(node, ""))
        except ProtocolError as error:
            self.refusals[node] = str(error)
            log.warning("%s", error)


class UploadCollection(Exchange):
    """Sends every site the broadcast and takes its upload."""

    kind = TRAIN

    def __init__(self, grid: Grid, pace: Pace, intake: UploadIntake, num_nodes: int | None = None) -> None:
        super().__init__(grid, pace, num_nodes)
        self.intake = intake
        self.digest = hashlib.sha256(intake.sent).hexdigest()
        """Of the broadcast; a site keeps its state in a folder of this name."""
        self.verdicts: set[str] = set()
        """Ids of the messages with verdicts that sites have not confirmed."""

    def done(self) -> bool:
        return self.intake.done()

    def run(self) -> None:
        super().run()
        until = time.monotonic() + (self.pace.farewell if self.intake.last_round else 0.0)
        while self.verdicts and time.monotonic() < until:
            self.on_poll()
            time.sleep(self.pace.poll)

    def on_connect(self, node: int, name: str) -> None:
        if name in self.intake.received:
            self._send_verdict(node, Verdict(True, f"{name}: counted already"))
        elif self.intake.takes_part(name):
            self.instruct(node)

    def instruction(self) -> RecordDict:
        fields = {"received": json.dumps(self.intake.received), "participants": json.dumps(self.intake.participants)}
        return pack_message(fields, self.intake.sent)

    def on_reply(self, node: int, fields: dict[str, str], reply: Message) -> None:
        sender = self.sender(node)
        if "not drawn" in fields:
            return
        if "received" in fields:
            verdict = Verdict(True, f"{fields.get('name', sender)}: counted already")
        else:
            try:
                verdict = self.intake.take(blob_of(reply), sender, self.names.get(node, ""))
            except ProtocolError as error:
                verdict = Verdict(False, f"{sender}: {error}")
                log.warning("%s", verdict.text)
        if not verdict.counted:
            self.refusals[node] = verdict.text
        self._send_verdict(node, verdict)

    def _send_verdict(self, node: int, verdict: Verdict) -> None:
        if verdict.counted and not self.intake.last_round:
            return  # the next round's broadcast lists the uploads that are counted
        fields = {"broadcast": self.digest, "counted": "yes" if verdict.counted else "no", "text": verdict.text}
        with suppress(Exception):  # nothing depends on whether the site receives it
            self.verdicts.add(self.push(node, COUNTED, pack_message(fields)))

    def on_poll(self) -> None:
        """Collect the sites' confirmations of their verdicts."""
        for message in list(self.verdicts):
            with suppress(Exception):
                if self.pull(message) is None:
                    continue
            self.verdicts.discard(message)
