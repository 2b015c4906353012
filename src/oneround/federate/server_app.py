"""The ServerApp: in every round one broadcast down to each site and one upload up, checked and written when it arrives.

For masked sums a survey comes first: the broadcast then has every site's public key. What happens to the uploads is in
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

from oneround.analysis.diagnosis.diagnose import LiveDiagnosis
from oneround.analysis.diagnosis.rules import Finding
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import load_dataset
from oneround.errors import OneroundError, ProtocolError, RecipeError
from oneround.federate.exchange import Exchange, Pace
from oneround.federate.intake import UploadIntake, Verdict
from oneround.federate.messages import COUNTED, KEY, TRAIN, blob_of, pack_message
from oneround.federate.roster import Roster
from oneround.federate.sites import OUTCOME
from oneround.files import logging_to
from oneround.protocol import Broadcast
from oneround.runs.folder import RunFolder
from oneround.server import loop
from oneround.server.plan import Plan, plan_run

app = ServerApp()
log = logging.getLogger("oneround")

LOCK_TIMEOUT = 120.0  # seconds; the process of a killed server takes a while to end


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the federation that the run config describes: `recipe` and `out` are required."""
    config = context.run_config
    if not config.get("recipe") or not config.get("out"):
        raise RecipeError("the run config needs recipe (a file or preset) and out (a folder), both with whole paths")
    pace = Pace(**{key: float(config[key]) for key in ("poll", "patience", "farewell") if key in config})
    serve(grid, load(str(config["recipe"])), Path(str(config["out"])), pace)


def serve(grid: Grid, recipe: Recipe, folder: Path, pace: Pace) -> None:
    """Serve a whole federation; if started again, it resumes with the keys and uploads it has."""
    run_folder = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with logging_to(folder / "run.log"):
        try:
            with run_folder.locked(patience=LOCK_TIMEOUT):
                (folder / OUTCOME).unlink(missing_ok=True)  # of an earlier start
                _serve(grid, recipe, run_folder, pace)
                run_folder.write_json(OUTCOME, {"ok": True})
        except OneroundError as error:
            log.error("%s", error)
            run_folder.write_json(OUTCOME, {"error": str(error)})
            raise


def _serve(grid: Grid, recipe: Recipe, folder: RunFolder, pace: Pace) -> None:
    plan = plan_run(recipe, load_dataset(recipe.data, recipe.local.data_path))
    loop.check_federation(plan)
    loop.open_run(plan, folder)
    sites = FlowerSites(grid, pace, plan, folder)
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

    def __init__(self, grid: Grid, pace: Pace, plan: Plan, folder: RunFolder) -> None:
        self.grid, self.pace, self.plan, self.folder = grid, pace, plan, folder
        self.intake = UploadIntake(plan, folder)

    def agree(self, broadcast: Broadcast) -> Broadcast:
        """Collect the public keys of all sites; each is on disk before it counts."""
        roster = Roster(self.folder, self.intake.participants, self.plan.num_sites)
        log.info("waiting for %d of %d keys", roster.expected - len(roster.keys), roster.expected)
        KeySurvey(self.grid, self.pace, self.intake, roster).run()
        return replace(broadcast, roster=roster.complete_keys(self.plan.recipe.deadline))

    def collect(self, broadcast: Broadcast, epoch: int) -> list[str]:
        if broadcast.context != self.intake.broadcast.context:
            self.intake.begin_round(broadcast)
        self._take_uploads()
        self.intake.check_quorum()
        self.intake.count_traffic()
        return sorted(self.intake.received)

    def discard(self, client: str) -> None:
        self.intake.discard(client)

    def traffic(self) -> dict[str, tuple[int, int]]:
        return self.intake.traffic()

    def remarks(self) -> list[str]:
        return self.intake.remarks()

    def _take_uploads(self) -> None:
        if not self.intake.done():
            missing = self.intake.expected - len(self.intake.received)
            log.info("waiting for %d of %d uploads", missing, self.intake.expected)
        UploadCollection(self.grid, self.pace, self.intake).run()

    def take_late(self) -> None:
        """Keep the uploads that come after the model is made, until all are here or the deadline has passed."""
        self._take_uploads()
        log.info("the model was made before; fuse again with oneround fuse %s", self.folder.path)


class KeySurvey(Exchange):
    """Asks every site for its public key."""

    kind = KEY

    def __init__(self, grid: Grid, pace: Pace, intake: UploadIntake, roster: Roster) -> None:
        super().__init__(grid, pace)
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
            log.warning("%s", error)


class UploadCollection(Exchange):
    """Sends every site the broadcast and takes its upload."""

    kind = TRAIN

    def __init__(self, grid: Grid, pace: Pace, intake: UploadIntake) -> None:
        super().__init__(grid, pace)
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
