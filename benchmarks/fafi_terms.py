"""What FAFI's two prototype terms add to cross-entropy, by temperature and number of features, before and after training.

    python benchmarks/fafi_terms.py --out results/fafi_terms

FAFI is trained on the embedded digits with CNNs of several widths. On one batch, with the first and with the last weights, each term's
gradient is set against cross-entropy's: their norms at the prototypes, and the cosine of the prototype–feature term with it at the features.
Beside them, the mean cosine of prototypes to where they began.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common import markdown_head, markdown_row, parser_of, write_json
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset, load_dataset
from oneround.data.augment import preprocessing
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast
from oneround.runs.environment import environment
from oneround.server.plan import DealtPlan
from oneround.site import Site, choose_device
from oneround.training.objective import Batch, Term, terms
from study import sibling

WIDTHS = (4, 32, 128)  # of the CNN: a quarter of the number of features
TEMPERATURES = (0.05, 0.2, 1.0, 5.0, 20.0, 50.0, 100.0, 200.0, 500.0)
OVERRIDES = {
    "data": "digits", "partition": {"kind": "iid", "clients": 1}, "training.epochs": 20, "training.batch_size": 64,
    "training.augment.crop_scale": [0.6, 1.0], "trace.every": 0,
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--epochs", type=int, default=OVERRIDES["training.epochs"])
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    measured = [each for width in options.widths for each in measure(width, options.epochs)]
    settings = {**OVERRIDES, "training.epochs": options.epochs, "preset": "fafi"}
    figures = {"settings": settings, "seeds": load("fafi").seeds.model_dump(), "measured": measured}
    figures |= {"environment": environment(choose_device("cpu")), "seconds": time.monotonic() - started}
    print(table(figures))
    if options.out:
        write_json(sibling(options.out, ".json"), figures)
        sibling(options.out, ".md").write_text(table(figures) + "\n")


def measure(width: int, epochs: int) -> list[dict[str, Any]]:
    """Both terms at every temperature, before and after training a CNN of this width."""
    recipe = load(
        "fafi", (OVERRIDES | {"model.encoder": {"kind": "cnn", "width": width}, "training.epochs": epochs}).items()
    )
    data = load_dataset(recipe.data)
    broadcast = DealtPlan.of(recipe, data).prepare()
    upload = acts.train(broadcast, Site("client", data.train))
    turned = F.cosine_similarity(upload.weights["prototypes"], broadcast.weights["prototypes"]).mean()
    return [
        {"features": 4 * width, "trained": trained, "temperature": temperature, **compared(batch, temperature)}
        | ({"prototypes · their start": float(turned)} if trained else {})
        for trained, batch in (
            (False, batch_of(broadcast, broadcast.weights, data)),
            (True, batch_of(broadcast, upload.weights, data)),
        )
        for temperature in TEMPERATURES
    ]


@torch.no_grad()
def batch_of(broadcast: Broadcast, weights: dict[str, Tensor], data: Dataset) -> Batch:
    """Features of 512 images, unaugmented, with batch norm as in training."""
    net = network_from(broadcast.recipe.encoder, data.shape[0], data.classes, weights).train()
    mean, std = preprocessing(broadcast.recipe)
    images = data.train.take(torch.arange(512))
    unit = F.normalize(net.encoder((images.pixels.float() / 255 - mean) / std), dim=1)
    return Batch(unit, images.labels, weights["prototypes"])


def gradient(term: Term, batch: Batch) -> tuple[float, Tensor, Tensor]:
    """A term's value and its gradient at the features and at the prototypes."""
    unit, prototypes = batch.unit.clone().requires_grad_(), batch.prototypes.clone().requires_grad_()
    loss = term.loss(Batch(unit, batch.labels, prototypes))
    at = torch.autograd.grad(loss, (unit, prototypes), allow_unused=True, materialize_grads=True)
    return float(loss.detach()), at[0], at[1]


def compared(batch: Batch, temperature: float) -> dict[str, float]:
    """Both prototype terms at a temperature against cross-entropy."""
    _, at_features, at_prototypes = gradient(terms.parse("cross-entropy"), batch)
    same, features, prototypes = gradient(terms.parse({"kind": "prototype-feature", "temperature": temperature}), batch)
    apart, _, pushed = gradient(terms.parse({"kind": "prototype-separation", "temperature": temperature}), batch)
    return {
        "prototype-feature": same,
        "prototype-feature / cross-entropy at prototypes": float(prototypes.norm() / at_prototypes.norm()),
        "prototype-feature · cross-entropy at features": float(
            F.cosine_similarity(features.flatten(), at_features.flatten(), dim=0)
        ),
        "prototype-separation": apart,
        "prototype-separation / cross-entropy at prototypes": float(pushed.norm() / at_prototypes.norm()),
    }


def table(figures: dict[str, Any]) -> str:
    """By temperature: the share of separation's gradient, and how far the prototype–feature term differs; first → last weights."""
    measured = {(each["features"], each["trained"], each["temperature"]): each for each in figures["measured"]}
    sizes = sorted({size for size, _, _ in measured})
    separation, feature = (
        "prototype-separation / cross-entropy at prototypes",
        "prototype-feature · cross-entropy at features",
    )
    heads = ["τ", *(f"separation, d = {size}" for size in sizes), *(f"cosine, d = {size}" for size in sizes)]
    lines = markdown_head(heads)
    for temperature in TEMPERATURES:
        cells = [
            " → ".join(f"{measured[size, trained, temperature][name]:{form}}" for trained in (False, True))
            for name, form in ((separation, ".2g"), (feature, ".3f"))
            for size in sizes
        ]
        lines.append(markdown_row([f"{temperature:g}", *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
