"""The server's intake: an upload is checked, written to disk, and only then counted. Nothing here knows Flower."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from oneround import acts
from oneround.errors import ProtocolError, RunError, in_one_line, refused
from oneround.federate.sites import check_name
from oneround.formatting import format_bytes
from oneround.protocol import Broadcast, Upload, blob
from oneround.protocol.messages import check_norms
from oneround.runs.folder import RunFolder
from oneround.server.plan import Plan

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Verdict:
    """Whether an upload is counted, and why not."""

    counted: bool
    text: str


class Ending(NamedTuple):
    """Why the server has stopped waiting, and what to do if too little is here."""

    reason: str
    advice: str


class UploadIntake:
    """The uploads of one round: which are expected, which have arrived, and whether to go on waiting."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self.plan, self.folder, self.recipe = plan, folder, plan.recipe
        self.late = folder.result.exists()
        """Whether the model has been made before: later uploads are kept for `oneround fuse`."""
        self.unusable: dict[str, str] = {}
        """Uploads that were counted but cannot be fused: digest of the content → client."""
        self.begin_round(Broadcast.read(folder.broadcast))

    def begin_round(self, broadcast: Broadcast) -> None:
        """Accept uploads for this broadcast from now on; the recipe's deadline starts again."""
        self.started = time.monotonic()
        self.broadcast = broadcast
        self.sent = self.folder.broadcast.read_bytes()
        self.statistics = acts.statistics_of(broadcast)
        self.received = self._received()
        """Counted uploads: client → digest of the content."""

    def _received(self) -> dict[str, str]:
        """Uploads that are on disk from an earlier start; damaged ones go to quarantine."""
        received = {}
        for path in sorted((self.folder.path / "uploads").glob("*.safetensors")):
            try:
                received[path.stem] = Upload.read(path, self.broadcast, self.statistics).content
            except Exception as error:  # libraries may raise anything on a damaged file
                log.warning("%s; moved to quarantine, it is asked for again", in_one_line(error))
                path.rename(self.folder.quarantine(path.stem))
        if received:
            log.info("%d uploads are here already: %s", len(received), ", ".join(received))
        return received

    # --- checking and writing uploads ------------------------------------------------------------------------------------

    def take(self, raw: bytes, sender: str, name: str = "") -> Verdict:
        """Check an upload, write it durably, count it. `name`: the site the sender's key is registered for, if that is known."""
        try:
            upload = Upload.unpack(raw, self.broadcast, self.statistics, sender)
            client, content = upload.client, upload.content
            check_norms(upload, self.broadcast, sender)
            check_name(client, name, sender)
            if upload.epoch != self.broadcast.last_epoch and not upload.stopped:
                raise refused(sender, f"trained to epoch {upload.epoch} of {self.broadcast.last_epoch}")
            if self.participants and client not in self.participants:
                raise refused(sender, f"{client} takes no part in round {self.broadcast.round}")
            acts.check_usable(upload, self.broadcast, sender)
            if content in self.unusable:
                raise refused(sender, f"this upload of {client} could not be fused before")
            if self.received.get(client, content) != content:
                raise refused(
                    sender, f"another upload of {client} is counted already; give every site a name of its own"
                )
        except Exception as error:  # libraries may raise anything on a hostile file
            reason = in_one_line(error)
            if not isinstance(error, ProtocolError):
                reason = f"{sender}: refused, it cannot be used ({reason})"
            path = self.folder.quarantine(sender)
            blob.write_durably(path, raw)
            log.warning("%s (kept in %s)", reason, path.relative_to(self.folder.path))
            return Verdict(False, reason)
        if client in self.received:
            text = f"{client}: the same upload again, it is counted already"
        else:
            blob.write_durably(self.folder.upload(client), raw)
            self.received[client] = content
            outcome = "kept for oneround fuse, the model is made already" if self.late else "counted"
            count = f"{len(self.received)} of {self.expected}"
            text = f"{client}: upload of {format_bytes(len(raw))} {outcome} ({count})"
        log.info("%s", text)
        return Verdict(True, text)

    def discard(self, client: str) -> None:
        """Drop an upload: it cannot be fused, and the same one is not taken again."""
        self.unusable[self.received.pop(client)] = client
        path = self.folder.quarantine(client)
        self.folder.upload(client).rename(path)
        log.warning("%s: its upload cannot be fused; moved to %s", client, path.relative_to(self.folder.path))

    # --- which sites to expect, and when to stop waiting -----------------------------------------------------------------

    @property
    def participants(self) -> list[str]:
        """The sites of this round: those on the roster, or those drawn; empty if every site that connects takes part."""
        if self.broadcast.roster:
            return sorted(self.broadcast.roster)
        return self.plan.participants(self.broadcast.round) if self.recipe.participation.fraction < 1 else []

    @property
    def expected(self) -> int:
        """Number of sites that take part in this round."""
        return len(self.participants) or self.plan.num_sites

    @property
    def quorum(self) -> int:
        return min(self.recipe.quorum or self.expected, self.expected)

    @property
    def last_round(self) -> bool:
        return self.broadcast.round == self.recipe.exchanges

    @property
    def waited(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self.started

    @property
    def overdue(self) -> bool:
        """Whether the recipe's deadline has passed."""
        return self.recipe.deadline is not None and self.waited >= self.recipe.deadline

    def takes_part(self, name: str) -> bool:
        """False only for a known site that is not drawn for this round; an unknown site is asked, and its upload refused."""
        return not self.participants or name in self.participants or name not in self.plan.clients

    def done(self) -> bool:
        """Whether to stop waiting: all uploads have arrived; or the deadline has passed; or, without one, the quorum is reached."""
        count, quorum_ends = len(self.received), self.recipe.deadline is None and not self.late
        return count >= self.expected or self.overdue or (quorum_ends and count >= self.quorum)

    def check_quorum(self, ending: Ending) -> None:
        """Log how many uploads are fused; RunError if they are fewer than the quorum."""
        count = len(self.received)
        if count < self.expected:
            log.info("%s: %d of %d uploads, quorum %d", ending.reason, count, self.expected, self.quorum)
        if count < self.quorum:
            raise RunError(
                f"{self.folder.path}: {count} of {self.expected} uploads when {ending.reason}, quorum = {self.quorum}; nothing is "
                f"fused, they are kept: {ending.advice}"
            )

    def remarks(self) -> list[str]:
        """Sites that are not in the model, and why."""
        unusable = sorted(set(self.unusable.values()) - self.received.keys())
        remarks = [f"{name} is left out: its upload could not be fused" for name in unusable]
        missing = self.expected - len(self.received) - len(unusable)
        return remarks + ([f"{missing} of {self.expected} sites are missing: no upload in time"] if missing > 0 else [])

    # --- traffic ---------------------------------------------------------------------------------------------------------

    def count_traffic(self) -> None:
        """Write this round's bytes down to and up from every site to disk, so that they survive a restart of the server."""
        rounds = self._traffic() if self.broadcast.round > 1 else {}
        rounds[str(self.broadcast.round)] = {
            name: [len(self.sent), self.folder.upload(name).stat().st_size] for name in sorted(self.received)
        }
        self.folder.write_json("traffic.json", rounds)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes down and up by site, over all rounds so far."""
        down, up = Counter[str](), Counter[str]()
        for by_site in self._traffic().values():
            for name, (down_bytes, up_bytes) in by_site.items():
                down[name] += down_bytes
                up[name] += up_bytes
        return {name: (down[name], up[name]) for name in sorted(down)}

    def _traffic(self) -> dict[str, dict[str, list[int]]]:
        if not (self.folder.path / "traffic.json").is_file():
            return {}
        fix = "remove it; the bytes of earlier rounds are then not counted"
        return self.folder.read_json("traffic.json", fix)
