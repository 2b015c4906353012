"""A site's sums of fixed features: one pass over its images, cached so that a later snapshot need not repeat it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from oneround import sums
from oneround.data import Images
from oneround.data.augment import preprocessing
from oneround.errors import ProtocolError, RunError
from oneround.privacy.masks import Masked
from oneround.protocol import Broadcast, blob
from oneround.site import Site
from oneround.sums import Moments


def feature_sums(
    broadcast: Broadcast, site: Site, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Tensor]:
    """The recipe's sums, packed for an upload; empty where it asks for none."""
    recipe = broadcast.recipe
    if recipe.sums is None or not broadcast.sums:
        return {}
    assert site.data is not None
    often = recipe.epochs > 1 and not recipe.stacked  # with every snapshot
    path = site.folder / "sums" / "kept.safetensors" if site.folder and often else None
    owner = {"client": site.name, "recipe_digest": broadcast.digest}
    if path is not None:
        with suppress(ProtocolError):  # missing or damaged: sum again
            manifest, tensors = blob.read(path, "sums")
            if owner.items() <= manifest.items():
                return tensors
    constants = sums.constants_of(recipe, broadcast.shape, broadcast.extras)
    features = sums.features_of(recipe, broadcast.shape, constants).to(site.device)

    def over(images: Images, on_progress: Callable[[int], None] = lambda done: None) -> Moments:
        return sums.gather(
            features,
            images.to(site.device),
            broadcast.classes,
            *preprocessing(recipe),
            mirrored=recipe.summed.mirror == "copies",
            shift=recipe.summed.shift,
            on_progress=on_progress,
        )

    gathered = over(site.data, on_progress)
    if recipe.sums.held_back and site.validation:
        with torch.inference_mode():
            gathered.include(over(site.validation).times(recipe.sums.held_back))
    if recipe.sums.secure:
        return _masked(gathered, broadcast, site)
    upload_sums = sums.packed(gathered, recipe.sums)
    if path is not None:
        blob.write(path, "sums", upload_sums, owner, flush=False, read_soon=True)
    return upload_sums


def _masked(gathered: Moments, broadcast: Broadcast, site: Site) -> dict[str, Tensor]:
    """The sums, masked with this site's secrets."""
    known = site.masker.secrets if site.masker else {}
    if site.masker is None or known.keys() != broadcast.roster.keys() - {site.name}:
        raise RunError(f"{site.name}: sums.secure needs a secret with each other site, and knows {len(known)}")
    masked: Masked = site.masker.mask(sums.rescale(gathered, broadcast.extras), broadcast.context)
    return masked.numbers
