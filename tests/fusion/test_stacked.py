"""Stacked experts: the pooled closed form for any partition, masked too; whoever is left out is left out exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import run_in_parts, small_recipe
from federation import NOW, SHARES, own_sites
from inprocess import InProcess
from oneround import acts
from oneround.analysis.describe import describe
from oneround.config.load import change
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError
from oneround.federate.server_app import serve
from oneround.fusion import rules
from oneround.global_model import GlobalModel
from oneround.models import initialise
from oneround.models.linear import Linear
from oneround.models.prototype import network_from
from oneround.privacy.masks import simulated_masker
from oneround.protocol import Broadcast, Upload
from oneround.runs.folder import RunFolder
from oneround.server import loop
from oneround.simulate import run
from oneround.site import Site
from oneround.sums import constants_of, features_of
from ridge_runs import oneround
from run_files import final, timeless

BESIDE = {"kind": "experts", "beside": {"kind": "patches", "size": 96, "patch": 4}}
SECURE = {"sums__secure": True, "reveal__class_counts": False, "fusion": ["stacked", "iffi"]}
PENALTY = 0.01
STACKED = rules.parse({"kind": "stacked", "penalty": PENALTY})


def stacked(**changes: object) -> Recipe:
    given = {"sums__features": BESIDE, "partition__clients": 3, "partition__alpha": 0.3, "local__workers": 1}
    return small_recipe("stacked", **{**given, "fusion": ["stacked", "iffi"], **changes})


def killed(*_: object) -> None:
    raise SystemExit


def second_broadcast(digits: Dataset, names: str, **changes: object) -> Broadcast:
    """That of clients whose networks are as they were initialised, each from a seed of its own."""
    recipe = acts.resolve(stacked(**changes), digits)
    first = acts.prepare(recipe, digits.class_names, digits.shape)
    counts, uploads = torch.ones(10, dtype=torch.int64), []
    for seed, name in enumerate(names):
        net = initialise(recipe.encoder, 1, 10, seed)
        for norm in net.encoder.norms:
            norm.running_var.fill_(0.1)  # type: ignore[operator,union-attr]
        uploads.append(Upload(name, first.digest, 1, counts, net.weights()))
    return acts.stack(uploads, first, Site("server"))


def features(digits: Dataset, broadcast: Broadcast, pixels: Tensor) -> np.ndarray:
    """φ of an image in float64: every network's unit features, and patches after them."""
    images = (pixels.double() / 255 - 0.5) / 0.5
    parts = []
    with torch.no_grad():
        for number in range(len(broadcast.experts)):
            start = f"features.expert.{number:04d}."
            own = {key.removeprefix(start): value for key, value in broadcast.extras.items() if key.startswith(start)}
            weights = {f"encoder.{key}": value for key, value in own.items()} | {"prototypes": torch.zeros(10, 16)}
            net = network_from(broadcast.recipe.encoder, 1, 10, weights).double().eval()
            parts.append(F.normalize(net.encoder(images), dim=1).numpy())
        if len(parts) * 16 < broadcast.sums["total"][0][0]:
            beside = small_recipe("ridge", sums__features=BESIDE["beside"])
            resolved = acts.resolve(beside, digits)
            patches = features_of(resolved, digits.shape, constants_of(resolved, digits.shape, {})).double()
            parts.append(patches(images).numpy())
    return np.concatenate(parts, 1)


def closed_form(phi: np.ndarray, labels: np.ndarray, blocks: list[int], asked: np.ndarray) -> np.ndarray:
    """Ridge regression on pooled features whose blocks are scaled to a mean variance of 1: scores of the features asked about."""
    scales = [1 / np.sqrt(part.var(0).mean()) for part in np.split(phi, np.cumsum(blocks)[:-1], axis=1)]
    scale, mean = np.repeat(scales, blocks), phi.mean(0)
    x, y = (phi - mean) * scale, np.eye(10)[labels]
    gram = x.T @ x
    weights = np.linalg.solve(gram + PENALTY * gram.diagonal().mean() * np.eye(len(gram)), x.T @ (y - y.mean(0)))
    return np.asarray((asked - mean) * scale @ weights + y.mean(0))


def scores(model: GlobalModel, labels: np.ndarray, pixels: Tensor) -> np.ndarray:
    """A model's scores as least squares gives them: its bias is the classes' shares, times its sharpness."""
    assert isinstance(model.inference, Linear)
    shares = np.bincount(labels, minlength=10) / len(labels)
    sharpness = float(model.inference.bias[0]) / shares[0]
    with torch.no_grad():
        return model(pixels.float() / 255).double().numpy() / sharpness


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("clients", [1, 2, 7, 50])
def test_it_is_the_pooled_closed_form_for_any_partition(digits: Dataset, clients: int, masked: bool) -> None:
    random = np.random.RandomState(clients)
    names = [f"{number:02d}" for number in range(clients)]
    broadcast = second_broadcast(digits, "abc", **(SECURE if masked else {}))
    if masked:
        if clients == 1:
            names.append("nobody else")  # masks need two; its images are the last ones
        broadcast = replace(broadcast, roster=dict.fromkeys(names, ""))
    owner = random.randint(len(names), size=300)
    owner[: len(names)] = range(len(names))
    uploads = []
    for number, name in enumerate(names):
        masker = simulated_masker(name, names, 1) if masked else None
        own = digits.train.take(np.flatnonzero(owner == number))
        uploads.append(Upload.unpack(acts.train(broadcast, Site(name, own, masker=masker)).pack(), broadcast, {}))
    pooled, asked = digits.train.take(np.arange(300)), digits.test.pixels[:50]
    phi = features(digits, broadcast, pooled.pixels)
    labels = pooled.labels.numpy()
    expected = closed_form(phi, labels, [16, 16, 16, 96], features(digits, broadcast, asked))
    everyone = rules.parse({"kind": "stacked", "penalty": PENALTY, "experts": "all"})
    model = acts.fuse(uploads, broadcast, rule=everyone)
    assert np.abs(scores(model, labels, asked) - expected).max() < 1e-5


HOLDING: dict[str, object] = {"validation": 0.2, "validation_from": "clients", "sums__held_back": 10}


def test_images_held_back_count_as_often_as_the_recipe_says(digits: Dataset) -> None:
    broadcast = second_broadcast(digits, "abc", **HOLDING)
    site = Site("a", digits.train.take(np.arange(150)), validation=digits.train.take(np.arange(150, 200)))
    upload = Upload.unpack(acts.train(broadcast, site).pack(), broadcast, {})
    often = digits.train.take(np.r_[0:150, np.tile(np.arange(150, 200), 10)])
    assert torch.equal(upload.class_counts, often.class_counts(10))
    labels, asked = often.labels.numpy(), digits.test.pixels[:50]
    expected = closed_form(
        features(digits, broadcast, often.pixels), labels, [16, 16, 16, 96], features(digits, broadcast, asked)
    )
    every = rules.parse({"kind": "stacked", "penalty": PENALTY, "experts": "all"})
    assert np.abs(scores(acts.fuse([upload], broadcast, rule=every), labels, asked) - expected).max() < 1e-5


def test_sites_with_images_of_their_own_hold_the_same_back_in_both_exchanges(digits: Dataset, tmp_path: Path) -> None:
    recipe, nodes = own_sites(digits, tmp_path)
    holding = {key.replace("__", "."): value for key, value in HOLDING.items()}
    recipe = change(recipe, {**holding, "sums.features": BESIDE, "fusion": ["stacked"], "training.epochs": 1})
    serve(InProcess(nodes), recipe, tmp_path / "run", NOW)
    folder = RunFolder(tmp_path / "run")
    for first, second in zip(folder.first_exchange.uploads(), folder.uploads(), strict=True):
        trained, held_back = first.samples, (second.samples - first.samples) // 10
        assert second.samples == trained + 10 * held_back and held_back == int(0.2 * (trained + held_back)) > 0


def test_without_a_client_neither_its_images_nor_its_network_count(digits: Dataset) -> None:
    broadcast = second_broadcast(digits, "abc")
    parts = {name: digits.train.take(np.arange(80) + 80 * at) for at, name in enumerate("abc")}
    uploads = [acts.train(broadcast, Site(name, own)) for name, own in parts.items()]
    rest = digits.train.take(np.r_[0:80, 160:240])
    labels, asked = rest.labels.numpy(), digits.test.pixels[:50]
    others = np.r_[0:16, 32:144]
    phi, of_asked = (features(digits, broadcast, pixels)[:, others] for pixels in (rest.pixels, asked))
    without = acts.fuse([uploads[0], uploads[2]], broadcast, rule=STACKED)
    assert np.abs(scores(without, labels, asked) - closed_form(phi, labels, [16, 16, 96], of_asked)).max() < 1e-5
    every = rules.parse({"kind": "stacked", "penalty": PENALTY, "experts": "all"})
    with_its_network = acts.fuse([uploads[0], uploads[2]], broadcast, rule=every)
    assert np.abs(scores(with_its_network, labels, asked) - scores(without, labels, asked)).max() > 1e-3


def test_a_saved_model_and_networks_with_nothing_beside_them(digits: Dataset, tmp_path: Path) -> None:
    broadcast = second_broadcast(digits, "ab", sums__features={"kind": "experts", "beside": None})
    assert broadcast.sums["total"][0] == (32,)
    own = digits.train.take(np.arange(200))
    model = acts.fuse([acts.train(broadcast, Site("a", own))], broadcast, rule=STACKED)
    model.save(tmp_path / "model")
    pixels = digits.test.pixels[:20]
    assert torch.equal(GlobalModel.load(tmp_path / "model").predict(pixels), model.predict(pixels))
    phi, asked = (features(digits, broadcast, each)[:, :16] for each in (own.pixels, pixels))
    labels = own.labels.numpy()
    assert np.abs(scores(model, labels, pixels) - closed_form(phi, labels, [16], asked)).max() < 1e-5


@pytest.mark.parametrize("masked", [False, True])
def test_two_exchanges_undisturbed_killed_and_federated_are_the_same(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    recipe = stacked(
        training__epochs=2, snapshots=1, local__checkpoint_seconds=0.0, deadline=60.0, **(SECURE if masked else {})
    )
    result = run(recipe, tmp_path / "whole", data=digits)
    assert {name: sorted(curve) for name, curve in result.curves.items()} == {"stacked": [3], "iffi": [1, 2]}
    if not masked:
        with monkeypatch.context() as patch:  # killed between the exchanges, besides after every epoch
            patch.setattr(loop.acts, "stack", killed)
            with pytest.raises(SystemExit):
                run(recipe, tmp_path / "parts", data=digits)
        assert run_in_parts(recipe, tmp_path / "parts", digits) >= 1
        assert final(tmp_path / "parts") == final(tmp_path / "whole")
        assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    files = {}
    for number in range(3):
        name = f"client_00{number}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "site.yaml").write_text(f"name: {name}\nshare: {number}\nfolder: {tmp_path / name}\n")
        files[10 + number] = {"site": str(tmp_path / name / "site.yaml")}
    serve(InProcess(files if masked else SHARES), recipe, tmp_path / "federated", NOW)
    for folder in (tmp_path / "whole", tmp_path / "federated"):
        assert RunFolder(folder).uploads().broadcast.experts == ("client_000", "client_001", "client_002")
    mine, theirs = (final(tmp_path / name) for name in ("whole", "federated"))
    assert mine["rules"] == theirs["rules"]
    if not masked:  # masks differ: keys are drawn anew
        assert mine["uploads"] == theirs["uploads"]


def test_a_run_without_a_client_or_with_one_that_came_late(digits: Dataset, tmp_path: Path) -> None:
    run(stacked(), tmp_path / "run", data=digits)
    folder = RunFolder(tmp_path / "run")
    late = tmp_path / "client_001.safetensors"
    folder.upload("client_001").rename(late)
    whole, rest = folder.uploads(late=[late]), folder.uploads()
    assert len(rest) == 2 and len(whole) == 3
    late.rename(folder.upload("client_001"))
    status, text = oneround("fuse", str(tmp_path / "run"), "--rule", "stacked", "--without", "client_001")
    assert status == 0, text
    pixels = digits.test.pixels[:20]
    saved = GlobalModel.load(tmp_path / "run/fused/stacked-without-client_001").predict(pixels)
    assert torch.equal(saved, acts.fuse(list(rest), rest.broadcast).predict(pixels))
    whole = folder.uploads()
    assert torch.equal(
        GlobalModel.load(tmp_path / "run/model").predict(pixels), acts.fuse(whole, whole.broadcast).predict(pixels)
    )


def test_networks_of_the_first_exchange_can_be_fused_afterwards(digits: Dataset, tmp_path: Path) -> None:
    result = run(stacked(), tmp_path / "run", data=digits)
    first = RunFolder(tmp_path / "run").first_exchange
    uploads = first.uploads()
    assert len(uploads) == 3 and all(upload.weights for upload in uploads)
    status, text = oneround("fuse", str(first.path), "--rule", "iffi")
    assert status == 0 and f"{100 * result.curves['iffi'][1]:.2f}" in text, text


def test_the_second_exchange_is_declared_with_what_it_reveals() -> None:
    method = describe("stacked", "resnet18", 10, 0, [("partition.clients", 5)])
    assert method.needs == [
        "a second exchange: every site receives the networks of all sites, makes one pass over its images and returns sums of the "
        "networks' features"
    ]
    assert "the weights of its network, to every other site too" in method.reveals
    assert "second moments of all networks' features of its images, features summed by class" in method.reveals
    plain = describe("fafi", "resnet18", 10, 0)
    size = 5 * 512 + 6400
    sums = 4 * (size * (size + 1) // 2 + 10 * size + 10) + 8 * size
    encoder = plain.traffic.down - 4 * 10 * 512
    assert method.traffic.down == plain.traffic.down + 5 * encoder
    statistics = describe("stacked", "resnet18", 10, 0, [("fusion", ["stacked"])])
    assert statistics.traffic.up == plain.traffic.down + sums


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fusion": ["stacked", "routed"]}, "routed needs networks and sums in one upload, and sums of experts' features come in a second"),
        ({"sums__held_back": 10}, "sums.held_back = 10: no client holds images back; set validation: 0.1 and validation_from: clients"),
        ({**HOLDING, "sums__features": "patches", "fusion": ["ridge"]}, "sums.held_back = 10: networks and sums of one upload are of the same"),
        ({"rounds": 2}, "rounds = 2: sums of experts' features follow one training; set rounds: 1"),
        ({"objective": {"terms": {}}, "fusion": ["stacked"]}, "sums.features = experts: there are no networks"),
        ({"sums__features": {"kind": "patches"}}, "stacked needs sums of the networks' features; set sums.features: experts"),
        ({"sums__features": {"kind": "experts", "beside": "experts"}}, "beside = experts: are there already; take patches, or null"),
        ({**SECURE, "fusion": ["stacked", "typicality-gated"]}, "reveal.class_counts: hides nothing while fusion has typicality-gated"),
    ],
)  # fmt: skip
def test_what_cannot_be_stacked(changes: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        stacked(**changes)


def test_an_upload_of_the_first_exchange_is_refused_in_the_second(digits: Dataset) -> None:
    recipe = acts.resolve(stacked(), digits)
    first = acts.prepare(recipe, digits.class_names, digits.shape)
    upload = acts.train(first, Site("a", digits.train.take(np.arange(60))))
    second = acts.stack([upload], first, Site("server"))
    assert Broadcast.unpack(second.pack()).experts == ("a",)
    with pytest.raises(ProtocolError, match=r"tensor .* is (missing|not asked for)"):
        Upload.unpack(upload.pack(), second, {})
