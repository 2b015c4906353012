"""Ridge-routed experts: a ridge classifier of the sums weights the clients' networks.

    π_k(x) = Σ_c p_r(c|x)^trust·n_kc/n_c,  g_k ∝ π_k·exp(−β t_k(x)),  score_c = p_r(c|x)^η · Σ_k g_k(x) q_k(c|x)

p_r is the ridge's posterior, q_k the client's: softmax(z_k·P_kᵀ/T), or the Gaussian one of its class means (`typicality`), for
which t_k measures how atypical x is for client k, or as the first, of features standardised as in FedSRA (`standardised`). Options left out (T, trust, β, η) are chosen on validation images if the
server has some, from a grid that includes the ridge alone (the experts have no weight) and the experts alone (trust 0, η 0), so
a weak part can be dropped; without such images they are DEFAULTS.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oneround.config.parts import Needs
from oneround.config.sections import NotNegative, Positive
from oneround.data import Images
from oneround.data.augment import preprocessing
from oneround.fusion.base import EnsembleRule, Rule, SavedModel, UploadExperts, rules
from oneround.fusion.fedsra import TEMPERATURE, FedSRA, cosines, own_moments, standardised
from oneround.fusion.ridge import Ridge, pooled_solution, restore_linear
from oneround.fusion.typicality_gated import LOG_CLOSED, TINY, TypicalityGated, add_votes, typicality
from oneround.models.inference import Combiner, Ensemble, ExpertOutput, Experts, Inference, Totals
from oneround.models.linear import Linear
from oneround.models.prototype import on_cpu
from oneround.protocol.messages import Broadcast, Shapes, Upload
from oneround.site import Site

log = logging.getLogger("oneround")


class Setting(NamedTuple):
    """How ridge and experts are combined."""

    temperature: float = 1.0
    trust: float = 1.0
    beta: float = 1.0
    eta: float = 0.5
    experts: float = 1.0
    """0: predict with the ridge classifier alone."""


DEFAULTS = Setting()
RIDGE_ONLY = Setting(eta=1.0, experts=0.0)
GRID = {
    "temperature": (0.25, 0.5, 1.0, 2.0, 4.0),
    "trust": (0.0, 0.5, 1.0, 2.0),
    "beta": (0.0, 0.5, 1.0, 2.0),
    "eta": (0.0, 0.25, 0.5, 1.0, 2.0),
}


@rules.register("routed")
class Routed(EnsembleRule):
    """Clients' predictions, weighted by the ridge's posterior over classes, combined with the ridge's own."""

    posterior: Literal["prototypes", "typicality", "standardised"] = "prototypes"
    """The client's prediction: the softmax of its prototypes, or of its class means and covariance; `standardised`: of its
    centred prototypes and features standardised by the moments of its own images."""
    temperature: Positive | None = None
    """Temperature of the clients' predictions; left out, like the next three: chosen on validation images."""
    trust: NotNegative | None = None
    """Power of the ridge's posterior in the clients' weights."""
    beta: NotNegative | None = None
    """Penalty of a client for which x is atypical; only with `posterior: typicality`."""
    eta: NotNegative | None = None
    """Power of the ridge's own posterior."""

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(sums=True)

    @property
    def discloses(self) -> str:
        return "; ".join(filter(None, (Ridge().discloses, self._statistics_rule.discloses)))

    @property
    def _statistics_rule(self) -> Rule:
        """The rule whose statistics the clients' predictions need."""
        if self.posterior == "standardised":
            return FedSRA()
        return TypicalityGated() if self.posterior == "typicality" else Rule()

    def statistics(self, classes: int, features: int) -> Shapes:
        return self._statistics_rule.statistics(classes, features)

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return self._statistics_rule.measure(unit, labels, classes)

    def measure_raw(self, features: Tensor) -> dict[str, Tensor]:
        return self._statistics_rule.measure_raw(features)

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        self._statistics_rule.check_statistics(statistics)

    @torch.no_grad()  # not inference mode: distillation may differentiate through the ridge
    def ready(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Routing:
        solution, counts = pooled_solution(uploads, broadcast, server)
        ridge = Ridge().model(solution, counts, broadcast, server.session)
        class_totals = counts.float() / broadcast.recipe.summed.copies
        setting = DEFAULTS._replace(**self._options)
        routing = Routing(ridge, class_totals, setting, self.posterior).to(server.device).eval()
        if server.validation:
            experts = UploadExperts(uploads, broadcast, server.device)
            outputs = routing.evaluate(server.validation, experts, server.device, *preprocessing(broadcast.recipe))
            routing.setting = self._select(routing, outputs, server.validation.labels.to(server.device))
            log.info("routed: chosen on %d validation images: %s", len(server.validation), routing.setting)
        return routing

    @property
    def _options(self) -> dict[str, float]:
        """The options that are set; the others are chosen."""
        return self.model_dump(include=set(GRID), exclude_none=True)

    def _select(self, routing: Routing, outputs: tuple[Totals, list[View]], labels: Tensor) -> Setting:
        """The setting with the highest accuracy; ties are broken by the log-likelihood."""
        axes = GRID | {name: (value,) for name, value in self._options.items()}
        if self.posterior != "typicality":
            axes["beta"] = (0.0,)
        tried = [Setting(*values) for values in itertools.product(*axes.values())]
        if not self._options:
            tried.insert(0, RIDGE_ONLY)
        performance = routing.performance(outputs, labels)
        return max(tried, key=performance)

    def restore(self, saved: SavedModel) -> Inference:
        tensors = saved.shards[0]()
        ridge, setting = restore_linear(tensors, saved.recipe, False), Setting(*tensors["setting"].tolist())
        class_totals = tensors["class_totals" if "class_totals" in tensors else "held"]  # its name in version 0.1.0
        return Ensemble(Routing(ridge, class_totals, setting, self.posterior).eval(), saved.experts(1))


View = tuple[Tensor, Tensor, Tensor]
"""One client's atypicality of the images (n, 1), logits (n, classes) and share of each class (classes,)."""


class Routing(Combiner):
    """Combines an ensemble's experts, weighted by the ridge."""

    class_totals: Tensor

    def __init__(self, ridge: Linear, class_totals: Tensor, setting: Setting, posterior: str) -> None:
        """`class_totals` (classes,): images of each class over all clients."""
        super().__init__()
        self.ridge, self.setting, self.posterior = ridge, setting, posterior
        self.register_buffer("class_totals", class_totals)

    def begin(self, images: Tensor) -> Totals | None:
        return self._initial(self.ridge(images).log_softmax(1))

    def begin_all(self, images: Images, device: torch.device, mean: float, std: float) -> Totals:
        """`begin` for a whole set; the ridge's scores may be cached."""
        return self._initial(self.ridge.predict(images, device, mean, std).log_softmax(1))

    @staticmethod
    def _initial(log_p: Tensor) -> Totals:
        none = torch.zeros_like(log_p)
        return {"ridge": log_p, "gate": none[:, :1] + LOG_CLOSED, "weight": none[:, :1], "votes": none}

    def view(self, output: ExpertOutput) -> View:
        """One client's view of a batch."""
        share = output.expert.class_counts / self.class_totals.clamp(min=1)
        if self.posterior == "typicality":
            atypicality, logits = typicality(output)
            return atypicality.clamp(max=-LOG_CLOSED), logits, share
        logits = output.logits
        if self.posterior == "standardised":
            features = standardised(output.features, own_moments(output))
            logits = cosines(features, output.expert.net.prototypes) / TEMPERATURE
        return torch.zeros_like(logits[:, :1]), logits, share

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        assert totals is not None, "begin comes first"
        return self._fold(totals, self.view(output), self.setting)

    @staticmethod
    def _fold(totals: Totals, view: View, setting: Setting) -> Totals:
        atypicality, logits, share = view
        routed = (setting.trust * totals["ridge"]).softmax(1) @ share[:, None]
        gate = (routed.clamp(min=TINY).log() - setting.beta * atypicality).clamp(min=LOG_CLOSED)
        return totals | add_votes(totals, gate, (logits / setting.temperature).softmax(1))

    def scores(self, totals: Totals) -> Tensor:
        return self._combine(totals, self.setting)

    @staticmethod
    def _combine(totals: Totals, setting: Setting) -> Tensor:
        votes = (totals["votes"] / totals["weight"].clamp(min=TINY)).clamp(min=TINY).log()
        return setting.experts * votes + setting.eta * totals["ridge"]

    def evaluate(
        self, images: Images, experts: Experts, device: torch.device, mean: float, std: float
    ) -> tuple[Totals, list[View]]:
        """Outputs of the ridge and the experts on a set, to combine with many settings; one expert in memory at a time."""
        initial = self.begin_all(images, device, mean, std)
        views, batches = [], list(images.batches(device, mean, std))
        for expert in experts:
            atypicality, logits, share = zip(*(self.view(expert.output(batch)) for batch in batches), strict=True)
            views.append((torch.cat(atypicality), torch.cat(logits), share[0]))
        return initial, views

    def performance(
        self, outputs: tuple[Totals, list[View]], labels: Tensor
    ) -> Callable[[Setting], tuple[float, float]]:
        """A function: setting → accuracy and mean log-likelihood on evaluated images."""
        totals, views = outputs

        @lru_cache(1)  # settings that differ in what follows come one after another
        def folded(experts_only: Setting) -> Totals:
            return reduce(lambda sums, view: self._fold(sums, view, experts_only), views, totals)

        def measure(setting: Setting) -> tuple[float, float]:
            scores = self._combine(folded(setting._replace(eta=0.0, experts=1.0)), setting)
            log_likelihood = scores.log_softmax(1).gather(1, labels[:, None]).mean()
            return float((scores.argmax(1) == labels).float().mean()), float(log_likelihood)

        return measure

    def shard(self) -> dict[str, Tensor]:
        (ridge,) = self.ridge.shards()
        setting = torch.tensor(self.setting, dtype=torch.float64)
        return {**ridge, "class_totals": on_cpu(self.class_totals), "setting": setting}
