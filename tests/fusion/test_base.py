"""What all rules have in common."""

from __future__ import annotations

import pytest
import torch

from conftest import NETWORK_RULES, small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.fusion import rules
from oneround.fusion.base import SavedModel, UploadExperts, expert_of
from oneround.models import Ensemble
from oneround.seeds import generator
from oracle import Federation


def test_the_order_of_uploads_does_not_matter(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    images = digits.test.pixels[:20].float() / 255
    for kind in NETWORK_RULES:
        with torch.no_grad():
            forth, back = (
                acts.fuse(order, broadcast, rule=rules.parse(kind))(images) for order in (uploads, uploads[::-1])
            )
        assert torch.allclose(forth, back, atol=1e-5), kind


def test_an_expert_has_its_counts_and_its_answer_to_noise(federation: Federation) -> None:
    _, broadcast, (upload, *_) = federation
    expert = expert_of(upload, broadcast, torch.device("cpu"))
    noise = torch.randn(1, *broadcast.shape, generator=generator(1, "noise image"))
    assert torch.equal(expert.noise_feature, expert.net.encoder(noise)[0])
    assert int(expert.samples) == upload.samples and expert.class_counts.tolist() == upload.class_counts.tolist()
    assert not expert.net.training and not any(parameter.requires_grad for parameter in expert.parameters())
    for name, value in upload.statistics.items():
        assert torch.equal(expert.statistic(name), value)


@pytest.mark.parametrize("rule", [*NETWORK_RULES, {"kind": "split", "restate": "none"}], ids=str)
def test_a_model_in_training_mode_leaves_the_uploads_as_they_were(
    rule: str | dict[str, str], federation: Federation, digits: Dataset
) -> None:
    """Its batch norm follows the images; neither an upload nor the shared base of another expert does."""
    _, broadcast, uploads = federation
    before = [{name: value.clone() for name, value in upload.weights.items()} for upload in uploads]
    model = acts.fuse(uploads, broadcast, rule=rules.parse(rule))
    if isinstance(model.inference, Ensemble):
        model.inference.load_experts()
    statistics = [value for name, value in model.named_buffers() if name.endswith("running_mean")]
    assert len({value.data_ptr() for value in statistics}) == len(statistics)
    earlier = [value.clone() for value in statistics]
    model.train()
    model(digits.test.pixels[:64].float() / 255)
    assert not statistics or not any(torch.equal(one, other) for one, other in zip(earlier, statistics, strict=True))
    for upload, weights in zip(uploads, before, strict=True):
        assert all(torch.equal(upload.weights[name], value) for name, value in weights.items()), upload.client


@pytest.mark.parametrize("streamed", [False, True])
def test_saved_experts_are_built_again(federation: Federation, digits: Dataset, streamed: bool) -> None:
    _, broadcast, uploads = federation
    experts = UploadExperts(uploads, broadcast, torch.device("cpu"))
    shards = Ensemble(rules.parse("iffi"), experts).shards()
    readers = [lambda tensors=tensors: tensors for tensors in shards]
    again = SavedModel(readers, broadcast.recipe, 1, 10, streamed).experts()
    images = digits.test.pixels[:5].float() / 255
    assert isinstance(again, list) is not streamed and len(list(again)) == len(list(experts)) == 3
    for one, other in zip(experts, again, strict=True):
        assert torch.equal(one.output(images).logits, other.output(images).logits)
        assert torch.equal(one.noise_feature, other.noise_feature)


def test_an_option_is_named_by_where_its_rule_stands_in_the_recipe() -> None:
    recipe = small_recipe(fusion=["iffi", {"kind": "distilled", "images": "noise", "epochs": 3}])
    second, other = rules.of(recipe.fusion[1]), rules.parse({"kind": "distilled", "images": "noise"})
    assert second.key(recipe, "epochs") == "fusion.1.epochs"
    assert other.key(recipe, "epochs") == "fusion.distilled.epochs"
