"""Ridge regression on summed statistics: the clients' sums add up to the pooled solution.

    W = (ΣG_k + λI)⁻¹ ΣM_k on centred features, G_k = Σφφᵀ, M_k = Σφyᵀ

With one-hot targets and an expected squared error σ², scores v give class c the log-likelihood −‖v − e_c‖²/2σ², so v/σ² are
logits. σ² and λ follow from the sums too (generalised cross-validation). It discloses second moments of the features and class
counts, or, with masks (`sums.secure`), only their total over all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from oneround.config.parts import Needs
from oneround.config.recipe import Federated
from oneround.config.sections import Positive
from oneround.fusion.base import Rule, SavedModel, rules
from oneround.models import Inference
from oneround.models.features import Constants
from oneround.models.linear import Linear
from oneround.privacy.masks import Masked, add_up
from oneround.protocol.messages import Broadcast, Upload, UploadFolder, strip_prefix
from oneround.session import ScoringSession
from oneround.site import Site
from oneround.sums import Moments, Solution, constants_of, features_of, rescale, solve, unpacked
from oneround.sums.moments import float64_device
from oneround.sums.solve import START


@rules.register("ridge")
class Ridge(Rule):
    """A linear classifier of fixed features, from the clients' sums."""

    penalty: Positive | None = None
    """λ over the mean second moment; default: chosen by generalised cross-validation from the sums alone."""
    priors: Literal["data", "uniform"] = "data"
    """Class priors: as in the clients' data, or uniform."""
    mirrored: bool = False
    """Average the scores of an image and of its mirror image; no effect where their features are equal."""

    @property
    def needs(self) -> Needs:
        return Needs(sums=True)

    @property
    def discloses(self) -> str:
        return "second moments of fixed features of its images, features summed by class"

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        solution, counts = pooled_solution(uploads, broadcast, server, self.penalty)
        return self.model(solution, counts, broadcast, server.session).to(server.device)

    def model(
        self, solution: Solution, counts: Tensor, broadcast: Broadcast, session: ScoringSession | None = None
    ) -> Linear:
        """The classifier of a solution, on the CPU."""
        constants = constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
        return self.classifier(solution, counts, constants, broadcast, session)

    def classifier(
        self,
        solution: Solution,
        counts: Tensor,
        constants: Constants,
        broadcast: Broadcast,
        session: ScoringSession | None = None,
    ) -> Linear:
        """The classifier of a solution on the features that these constants make."""
        sharpness = 1 / max(solution.noise, 1e-6)
        bias = solution.bias * sharpness
        if self.priors == "uniform":
            bias = bias - torch.where(counts > 0, counts, counts.max()).log()  # a class without images is not raised
        features = features_of(broadcast.recipe, broadcast.shape, constants)
        solved = {"centre": solution.centre, "weights": solution.weights * sharpness, "bias": bias}
        solved = {name: value.float().contiguous() for name, value in solved.items()}
        return Linear(features, constants, broadcast.shape, solved, self.mirrored, session)

    def restore(self, saved: SavedModel) -> Inference:
        return restore_linear(saved.shards[0](), saved.recipe, self.mirrored)


def restore_linear(tensors: dict[str, Tensor], recipe: Federated, mirrored: bool) -> Linear:
    """Restore a saved classifier."""
    constants = strip_prefix(tensors, "features")
    channels, height, width = tensors["shape"].tolist()
    shape = (channels, height, width)
    return Linear(features_of(recipe, shape, constants), constants, shape, tensors, mirrored)


def pooled_solution(
    uploads: Sequence[Upload], broadcast: Broadcast, server: Site, penalty: float | None = None
) -> tuple[Solution, Tensor]:
    """The ridge solution of all the clients' sums, and its class counts; solved once per session."""

    def solved() -> tuple[Solution, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # cached; distillation may differentiate through it
            total = total_sums(uploads, broadcast, server.device)
            return solve(total, penalty, broadcast.recipe.summed.copies), total.counts

    if not isinstance(uploads, UploadFolder):
        return solved()
    return server.session.once("ridge", (uploads.sums_key, broadcast.digest, server.device, penalty), solved)


def total_sums(uploads: Sequence[Upload], broadcast: Broadcast, device: torch.device) -> Moments:
    """The clients' sums, added one after another: at most two of them are in memory."""
    size, classes = broadcast.sums["cross"][0]
    where = float64_device(device)
    if broadcast.masked:
        masked = (Masked(upload.client, upload.roster, upload.context, upload.sums) for upload in uploads)
        return rescale(add_up(masked), broadcast.extras, back=True).to(where)
    total = Moments.zero(size, classes, where)
    for upload in uploads:
        total.include(unpacked(upload.sums, where))
    return total


def local_classifier(upload: Upload, broadcast: Broadcast, device: torch.device) -> Linear:
    """A client's own classifier, from its own sums, at the first penalty of the search."""
    moments = unpacked(upload.sums, float64_device(device))
    solution = solve(moments, START, broadcast.recipe.summed.copies)
    return Ridge().model(solution, moments.counts, broadcast)
