"""Stacked experts: ridge regression on all clients' networks' features, from sums that every site sends in a second exchange.

    φ(x) = (z_1(x), …, z_K(x), φ₀(x)),  W = (ΣG_k + λI)⁻¹ ΣM_k on centred blocks of equal mean variance

z_k are the unit features of client k's network, φ₀ fixed features (patches) beside them. Like FENS (Allouah et al., NeurIPS 2024), the
clients learn how to combine their frozen networks; here that is linear, in closed form and in one exchange. The sums add up to
the pooled ones whatever the partition, so whoever is left out is left out exactly: its sums, and its network's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from oneround.config.parts import Needs
from oneround.fusion.base import rules
from oneround.fusion.ridge import Ridge, total_sums
from oneround.models import Inference
from oneround.models.features import EXPERT, Constants, StackedFeatures, Symmetric
from oneround.protocol.messages import Broadcast, Upload, UploadFolder
from oneround.site import Site
from oneround.sums import Moments, Solution, constants_of, features_of, solve

TINY = 1e-12


@rules.register("stacked")
class Stacked(Ridge):
    """A linear classifier of all networks' features and fixed features beside them, from the clients' sums."""

    experts: Literal["present", "all"] = "present"
    """Whose networks' features are used: of clients whose sums are here, or of all whose networks went back to the sites."""

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(experts=True)

    @property
    def discloses(self) -> str:
        return "second moments of all networks' features of its images, features summed by class"

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        def solved() -> tuple[Solution, Tensor, Constants]:
            with torch.inference_mode(False), torch.no_grad():  # cached; distillation may differentiate through it
                return self._solve(uploads, broadcast, server)

        if isinstance(uploads, UploadFolder):
            key = (uploads.sums_key, uploads.broadcast.digest, server.device, self.penalty, self.experts)
            solution, counts, constants = server.session.once("stacked", key, solved)
        else:
            solution, counts, constants = solved()
        return self.classifier(solution, counts, constants, broadcast, server.session).to(server.device)

    def _solve(
        self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site
    ) -> tuple[Solution, Tensor, Constants]:
        constants = constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
        total, blocks = total_sums(uploads, broadcast, server.device), _blocks(broadcast, constants)
        present = {upload.client for upload in uploads}
        absent = [number for number, name in enumerate(broadcast.experts) if name not in present]
        if absent and self.experts == "present":
            total, constants = _without(absent, total, blocks, constants)
            blocks = [size for number, size in enumerate(blocks) if number not in absent]
        return solve_levelled(total, blocks, self.penalty, broadcast.recipe.summed.copies), total.counts, constants


def _blocks(broadcast: Broadcast, constants: Constants) -> list[int]:
    """Number of features of each network, and of those beside them."""
    built = features_of(broadcast.recipe, broadcast.shape, constants)
    stacked = built.inner if isinstance(built, Symmetric) else built
    assert isinstance(stacked, StackedFeatures)
    return stacked.blocks


def _without(
    absent: Sequence[int], total: Moments, blocks: Sequence[int], constants: Constants
) -> tuple[Moments, Constants]:
    """The sums and constants without these networks' features."""
    keep = torch.cat([torch.full((size,), number not in absent) for number, size in enumerate(blocks)])
    chosen = keep.nonzero()[:, 0].to(total.gram.device)
    left_out = tuple(f"{EXPERT}{number:04d}." for number in absent)
    others = {name: value for name, value in constants.items() if not name.startswith(left_out)}
    gram = total.gram.index_select(0, chosen).index_select(1, chosen)
    return Moments(gram, total.cross[chosen], total.total[chosen], total.counts), others


def solve_levelled(total: Moments, blocks: Sequence[int], penalty: float | None = None, copies: int = 1) -> Solution:
    """The ridge solution with every block of features scaled to a mean variance of 1; it takes features as they are.

    The sums are overwritten: there may not be memory for others.
    """
    mean = total.total / total.samples
    variance = (total.gram.diagonal() / total.samples - mean.square()).clamp(min=0)
    scale = torch.cat([(part.mean() + TINY).rsqrt().expand(len(part)) for part in variance.split(list(blocks))])
    levelled = Moments(
        total.gram.mul_(scale).mul_(scale[:, None]), total.cross * scale[:, None], total.total * scale, total.counts
    )
    solution = solve(levelled, penalty, copies)
    return Solution(
        mean, solution.weights * scale[:, None], solution.bias, solution.penalty, solution.freedom, solution.noise
    )
