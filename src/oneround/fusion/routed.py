"""Ridge-routed experts: the sums say whom to ask, the networks know the details.

    π_k(x) = Σ_c p_r(c|x)^trust·n_kc/n_c,  g_k ∝ π_k·exp(−β t_k(x)),  score_c = p_r(c|x)^η · Σ_k g_k(x) q_k(c|x)

p_r is the ridge's posterior, q_k the client's: softmax(z_k·P_kᵀ/T), or the Gaussian one of its class means (`typicality`), for
which t_k says how strange x is to client k. Of what is left out, T, trust, β and η are chosen on validation images if the
server has some, from a grid with the ridge alone at one end (the experts count for nothing) and the experts alone at the other
(trust 0, η 0), so a weak partner is dropped; without such images they are DEFAULTS.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn

from oneround.data import Images
from oneround.data.images import BATCH
from oneround.fusion.ridge import Ridge, copies_of, pooled, restored
from oneround.fusion.rule import EnsembleRule, UploadExperts, restored_experts, rules
from oneround.fusion.typicality import SHUT, TINY, TypicalityGated, judged
from oneround.models import Ensemble, Inference
from oneround.models.inference import Experts, Seen, Totals
from oneround.models.linear import Linear
from oneround.models.prototype import on_cpu
from oneround.protocol import Broadcast, Upload
from oneround.protocol.messages import Shapes
from oneround.protocol.model import preprocessing
from oneround.recipe import Federated
from oneround.sections import NotNegative, Positive
from oneround.site import Site

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Setting:
    """How ridge and experts are combined."""

    temperature: float = 1.0
    trust: float = 1.0
    beta: float = 1.0
    eta: float = 0.5
    experts: float = 1.0
    """0: the ridge alone."""


DEFAULTS = Setting()
ALONE = Setting(eta=1.0, experts=0.0)
GRID = {
    "temperature": (0.25, 0.5, 1.0, 2.0, 4.0),
    "trust": (0.0, 0.5, 1.0, 2.0),
    "beta": (0.0, 0.5, 1.0, 2.0),
    "eta": (0.0, 0.25, 0.5, 1.0, 2.0),
}


@rules.register("routed")
class Routed(EnsembleRule):
    """Clients' answers, weighted by where the ridge thinks x comes from, together with the ridge's own."""

    posterior: Literal["prototypes", "typicality"] = "prototypes"
    """The client's answer: its prototypes' softmax, or that of its class means and covariance."""
    temperature: Positive | None = None
    """Softness of the clients' answers; left out, like the next three: chosen on validation images."""
    trust: NotNegative | None = None
    """Power of the ridge's posterior when it says whom to ask."""
    beta: NotNegative | None = None
    """How much less a client is asked that x is strange to; only with `posterior: typicality`."""
    eta: NotNegative | None = None
    """Power of the ridge's own answer."""

    @property
    def needs_sums(self) -> bool:
        return True

    @property
    def reveals(self) -> str:
        more = f"; {TypicalityGated().reveals}" if self.posterior == "typicality" else ""
        return Ridge().reveals + more

    def statistics(self, classes: int, features: int) -> Shapes:
        return TypicalityGated().statistics(classes, features) if self.posterior == "typicality" else {}

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return TypicalityGated().measure(unit, labels, classes) if self.posterior == "typicality" else {}

    @torch.no_grad()  # not inference mode: a student may be taught through the ridge
    def ready(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Routing:
        solution, counts = pooled(uploads, broadcast, server.device)
        ridge = Ridge().model(solution, counts, broadcast)
        held = counts.float() / copies_of(broadcast.recipe)
        routing = Routing(ridge, held, self._given(DEFAULTS), self.posterior).to(server.device).eval()
        if server.validation is not None and len(server.validation):
            experts = UploadExperts(uploads, broadcast, server.device)
            seen = routing.seen(server.validation, experts, server.device, *preprocessing(broadcast.recipe))
            routing.setting = self._chosen(routing, seen, server.validation.labels.to(server.device))
            log.info("routed: chosen on %d validation images: %s", len(server.validation), routing.setting)
        return routing

    def _given(self, setting: Setting) -> Setting:
        """A setting with the options that were given in place of its own."""
        given = {name: value for name in GRID if (value := getattr(self, name)) is not None}
        return Setting(**{**asdict(setting), **given})

    def _chosen(self, routing: Routing, seen: tuple[Totals, list[View]], labels: Tensor) -> Setting:
        """The setting with most right answers, of equals the one surest of the truth."""
        axes = {name: GRID[name] if getattr(self, name) is None else (getattr(self, name),) for name in GRID}
        if self.posterior == "prototypes":
            axes["beta"] = (0.0,)
        free = all(getattr(self, name) is None for name in GRID)
        tried = [Setting(*values) for values in itertools.product(*axes.values())]
        return max([ALONE] * free + tried, key=lambda setting: routing.judge(seen, labels, setting))

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return RoutedEnsemble(self.ready(uploads, broadcast, server), UploadExperts(uploads, broadcast, server.device))

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        saved = shards[0]
        setting = Setting(**dict(zip(NAMES, saved["setting"].tolist(), strict=True)))
        routing = Routing(restored(saved, recipe, False), saved["held"], setting, self.posterior).eval()
        return RoutedEnsemble(routing, restored_experts(shards[1:], recipe, channels, classes, streamed))


NAMES = [field.name for field in fields(Setting)]
View = tuple[Tensor, Tensor, Tensor]
"""One client's: how strange the images are to it (n, 1), its logits (n, classes), its share of each class (classes,)."""


class Routing(nn.Module):
    """The ridge at the door: what an ensemble combines its experts by."""

    held: Tensor

    def __init__(self, ridge: Linear, held: Tensor, setting: Setting, posterior: str) -> None:
        """`held` (classes,): images of each class over all clients."""
        super().__init__()
        self.ridge, self.setting, self.posterior = ridge, setting, posterior
        self.register_buffer("held", held)

    def begin(self, images: Tensor) -> Totals | None:
        return self._opened(self.ridge(images).log_softmax(1))

    def begin_all(self, images: Images, device: torch.device, mean: float, std: float) -> list[Totals]:
        """The same for every batch of a set, which the ridge may have seen before."""
        log_p = self.ridge.answers(images, device, mean, std).log_softmax(1)
        return [self._opened(each) for each in log_p.split(BATCH)]

    @staticmethod
    def _opened(log_p: Tensor) -> Totals:
        none = torch.zeros_like(log_p)
        return {"ridge": log_p, "gate": none[:, :1] + SHUT, "weight": none[:, :1], "votes": none}

    def view(self, seen: Seen) -> View:
        """What one client makes of images."""
        share = seen.expert.class_counts / self.held.clamp(min=1)
        if self.posterior == "typicality":
            strange, logits = judged(seen)
            return strange.clamp(max=-SHUT), logits, share
        return torch.zeros_like(seen.logits[:, :1]), seen.logits, share

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        assert totals is not None, "begin comes first"
        return self._fold(totals, self.view(seen), self.setting)

    @staticmethod
    def _fold(totals: Totals, view: View, how: Setting) -> Totals:
        """A streaming log-sum-exp of the gates, as in the typicality rule."""
        strange, logits, share = view
        asked = (how.trust * totals["ridge"]).softmax(1) @ share[:, None]
        gate = (asked.clamp(min=TINY).log() - how.beta * strange).clamp(min=SHUT)
        top = torch.maximum(totals["gate"], gate)
        before, now = (totals["gate"] - top).exp(), (gate - top).exp()
        votes = totals["votes"] * before + now * (logits / how.temperature).softmax(1)
        return {"ridge": totals["ridge"], "gate": top, "weight": totals["weight"] * before + now, "votes": votes}

    def scores(self, totals: Totals) -> Tensor:
        return self._scored(totals, self.setting)

    @staticmethod
    def _scored(totals: Totals, how: Setting) -> Tensor:
        votes = (totals["votes"] / totals["weight"].clamp(min=TINY)).clamp(min=TINY).log()
        return how.experts * votes + how.eta * totals["ridge"]

    def seen(
        self, images: Images, experts: Experts, device: torch.device, mean: float, std: float
    ) -> tuple[Totals, list[View]]:
        """What ridge and experts make of images, to be combined in many ways; one expert in memory at a time."""
        opened = self._opened(self.ridge.answers(images, device, mean, std).log_softmax(1))
        views, batches = [], list(images.batches(device, mean, std))
        for expert in experts:
            strange, logits, share = zip(*(self.view(expert.see(batch)) for batch in batches), strict=True)
            views.append((torch.cat(strange), torch.cat(logits), share[0]))
        return opened, views

    def judge(self, seen: tuple[Totals, list[View]], labels: Tensor, how: Setting) -> tuple[float, float]:
        """How good a setting is on images seen: the share of right answers, and how sure it is of the truth."""
        totals, views = seen
        for view in views:
            totals = self._fold(totals, view, how)
        scores = self._scored(totals, how)
        sure = scores.log_softmax(1).gather(1, labels[:, None]).mean()
        return float((scores.argmax(1) == labels).float().mean()), float(sure)


class RoutedEnsemble(Ensemble):
    """An ensemble that is saved with its routing first."""

    rule: Routing

    def shards(self) -> Iterator[dict[str, Tensor]]:
        (ridge,) = self.rule.ridge.shards()
        setting = torch.tensor([getattr(self.rule.setting, name) for name in NAMES], dtype=torch.float64)
        yield {**ridge, "held": on_cpu(self.rule.held), "setting": setting}
        yield from super().shards()
