"""What a site discloses of itself can be reduced, and then nothing else says it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from conftest import small_recipe
from oneround import acts
from oneround.analysis.describe import describe
from oneround.config.sections import Noise, Reveal
from oneround.data import Dataset
from oneround.errors import RecipeError, RunError
from oneround.fusion import rules
from oneround.privacy.disclosure import disclosed_counts, disclosed_history
from oneround.site import Site
from oneround.training.alignment.aligner import Aligner

COUNTS = torch.tensor([40, 0, 3, 0, 8])


def test_hidden_counts_tell_only_their_sum() -> None:
    counts = disclosed_counts(COUNTS, Reveal(class_counts=False))
    assert counts.tolist() == [11, 10, 10, 10, 10]
    assert torch.equal(disclosed_counts(COUNTS, Reveal()), COUNTS)


def test_noise_has_the_scale_its_epsilon_says() -> None:
    """A discrete Laplace variable has E|k| = 2q/(1−q²) with q = e^{−ε}; drawn from the system, never twice the same."""
    for epsilon in (0.5, 2.0):
        large = torch.full((20_000,), 10**6)
        off = disclosed_counts(large, Reveal(class_counts=Noise(epsilon=epsilon))) - large
        q = float(torch.tensor(-epsilon).exp())
        assert abs(float(off.abs().double().mean()) / (2 * q / (1 - q * q)) - 1) < 0.1
        assert abs(float(off.double().mean())) < 0.1 / epsilon
    noisy = Reveal(class_counts=Noise(epsilon=0.1))
    assert len({tuple(disclosed_counts(COUNTS, noisy).tolist()) for _ in range(20)}) > 10
    for _ in range(50):
        counts = disclosed_counts(torch.tensor([1, 0]), noisy)
        assert (counts >= 0).all() and counts.sum() > 0 and counts.dtype == torch.int64


def test_nothing_in_an_upload_tells_what_is_hidden(digits: Dataset) -> None:
    """Two sites with as many samples but other classes say the same, apart from what they learned."""
    manifests = []
    alignment = {"weight": "entropy"}
    for classes in ([0, 1], [2, 3, 4, 5, 6]):
        recipe = acts.resolve(small_recipe(reveal__class_counts=False, fusion=["iffi"], alignment=alignment), digits)
        broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
        mine = torch.nonzero(torch.isin(digits.train.labels, torch.tensor(classes)))[:200, 0]
        raw = acts.train(broadcast, Site("a", digits.train.take(mine))).pack()
        manifest = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["oneround"])
        assert set(manifest["history"][0]) == {"epoch", "learning_rate", "loss"}
        manifest["history"][0].pop("loss"), manifest.pop("sha256")
        manifests.append(manifest)
    assert manifests[0] == manifests[1]


def test_a_history_does_not_tell_what_is_hidden_by_its_troubles(digits: Dataset) -> None:
    """A recipe whose limit lies between the λ of two label entropies must not learn on which side a site is."""
    histories = []
    for classes in ([0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]):
        changes = {"alignment": {"weight": "entropy"}, "safeguards": {"largest_weight": 5.0}, "fusion": ["iffi"]}
        recipe = acts.resolve(small_recipe(reveal__class_counts=False, **changes), digits)
        broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
        mine = torch.nonzero(torch.isin(digits.train.labels, torch.tensor(classes)))[:100, 0]
        troubles: list[dict[str, Any]] = []
        upload = acts.train(broadcast, Site("a", digits.train.take(mine)), emit=troubles.append)
        assert any(event["event"] == "trouble" for event in troubles) == (len(classes) > 1)
        histories.append([entry.keys() for entry in upload.history])
    assert histories[0] == histories[1]
    kept = disclosed_history(
        [{"epoch": 1, "trouble": ["not-finite"]}, {"epoch": 2, "trouble": ["collapse"]}], Reveal(class_counts=False)
    )
    assert kept == [{"epoch": 1, "trouble": ["not-finite"]}, {"epoch": 2}]


@pytest.mark.parametrize("counts", [False, {"epsilon": 1.0}], ids=["hidden", "noised"])
@pytest.mark.parametrize("epochs", [0, 1], ids=["before its first epoch", "after one"])
def test_why_a_safeguard_stopped_training_does_not_tell_what_is_hidden(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, counts: object, epochs: int
) -> None:
    """With entropy weighting λ is the label entropy: the site's log may have it, what is sent has no figure of it."""
    healthy, calls = Aligner.distance, iter(range(10**6))
    monkeypatch.setattr(
        Aligner, "distance", lambda *args: healthy(*args) * (torch.inf if next(calls) >= 4 * epochs else 1.0)
    )
    alignment = {"weight": "entropy"}
    sent, logged = [], []
    for classes in ([0, 1], [2, 3, 4, 5, 6]):
        changes = {"training__epochs": 3, "trace__every": 0, "fusion": ["iffi"], "alignment": alignment}
        recipe = acts.resolve(small_recipe(reveal__class_counts=counts, **changes), digits)
        broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
        mine = torch.nonzero(torch.isin(digits.train.labels, torch.tensor(classes)))[:200, 0]
        events: list[dict[str, Any]] = []
        calls = iter(range(10**6))
        try:
            upload = acts.train(broadcast, Site("a", digits.train.take(mine)), emit=events.append)
            assert epochs and upload.epoch == epochs
            sent.append(upload.stopped)
        except RunError as error:  # nothing was learned: a refusal, which goes to the server as well
            assert not epochs
            sent.append(str(error))
        logged += [event["text"] for event in events if event["event"] == "trouble"]
    assert sent[0] == sent[1] and f"a, epoch {epochs + 1}: the loss or its gradient is not finite; stopped" in sent[0]
    assert not re.search("λ|entropy|L_base|L_align", sent[0])
    assert len(set(logged)) == 2 and all("λ = " in text for text in logged), "the log of each site has its own λ"


def test_a_rule_that_tells_classes_cannot_be_hidden() -> None:
    with pytest.raises(
        RecipeError, match=r"hides nothing while fusion has typicality-gated.*leave out typicality-gated"
    ):
        small_recipe(reveal__class_counts=False)
    with pytest.raises(RecipeError, match="hides nothing"):
        small_recipe(reveal__class_counts={"epsilon": 1.0})
    assert small_recipe(reveal__class_counts={"epsilon": 1.0}, fusion=["iffi"]).reveal.class_counts == Noise(
        epsilon=1.0
    )
    for telling in ("feature-vote", "dynamic-prototypes", {"kind": "distilled", "images": "noise"}):
        for counts in (False, {"epsilon": 1.0}):
            with pytest.raises(RecipeError, match="hides nothing"):
                small_recipe(reveal__class_counts=counts, fusion=["iffi", telling])
    with pytest.raises(RecipeError, match=r"epsilon = 0.*must be > 0"):
        small_recipe(reveal__class_counts={"epsilon": 0.0}, fusion=["iffi"])


@pytest.mark.parametrize("counts", [False, {"epsilon": 1.0}], ids=["hidden", "noised"])
def test_sums_that_no_rule_uses_cannot_be_hidden_either(counts: object) -> None:
    """Sums hold the exact count of every class, and go to the server whichever rules the recipe names."""
    sums = {"features": {"kind": "patches", "size": 48, "patch": 4}}
    with pytest.raises(RecipeError, match=r"hides nothing while sums are sent, which have the counts of every class"):
        small_recipe(reveal__class_counts=counts, fusion=["iffi"], sums=sums)
    reveals = describe("fafi", "cnn", 10, 0, {"fusion": ["iffi"], "sums": sums}).reveals
    assert any("second moments" in each for each in reveals), reveals


@pytest.mark.parametrize("kind", sorted(rules.kinds))
def test_a_rule_with_statistics_says_what_they_disclose(kind: str) -> None:
    for options in (
        {},
        {"teacher": "typicality-gated"},
        {"by": "reliability"},
        {"chosen": "client"},
        {"inner": "typicality-gated"},
    ):
        try:
            rule = rules.parse({"kind": kind, **options})
        except ValueError:
            continue  # not an option of this rule
        assert bool(rule.discloses) >= bool(rule.statistics(3, 4)), rule.label


@pytest.mark.parametrize(
    "rule",
    [
        "split",
        {"kind": "split", "chosen": "client"},
        {"kind": "dynamic-prototypes", "by": "size"},
        "aligned-iffi",
        {"kind": "distilled", "teacher": "split", "images": "noise"},
    ],
)
def test_a_rule_that_goes_by_counts_is_refused_where_they_are_hidden(rule: object) -> None:
    with pytest.raises(RecipeError, match=r"uses class counts, and they are hidden; send them with noise"):
        small_recipe(reveal__class_counts=False, fusion=["iffi", rule])
    assert small_recipe(reveal__class_counts={"epsilon": 1.0}, fusion=["iffi", rule])


def test_a_method_describes_what_its_rules_disclose() -> None:
    assert "features of up to 20 single images of every class" in " ".join(
        describe("fafi+features", "cnn", 10, 0).reveals
    )
    assert "how well it answers, for every class" in describe("fafi+dynamic-prototypes", "cnn", 10, 0).reveals
    alone = describe("fafi+distilled", "cnn", 10, 100, [("fusion", ["distilled"])]).reveals
    assert "mean features of every class and their common spread" in alone, "what its teacher asks for"


def test_what_sums_disclose_is_described() -> None:
    method = describe("ridge", "resnet18", 10, 5000)
    text = "\n".join(method.lines())
    assert "second moments" in text and "class counts" in text and "the server sees only their total" in text
    assert method.traffic.up == 4 * 6400 * 6401 // 2 + 6400 * (4 * 10 + 8) + 4 * 10
    assert not any("second moments" in line for line in describe("fafi", "resnet18", 10, 5000).lines())
    masked = describe("ridge", "resnet18", 10, 5000, [("sums.secure", True), ("reveal.class_counts", False)])
    assert masked.reveals == ["that it took part; its sums and class counts only within the total over all clients"]
    assert any("exchange of public keys before the broadcast" in need for need in masked.needs)
    assert masked.traffic.up == 8 * (6400 * 6401 // 2 + 6400 * 11 + 10 + 8)
    sums_say = "second moments of fixed features of its images, features summed by class"
    assert method.reveals == ["class counts", sums_say]  # nothing is trained, so nothing was measured
    routed = describe("routed", "resnet18", 10, 5000)
    assert "not available when networks are uploaded too" in "\n".join(routed.lines())
    assert routed.reveals.count(sums_say) == 1 and len(set(routed.reveals)) == len(routed.reveals) == 4
