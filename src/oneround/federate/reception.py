"""The server's desk: what comes in is checked, written down, and only then counted. It knows nothing of how things travel."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace

from oneround import acts
from oneround.closing import Facts, finish, record
from oneround.data import Dataset, datasets, partitions
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.evaluate import Score, score_uploads
from oneround.federate.roster import Roster
from oneround.federate.sites import check_name
from oneround.folder import RunFolder
from oneround.learning.schedules import schedules
from oneround.observe.environment import environment
from oneround.observe.words import duration, size_in_words
from oneround.protocol import Broadcast, GlobalModel, Upload, UploadFolder, blob
from oneround.protocol.messages import check_norms
from oneround.recipe import Recipe
from oneround.runs import Plan, server_of
from oneround.site import Site, choose_device

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Verdict:
    """What became of an upload."""

    client: str
    counted: bool
    text: str


class Desk:
    """One run at the server: its folder, what every site is sent, and the uploads it has."""

    def __init__(self, recipe: Recipe, data: Dataset, place: RunFolder) -> None:
        self.place, self.data = place, data
        self.plan = None if datasets.of(recipe.data).elsewhere else Plan.of(recipe, data)
        self.recipe = self.plan.recipe if self.plan else acts.settle(recipe, data)
        if self.recipe.alignment and schedules.of(self.recipe.alignment.schedule).needs_others:
            raise RecipeError(
                f"alignment.schedule = {self.recipe.alignment.schedule.kind}: needs the other clients every epoch, which only a "
                "simulation can offer; choose another"
            )
        choosing = next((rule.kind for rule in self.recipe.fusion if getattr(rule, "needs_validation", False)), None)
        if self.plan is None and choosing:
            raise RecipeError(
                f"fusion: {choosing} chooses on images held back from the recipe's own data set, and here sites bring their own; leave accept_if out"
            )
        if self.plan is None and self.recipe.participation.fraction < 1:
            raise RecipeError(
                f"participation.fraction = {self.recipe.participation.fraction:g}: sites that bring their own data all take part in every "
                "round; set it to 1"
            )
        if self.recipe.quorum and self.recipe.quorum > self.sites:
            raise RecipeError(f"quorum = {self.recipe.quorum}: must be ≤ {self.sites}, the number of sites")
        self._begin_round(self._open())
        self.late = place.result.exists()
        """Whether the model is made already: what comes now is kept for `oneround fuse`."""

    def roster(self) -> Roster | None:
        """Who still has to agree on keys before anything is sent; None where nobody has to, or all have."""
        if not self.recipe.secure or self.broadcast.roster:
            return None
        return Roster(self.place, self.wanted, self.sites)

    def agree(self, roster: Roster) -> None:
        """From now on the broadcast has all keys; a deadline begins anew, for uploads."""
        replace(self.broadcast, roster=roster.whole(self.recipe.deadline)).write(self.place.broadcast)
        self._begin_round(Broadcast.read(self.place.broadcast))

    def _begin_round(self, broadcast: Broadcast) -> None:
        self.started = time.monotonic()
        self.broadcast = broadcast
        self.sent = self.place.broadcast.read_bytes()
        self.statistics = acts.statistics_of(broadcast)
        self.held = self._held()

    def _open(self) -> Broadcast:
        """Begin the run's folder, or go on with what is in it."""
        place = self.place
        if place.recipe.exists() and place.read_recipe().digest != self.recipe.digest:
            raise RecipeError(
                f"{place.path}: was begun with another recipe ({place.recipe}); use that one, or choose another --out"
            )
        if not (place.recipe.exists() and place.broadcast.exists()):
            place.write_json("environment.json", environment(choose_device(self.recipe.local.device)))
            self._prepare().write(place.broadcast)
            if self.plan:
                place.write_json("partition.json", self.plan.partition())
            blob.write_durably(place.recipe, self.recipe.to_yaml().encode())
        return Broadcast.read(place.broadcast)

    def _prepare(self) -> Broadcast:
        if self.plan:
            return self.plan.prepare()
        if self.recipe.public and not len(self.data.train):
            raise RecipeError(
                f"public = {self.recipe.public:g}: the server has no public images; put them into public/ below local.data_path"
            )
        return acts.prepare(self.recipe, self.data.class_names, self.data.shape, self._server())

    def _server(self) -> Site:
        """Who fuses: with the images the server holds itself."""
        if self.plan:
            return self.plan.server(self.place.path)
        return server_of(self.recipe, self.data, self.place.path)

    def _held(self) -> dict[str, str]:
        """Uploads that are there already and good, by client, with the digest of what was learned."""
        held = {}
        for path in sorted((self.place.path / "uploads").glob("*.safetensors")):
            epoch = Upload.epoch_of(path)
            if self.broadcast.round > 1 and epoch is not None and epoch <= self.broadcast.first_epoch:
                path.unlink()  # of a round that is over: what came of it is in the broadcast
                continue
            try:
                held[path.stem] = Upload.read(path, self.broadcast, self.statistics).content
            except ProtocolError as error:
                log.warning("%s; moved to quarantine, it is asked for again", error)
                path.rename(self.place.quarantine(path.stem))
        if held:
            log.info("%d uploads are here already: %s", len(held), ", ".join(held))
        return held

    # --- taking uploads --------------------------------------------------------------------------------------------------

    def take(self, raw: bytes, sender: str, name: str = "") -> Verdict:
        """Check an upload, write it durably, count it. `name`: whom the sender's key is registered for, if that is known."""
        try:
            upload = Upload.unpack(raw, self.broadcast, self.statistics, sender)
            check_norms(upload, self.broadcast, sender)
            check_name(upload.client, name, sender)
            if upload.epoch != self.broadcast.last_epoch and not upload.stopped:
                raise ProtocolError(
                    f"{sender}: refused, trained to epoch {upload.epoch} of {self.broadcast.last_epoch}"
                )
            if self.wanted and upload.client not in self.wanted:
                raise ProtocolError(f"{sender}: refused, {upload.client} takes no part in round {self.broadcast.round}")
        except ProtocolError as error:
            return self._refuse(raw, sender, str(error))
        client, content = upload.client, upload.content
        if client in self.held:
            if self.held[client] == content:
                return self._say(Verdict(client, True, f"{client}: the same upload again, it is counted already"))
            reason = (
                f"{sender}: refused, another upload of {client} is counted already; give every site a name of its own"
            )
            return self._refuse(raw, sender, reason)
        blob.write_durably(self.place.upload(client), raw)
        self.held[client] = content
        kept = "kept for oneround fuse, the model is made already" if self.late else "counted"
        size, of = size_in_words(len(raw)), f"{len(self.held)} of {self.expected}"
        return self._say(Verdict(client, True, f"{client}: upload of {size} {kept} ({of})"))

    def _refuse(self, raw: bytes, sender: str, reason: str) -> Verdict:
        kept = self.place.quarantine(sender)
        blob.write_durably(kept, raw)
        log.warning("%s (kept in %s)", reason, kept.relative_to(self.place.path))
        return Verdict(sender, False, reason)

    @staticmethod
    def _say(verdict: Verdict) -> Verdict:
        log.info(verdict.text)
        return verdict

    # --- when to fuse, and fusing ----------------------------------------------------------------------------------------

    @property
    def wanted(self) -> list[str]:
        """Who takes part in this round: who masks together, or those drawn where some are; otherwise whoever comes."""
        if self.broadcast.roster:
            return sorted(self.broadcast.roster)
        drawn = self.recipe.participation.fraction < 1  # only where a recipe deals the data and so names the sites
        return self.plan.participants(self.broadcast.round) if self.plan and drawn else []

    @property
    def sites(self) -> int:
        """How many sites there are."""
        return len(self.plan.clients) if self.plan else partitions.of(self.recipe.partition).clients

    @property
    def expected(self) -> int:
        """How many of them take part in this round."""
        return len(self.wanted) or self.sites

    @property
    def quorum(self) -> int:
        return min(self.recipe.quorum or self.expected, self.expected)

    @property
    def last_round(self) -> bool:
        return self.broadcast.round == self.recipe.rounds

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    @property
    def overdue(self) -> bool:
        """Whether the recipe's deadline has passed."""
        return self.recipe.deadline is not None and self.waited >= self.recipe.deadline

    def takes_part(self, name: str) -> bool:
        """Whether to ask the site of that name: all but those that rest in this round. One that nobody expects hears why it is refused."""
        return not self.wanted or name in self.wanted or self.plan is None or name not in self.plan.clients

    def done(self) -> bool:
        """Whether to stop waiting: all are here; or the deadline has passed; or, without one, the quorum is here."""
        deadline, here = self.recipe.deadline, len(self.held)
        if here >= self.expected or (deadline is None and here >= self.quorum and not self.late):
            return True
        return self.overdue

    def conclude(self) -> None:
        """Fuse what is here into the model and write the result."""
        here = len(self.held)
        if self.late:
            log.info("the model was made before; fuse again with oneround fuse %s", self.place.path)
            return
        if here < self.expected:
            passed = (
                f"the deadline of {duration(self.recipe.deadline)} passed"
                if self.recipe.deadline
                else "the quorum is here"
            )
            log.info("%s: %d of %d uploads, quorum %d", passed, here, self.expected, self.quorum)
        if here < self.quorum:
            raise RunError(
                f"{self.place.path}: {here} of {self.expected} uploads when the deadline of {duration(self.recipe.deadline or 0)} "
                f"passed, quorum = {self.quorum}; nothing is fused, they are kept: start the server again to go on waiting"
            )
        self._fuse()

    def _fuse(self) -> None:
        """Score and fuse this round's uploads: into the result, or into what the next round begins with."""
        place, broadcast, recipe = self.place, self.broadcast, self.recipe
        uploads = UploadFolder([place.upload(name) for name in sorted(self.held)], broadcast, self.statistics)
        site = self._server()
        made: dict[str, GlobalModel] = {}
        scores: dict[str, Score] = {}
        alone: dict[str, Score] = {}
        started = time.monotonic()
        rules = {rule.label: rule for rule in acts.rules_of(recipe)}
        with site.arithmetic(sum(tensor.numel() for tensor in broadcast.weights.values())):
            if len(self.data.test):
                scores, alone, _ = score_uploads(rules, uploads, broadcast, self.data.test, site, made)
            if not self.last_round and not made:
                made[next(iter(rules))] = acts.fuse(uploads, broadcast, site)
        place.metrics.keep([event for event in place.metrics if event["epoch"] <= broadcast.first_epoch])
        epochs = range(broadcast.first_epoch + 1, broadcast.last_epoch + 1)
        before = max((event.get("elapsed", 0.0) for event in place.metrics), default=0.0)
        record(place, uploads, epochs, scores, alone, {}, made, time.monotonic() - started, before + self.waited)
        traffic = self._count_traffic(uploads)
        if not self.last_round:
            log.info("round %d of %d is over: %s", broadcast.round, recipe.rounds, _told(scores))
            acts.advance(made[next(iter(rules))], broadcast).write(place.broadcast)
            self._begin_round(Broadcast.read(place.broadcast))
            return
        facts = Facts(self.data.name, self._partition(), traffic, self._remarks())
        finish(place, uploads, site, facts, scores, alone, made, self.data.test)
        log.info("fused %d uploads: %s", len(uploads), _told(scores))

    def _count_traffic(self, uploads: UploadFolder) -> dict[str, tuple[int, int]]:
        """Bytes down to and up from every site, of this round and those before; kept, since a server may be started anew."""
        path = self.place.path / "traffic.json"
        every: dict[str, dict[str, list[int]]] = {}
        if self.broadcast.round > 1 and path.is_file():
            every = self.place.read_json(
                "traffic.json", [], "remove it; the bytes of earlier rounds are then not counted"
            )
        every[str(self.broadcast.round)] = {each.stem: [len(self.sent), each.stat().st_size] for each in uploads.paths}
        if self.recipe.rounds > 1:
            self.place.write_json("traffic.json", every)
        names = {name for each in every.values() for name in each}
        pairs = {name: [each[name] for each in every.values() if name in each] for name in sorted(names)}
        return {name: (sum(down for down, _ in both), sum(up for _, up in both)) for name, both in pairs.items()}

    def _partition(self) -> str:
        """Who held what, as far as is known here: of the partition, or of the sites and what they said."""
        if self.plan:
            return self.plan.split.digest
        return hashlib.sha256(repr(sorted(self.held.items())).encode()).hexdigest()

    def _remarks(self) -> list[str]:
        told = self.plan.remarks(simulated=False) if self.plan else []
        missing = self.expected - len(self.held)
        return told + ([f"{missing} of {self.expected} sites are missing: no upload in time"] if missing else [])


def _told(scores: dict[str, Score]) -> str:
    return (
        ", ".join(f"{name} {score.accuracy:.2%}" for name, score in scores.items()) or "no test images here to score it"
    )
