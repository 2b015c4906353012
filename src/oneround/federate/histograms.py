"""The class histograms of all sites, collected before any of them is sent the broadcast: a split follows from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from oneround.errors import RunError, refused
from oneround.federate.intake import Ending
from oneround.federate.sites import check_name
from oneround.runs.folder import RunFolder
from oneround.runs.integrity import Content

log = logging.getLogger("oneround")
FILE = "histograms.json"
LARGEST = 2**53  # beyond it a count is no whole number in JSON


class HistogramsContent(Content):
    """`histograms.json`"""

    histograms: dict[str, list[int]]


class Histograms:
    """Class counts by site. Each is on disk before it counts, so a server that is started again chooses the same split."""

    def __init__(self, folder: RunFolder, classes: int, participants: Sequence[str], expected: int) -> None:
        """`participants`: names of the sites, if they are known; `expected`: their number."""
        self.folder, self.classes, self.participants, self.expected = folder, classes, participants, expected
        self.counts: dict[str, list[int]] = {}
        if (folder.path / FILE).is_file():
            content = folder.read_json(FILE, "remove it, histograms are asked for again", HistogramsContent)
            self.counts = content["histograms"]
            log.info("%d histograms are here already: %s", len(self.counts), ", ".join(self.counts))

    @property
    def complete(self) -> bool:
        return len(self.counts) >= self.expected

    def whole(self, ending: Ending) -> dict[str, Tensor]:
        """All histograms by site; RunError if some are missing."""
        if not self.complete:
            raise RunError(
                f"{self.folder.path}: {len(self.counts)} of {self.expected} histograms when {ending.reason}; they are kept: {ending.advice}"
            )
        return {name: torch.tensor(self.counts[name]) for name in sorted(self.counts)}

    def take(self, name: str, text: str, sender: str, registered: str = "") -> None:
        """Count a site's histogram (JSON); ProtocolError if it is refused. `registered`: as for a key."""
        check_name(name, registered, sender)
        try:
            counts = json.loads(text)
        except ValueError:
            counts = None
        whole = isinstance(counts, list) and all(type(count) is int and 0 <= count < LARGEST for count in counts)
        if not whole or len(counts) != self.classes or not any(counts):
            raise refused(sender, f"{text[:80]!r} is no histogram of {self.classes} classes")
        if self.participants and name not in self.participants:
            raise refused(sender, f"{name} takes no part")
        if self.counts.get(name, counts) != counts:
            raise refused(sender, f"another histogram of {name} is here already; give every site a name of its own")
        if name in self.counts or self.complete:
            return
        self.counts[name] = counts
        self.folder.write_json(FILE, {"histograms": self.counts})
        log.info("%s: histogram counted (%d of %d)", name, len(self.counts), self.expected)
