"""The other thing that happens at a site: one pass that sums fixed features. It is kept, so a later snapshot need not repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch import Tensor

from oneround import sums
from oneround.errors import ProtocolError, RunError
from oneround.protocol import Broadcast, blob
from oneround.protocol.model import preprocessing
from oneround.site import Site
from oneround.sums import Moments
from oneround.sums.masks import Masker


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
    """The sums under this site's masks. What they were is noted first, so that a later process does not mask others with them."""
    if set(site.secrets) != broadcast.roster.keys() - {site.name} or not site.secrets:
        raise RunError(f"{site.name}: sums.secure needs a secret with each other site, and knows {len(site.secrets)}")
    note = site.folder / "masked.json" if site.folder else None
    try:
        said = json.loads(note.read_text()) if note and note.is_file() else None
    except ValueError:
        raise RunError(f"{note}: damaged, and masks are used once; begin anew with new keys") from None
    masker = Masker(site.name, site.secrets, said)
    masked = masker.mask(gathered, broadcast.context)
    if note is not None:
        blob.write_durably(note, json.dumps(masker.said).encode())
    return masked.numbers
