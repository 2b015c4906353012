"""Ridge regression on summed statistics: nothing is fused, the sums add up to the pooled answer.

    W = (ΣG_k + λI)⁻¹ ΣM_k on centred features, G_k = Σφφᵀ, M_k = Σφyᵀ

With one-hot targets and an expected squared error σ² a score v_c says −‖v − e_c‖²/2σ² of class c, so v/σ² are its logits; σ² and
λ come from the sums too (generalised cross-validation). It reveals second moments of the features and class counts, or, under masks
(`sums.secure`), only their total over all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from oneround.fusion.rule import Rule, rules
from oneround.models import Inference
from oneround.models.linear import Linear
from oneround.protocol import Broadcast, Upload, UploadFolder
from oneround.recipe import Federated
from oneround.sections import Positive
from oneround.site import Site
from oneround.sums import Moments, Solution, constants_of, evened, features_of, solve, unpacked
from oneround.sums.masks import Masked, add_up
from oneround.sums.moments import exact
from oneround.sums.solve import START


@rules.register("ridge")
class Ridge(Rule):
    """A linear classifier of fixed features, from the clients' sums."""

    needs_prototypes: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False

    penalty: Positive | None = None
    """λ over the mean second moment; left out: chosen by generalised cross-validation from the sums alone."""
    priors: Literal["data", "uniform"] = "data"
    """Classes are as frequent as in the clients' data, or all alike."""
    mirrored: bool = False
    """Average the answers to an image and to its mirror image; without effect where features are the same for both."""

    @property
    def needs_sums(self) -> bool:
        return True

    @property
    def reveals(self) -> str:
        return "second moments of fixed features of its images, features summed by class"

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        solution, counts = pooled(uploads, broadcast, server.device, self.penalty)
        return self.model(solution, counts, broadcast).to(server.device)

    def model(self, solution: Solution, counts: Tensor, broadcast: Broadcast) -> Linear:
        """The classifier of a solution, on the CPU."""
        sharpness = 1 / max(solution.noise, 1e-6)
        bias = solution.bias * sharpness
        if self.priors == "uniform":
            bias = bias - torch.where(counts > 0, counts, counts.max()).log()  # a class nobody holds is not raised
        constants = constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
        features = features_of(broadcast.recipe, broadcast.shape, constants)
        solved = {"centre": solution.centre, "weights": solution.weights * sharpness, "bias": bias}
        solved = {name: value.float().contiguous() for name, value in solved.items()}
        return Linear(features, constants, broadcast.shape, solved, self.mirrored)

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        return restored(shards[0], recipe, self.mirrored)


def restored(tensors: dict[str, Tensor], recipe: Federated, mirrored: bool) -> Linear:
    """A saved classifier again."""
    constants = {
        name.removeprefix("features."): value for name, value in tensors.items() if name.startswith("features.")
    }
    channels, height, width = tensors["shape"].tolist()
    shape = (channels, height, width)
    features = features_of(recipe, shape, constants)
    return Linear(features, constants, shape, tensors, mirrored)


def pooled(
    uploads: Sequence[Upload], broadcast: Broadcast, device: torch.device, penalty: float | None = None
) -> tuple[Solution, Tensor]:
    """The ridge solution of all the clients' sums and how many images of each class they are over; the last one is remembered."""
    key = None
    if isinstance(uploads, UploadFolder):
        key = (uploads.key, broadcast.digest, device, penalty)
        if key in _pooled:
            return _pooled[key]
    with torch.inference_mode(False), torch.no_grad():  # remembered for whoever comes, also to be taught through
        total = added(uploads, broadcast, device)
        found = solve(total, penalty, copies_of(broadcast.recipe)), total.counts
    if key is not None:
        _pooled.clear()
        _pooled[key] = found
    return found


_pooled: dict[Any, tuple[Solution, Tensor]] = {}


def added(uploads: Sequence[Upload], broadcast: Broadcast, device: torch.device) -> Moments:
    """The clients' sums, added one after another: two of them in memory, however many there are."""
    size, classes = broadcast.sums["cross"][0]
    where = exact(device)
    if broadcast.recipe.secure:
        masked = (Masked(upload.client, upload.roster, upload.context, upload.sums) for upload in uploads)
        return evened(add_up(masked), broadcast.extras, back=True).to(where)
    total = Moments.zero(size, classes, where)
    for upload in uploads:
        total.include(unpacked(upload.sums, where))
    return total


def copies_of(recipe: Federated) -> int:
    assert recipe.sums is not None
    return recipe.sums.copies


def alone(upload: Upload, broadcast: Broadcast, device: torch.device) -> Linear:
    """A client's own classifier, from its sums alone, at the penalty the search starts from."""
    moments = unpacked(upload.sums, exact(device))
    solution = solve(moments, START, copies_of(broadcast.recipe))
    return Ridge().model(solution, moments.counts, broadcast)
