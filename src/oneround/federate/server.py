"""The ServerApp: one broadcast down to every site, one upload up, each checked and written the moment it arrives; for every round.

Where sums travel under masks a survey comes first: every site's public key, which the broadcast then has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from oneround.closing import logging_to
from oneround.data import load_dataset
from oneround.errors import OneroundError, ProtocolError, RecipeError
from oneround.federate.carrying import COUNTED, KEY, TRAIN, blob_of, parcel
from oneround.federate.exchange import Exchange, Pace
from oneround.federate.reception import Desk, Verdict
from oneround.federate.roster import Roster
from oneround.folder import RunFolder
from oneround.reading import load
from oneround.recipe import Recipe

app = ServerApp()
log = logging.getLogger("oneround")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`recipe` and `out` in the run config say what to do and where to keep it."""
    told = context.run_config
    if not told.get("recipe") or not told.get("out"):
        raise RecipeError("the run config needs recipe (a file or preset) and out (a folder), both with whole paths")
    pace = Pace(float(told.get("poll", 0.5)), float(told.get("patience", 30.0)), float(told.get("farewell", 20.0)))
    serve(grid, load(str(told["recipe"])), Path(str(told["out"])), pace)


def serve(grid: Grid, recipe: Recipe, folder: Path, pace: Pace) -> None:
    """A whole federation from the server's side; started again it goes on with the keys and uploads it has."""
    place = RunFolder(folder)
    with place.locked(patience=30), logging_to(folder):  # the process of a killed server may take a while to end
        try:
            desk = Desk(recipe, load_dataset(recipe.data, recipe.local.data_path), place)
            roster = desk.roster()
            if roster is not None:
                log.info("waiting for %d of %d keys", roster.expected - len(roster.keys), roster.expected)
                Survey(grid, pace, desk, roster).run()
                desk.agree(roster)
            while not place.result.exists() or desk.late:
                log.info("waiting for %d of %d uploads", desk.expected - len(desk.held), desk.expected)
                Collection(grid, pace, desk).run()
                desk.conclude()
                if desk.late:
                    break
        except OneroundError as error:
            log.error("%s", error)
            raise


class Survey(Exchange):
    """Asks every site for its public key."""

    kind = KEY

    def __init__(self, grid: Grid, pace: Pace, desk: Desk, roster: Roster) -> None:
        super().__init__(grid, pace)
        self.desk, self.roster = desk, roster

    def done(self) -> bool:
        return self.roster.complete or self.desk.overdue

    def greet(self, node: int, name: str) -> None:
        if name not in self.roster.keys and self.desk.takes_part(name):
            self.ask(node)

    def question(self) -> RecordDict:
        return parcel({"run": self.roster.run})

    def take(self, node: int, words: dict[str, str], answer: Message) -> None:
        try:
            name, key = words.get("name", ""), words.get("key", "")
            self.roster.take(name, key, self.sender(node), self.names.get(node, ""))
        except ProtocolError as error:
            log.warning("%s", error)


class Collection(Exchange):
    """Sends every site the broadcast and takes its upload."""

    kind = TRAIN

    def __init__(self, grid: Grid, pace: Pace, desk: Desk) -> None:
        super().__init__(grid, pace)
        self.desk = desk
        self.key = hashlib.sha256(desk.sent).hexdigest()
        self.farewells: set[str] = set()

    def done(self) -> bool:
        return self.desk.done()

    def run(self) -> None:
        super().run()
        until = time.monotonic() + (self.pace.farewell if self.desk.last_round else 0.0)
        while self.farewells and time.monotonic() < until:
            self.meanwhile()
            time.sleep(self.pace.poll)

    def greet(self, node: int, name: str) -> None:
        if name in self.desk.held:
            self._say_counted(node, Verdict(name, True, f"{name}: counted already"))
        elif self.desk.takes_part(name):
            self.ask(node)

    def question(self) -> RecordDict:
        words = {"held": json.dumps(self.desk.held), "wanted": json.dumps(self.desk.wanted)}
        return parcel(words, self.desk.sent)

    def take(self, node: int, words: dict[str, str], answer: Message) -> None:
        sender = self.sender(node)
        if "resting" in words:
            return
        if "held" in words:
            name = words.get("name", sender)
            self._say_counted(node, Verdict(name, True, f"{name}: counted already"))
            return
        try:
            verdict = self.desk.take(blob_of(answer), sender, self.names.get(node, ""))
        except ProtocolError as error:
            verdict = Verdict(sender, False, f"{sender}: {error}")
            log.warning("%s", verdict.text)
        self._say_counted(node, verdict)

    def _say_counted(self, node: int, verdict: Verdict) -> None:
        if verdict.counted and not self.desk.last_round:
            return  # the next round's broadcast says as much
        words = {"broadcast": self.key, "counted": "yes" if verdict.counted else "no", "text": verdict.text}
        with suppress(Exception):  # that the site hears it is a courtesy
            self.farewells.add(self.push(node, COUNTED, parcel(words)))

    def meanwhile(self) -> None:
        """Sites that have heard that they are counted say so."""
        for message in list(self.farewells):
            with suppress(Exception):
                if self.pull(message) is None:
                    continue
            self.farewells.discard(message)
