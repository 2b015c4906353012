"""A companion works beside a client's training: it is told of every step and may change the network in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from oneround.parts import Part, Slot
from oneround.protocol import Broadcast
from oneround.site import Site

if TYPE_CHECKING:
    from oneround.models import PrototypeNet


class Companion(Protocol):
    """What stands beside one client."""

    def after_step(
        self, net: PrototypeNet, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float, last: bool
    ) -> None:
        """A step was taken on this batch (all views) at this learning rate; `last`: the training's last one."""
        ...

    def largest_batch(self) -> int:
        """After memory ran out: the largest batch size it has room for; 0 if none."""
        ...

    def report(self) -> dict[str, float]:
        """What it measured since the last call."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All it has to remember between epochs."""
        ...

    def load(self, told: Mapping[str, Tensor]) -> None: ...


class CompanionPart(Part):
    """A kind of companion."""

    def check(self, broadcast: Broadcast) -> None:
        """Refuse options that do not fit the clients' network, before anything is trained."""

    def join(self, broadcast: Broadcast, site: Site) -> Companion:
        """Stand beside a client that begins its training."""
        raise NotImplementedError


companions: Slot[CompanionPart] = Slot("companion", CompanionPart)
