"""Ensembles fold what each expert sees into totals, with all experts in memory or one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.models import Ensemble, Expert, Single, encoders, initialise
from oneround.models.inference import ExpertOutput, Totals, plus, to_inference

CNN = encoders.parse({"kind": "cnn", "width": 4})


def expert(seed: int, samples: int = 1, **statistics: Tensor) -> Expert:
    net = initialise(CNN, 1, 3, seed).eval()
    return Expert(net, torch.tensor(samples), torch.tensor([samples, 0, 0]), statistics).eval()


class MeanLogits:
    """Logits weighted by sample count."""

    def begin(self, images: Tensor) -> Totals | None:
        return None

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        return plus(totals, logits=output.expert.samples * output.logits, samples=output.expert.samples)

    def scores(self, totals: Totals) -> Tensor:
        return totals["logits"] / totals["samples"]


class Streamed:
    """Experts that are built when asked for."""

    def __init__(self) -> None:
        self.built = 0

    def __iter__(self) -> Iterator[Expert]:
        for seed, samples in ((1, 1), (2, 3)):
            self.built += 1
            yield expert(seed, samples)


@torch.no_grad()
def test_an_ensemble_is_its_formula_streamed_or_in_memory() -> None:
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    ensemble = Ensemble(MeanLogits(), streamed := Streamed())
    expected = (expert(1).net(images) + 3 * expert(2).net(images)) / 4
    assert torch.allclose(ensemble(images), expected, atol=1e-6) and streamed.built == 2
    ensemble.load_experts()
    assert torch.allclose(ensemble(images), expected, atol=1e-6)
    assert torch.allclose(ensemble(images), expected, atol=1e-6) and streamed.built == 4, "built once more, then kept"
    assert [shard["samples"].item() for shard in ensemble.shards()] == [1, 3]


@torch.no_grad()
def test_a_view_has_features_their_directions_and_the_clients_own_answer() -> None:
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one = expert(1)
    output = one.output(images)
    assert torch.equal(output.features, one.net.encoder(images)) and torch.equal(output.logits, one.net(images))
    assert torch.allclose(output.unit, F.normalize(output.features, dim=1))
    order = torch.arange(len(one.noise_feature)).roll(1)
    turned = expert(1, turn=torch.eye(len(order))[order])
    assert torch.allclose(turned.output(images).features[:, order], output.features), (
        "brought into another client's space"
    )


def test_totals_add_name_by_name() -> None:
    one = plus(None, a=torch.tensor(1.0), b=torch.tensor(2.0))
    two = plus(one, a=torch.tensor(10.0), b=torch.tensor(20.0))
    assert {name: float(value) for name, value in two.items()} == {"a": 11, "b": 22}
    assert float(one["a"]) == 1, "totals before are left alone"


def test_a_network_for_inference_answers_a_set_as_it_answers_a_batch() -> None:
    model = to_inference(Single(initialise(CNN, 1, 3, 1), {"round": 2}), torch.device("cpu"))
    assert not model.net.training and not any(parameter.requires_grad for parameter in model.parameters())
    pixels = torch.randint(0, 256, (600, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    answers = model.predict(Images(pixels, torch.zeros(600).long()), torch.device("cpu"), 0.5, 0.5)
    assert torch.allclose(answers, model((pixels.float() / 255 - 0.5) / 0.5), atol=1e-5)
    (weights,) = model.shards()
    assert weights.keys() == model.net.state_dict().keys() and model.facts == {"round": 2}
