"""Images from the clients' generators, for rules that train on them.

Of every client n_kc·N/n images of class c: as many of each as its share of all clients' images. A class of which a client has only a few
images is left out there, because what its generator makes of it is closer to noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from oneround.config.parts import Strict
from oneround.config.sections import Count
from oneround.data import Images
from oneround.errors import ProtocolError, RunError
from oneround.models.inference import to_inference
from oneround.models.sampling import sample
from oneround.models.unet import generator_from
from oneround.protocol import Broadcast, Upload, blob
from oneround.seeds import generator
from oneround.site import Site

BATCH = {"cuda": 1000}
SMALL_BATCH = 200
Progress = Callable[[str, int, int], None]
"""Takes what is done, how far it is, and how far it will be."""


class Generated(Strict):
    """Which images are made, and how."""

    count: Count = 40_000
    """Images of all clients together."""
    steps: Count = 20
    """From noise to an image; all but the last evaluate the network twice."""
    fewest: Count = 20
    """Images that a client must have of a class for its generator to make more."""

    def shares(self, counts: Tensor) -> Tensor:
        """How many images to make; counts (clients, classes) → (clients, classes)."""
        learned = torch.where(counts >= self.fewest, counts, 0)
        if not learned.any():
            raise RunError(
                f"fusion: no client has {self.fewest} images of a class (most: {int(counts.max())}), so its generator learned none; set "
                "fewest lower"
            )
        return (learned.double() * self.count / int(learned.sum())).round().long()


def generated_images(
    uploads: Sequence[Upload], broadcast: Broadcast, server: Site, options: Generated, on_progress: Progress
) -> tuple[Images, str]:
    """The images, client by client, and a digest of what they were made from.

    Each client's are kept below the server's folder, and made again when its upload or the options are others.
    """
    shares = options.shares(torch.stack([upload.class_counts for upload in uploads]))
    folder = server.state_folder(options) if server.folder else None
    parts, sources = [], []
    done, total = 0, int(shares.sum())
    for upload, share in zip(uploads, shares, strict=True):
        made = {"recipe_digest": broadcast.digest, "upload": upload.content, "shares": share.tolist()}
        path = folder / f"{upload.client}.safetensors" if folder else None
        pixels, labels = _kept(path, made), torch.repeat_interleave(torch.arange(len(share)), share)
        if pixels is None:
            batches = []
            for batch in _made(upload, broadcast, server, labels, options.steps):
                batches.append(batch)
                on_progress(f"images of {upload.client}", done + sum(map(len, batches)), total)
            pixels = torch.cat(batches) if batches else torch.zeros(0, *broadcast.shape, dtype=torch.uint8)
            if path is not None:
                blob.write(path, "generated", {"pixels": pixels}, made)
        done += len(pixels)
        parts.append(Images(pixels, labels))
        sources.append(repr(sorted(made.items())))
    images = Images(torch.cat([each.pixels for each in parts]), torch.cat([each.labels for each in parts]))
    return images, hashlib.sha256("".join(sources).encode()).hexdigest()


def _kept(path: Path | None, made: dict[str, object]) -> Tensor | None:
    """What was made before from the same upload; None if there is none, or it is damaged."""
    if path is None:
        return None
    try:
        manifest, tensors = blob.read(path, "generated")
    except ProtocolError:
        return None
    return tensors["pixels"] if made.items() <= manifest.items() else None


def _made(upload: Upload, broadcast: Broadcast, server: Site, labels: Tensor, steps: int) -> Iterator[Tensor]:
    """Images of these classes by one client's generator, batch by batch, on the CPU."""
    recipe, device = broadcast.recipe, server.device
    if not len(labels):
        return
    assert recipe.generator is not None
    net = to_inference(
        generator_from(recipe.generator.network, broadcast.shape, broadcast.classes, upload.generator), device
    )
    random = generator(recipe.seeds.training, upload.client, "generated images")
    for classes in labels.split(BATCH.get(device.type, SMALL_BATCH)):
        noise = torch.randn(len(classes), *broadcast.shape, generator=random).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=server.bf16):
            yield sample(net, noise, classes.to(device), steps).cpu()
