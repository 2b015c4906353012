"""The other thing that happens at a site: one pass that sums fixed features. It is kept, so a later snapshot need not repeat it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from oneround import sums
from oneround.errors import ProtocolError, RunError
from oneround.protocol import Broadcast, blob
from oneround.protocol.model import preprocessing
from oneround.site import Site
from oneround.sums import Moments
from oneround.sums.masks import Masked


def of_site(broadcast: Broadcast, site: Site, told: Callable[[int], None] = lambda done: None) -> dict[str, Tensor]:
    """The sums a recipe asks for, packed as an upload carries them; none where it asks for none."""
    recipe = broadcast.recipe
    if recipe.sums is None:
        return {}
    assert site.data is not None
    kept = site.folder / "sums" / "kept.safetensors" if site.folder and recipe.epochs > 1 else None
    said = {"client": site.name, "recipe_digest": broadcast.digest}
    if kept is not None and kept.is_file():
        try:
            manifest, tensors = blob.read(kept, "sums")
            if said.items() <= manifest.items():
                return tensors
        except ProtocolError:
            pass  # damaged: summed again
    constants = sums.constants_of(recipe, broadcast.shape, broadcast.extras)
    features = sums.features_of(recipe, broadcast.shape, constants).to(site.device)
    gathered = sums.gather(
        features, site.data.to(site.device), broadcast.classes, *preprocessing(recipe),
        mirrored=recipe.sums.mirror == "copies", told=told,
    )  # fmt: skip
    if recipe.sums.secure:
        return _masked(gathered, broadcast, site)
    found = sums.packed(gathered, recipe.sums)
    if kept is not None:
        blob.write_durably(kept, blob.pack("sums", found, said), flush=False)
    return found


def _masked(gathered: Moments, broadcast: Broadcast, site: Site) -> dict[str, Tensor]:
    """The sums under this site's masks."""
    masker = site.masker
    if masker is None or set(masker.secrets) != broadcast.roster.keys() - {site.name}:
        known = len(masker.secrets) if masker else 0
        raise RunError(f"{site.name}: sums.secure needs a secret with each other site, and knows {known}")
    masked: Masked = masker.mask(sums.evened(gathered, broadcast.extras), broadcast.context)
    return masked.numbers
