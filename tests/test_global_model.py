"""A global model: the same answers after saving, in ONNX, and on image files; damage is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import NETWORK_RULES, small_recipe
from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import DataError, ProtocolError
from oneround.fusion import rules
from oneround.fusion.logit_ensemble import LogitEnsemble
from oneround.global_model import GlobalModel, _checksum
from oneround.protocol import Broadcast, Upload, blob

Federation = tuple[Recipe, Broadcast, list[Upload]]
ALL = NETWORK_RULES


def model_of(federation: Federation, kind: str) -> GlobalModel:
    _, broadcast, uploads = federation
    return acts.fuse(uploads, broadcast, rule=rules.parse(kind))


@pytest.mark.parametrize("kind", ALL)
def test_saved_and_loaded_it_answers_the_same(
    federation: Federation, digits: Dataset, kind: str, tmp_path: Path
) -> None:
    model = model_of(federation, kind)
    expected = model.predict(digits.test.pixels[:50])
    assert torch.allclose(expected.sum(1), torch.ones(50), atol=1e-5)
    model.save(tmp_path / "model")
    for streamed in (False, True):
        again = GlobalModel.load(tmp_path / "model", streamed=streamed)
        assert torch.equal(again.predict(digits.test.pixels[:50]), expected)
        assert (again.class_names, again.shape, again.rule) == (model.class_names, model.shape, model.rule)


EXPORTED_IN_EVERY_SUITE = ("average", "typicality-gated", "routed")
"""One network, several, and several beside a ridge; the others take as long and differ less."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in EXPORTED_IN_EVERY_SUITE else [pytest.mark.release]) for kind in ALL]
)
def test_onnx_gives_the_same_scores_for_any_batch(
    federation: Federation, digits: Dataset, kind: str, tmp_path: Path
) -> None:
    import onnxruntime

    _, broadcast, uploads = federation
    model = acts.fuse(uploads[:2], broadcast, rule=rules.parse(kind))  # an export takes longer with every client
    assert model.to_onnx(tmp_path / "model.onnx") < 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    images = digits.test.pixels[:7].float() / 255
    with torch.no_grad():
        ours = model(images).numpy()
    theirs = session.run(None, {"images": images.numpy()})[0]
    assert np.abs(ours - theirs).max() < 1e-4
    names = session.get_modelmeta().custom_metadata_map["class_names"]
    assert json.loads(names) == list(digits.class_names)


def test_an_image_file_is_scaled_and_converted(federation: Federation, digits: Dataset, tmp_path: Path) -> None:
    model = model_of(federation, "average")
    exact = digits.test.pixels[3, 0].numpy()
    Image.fromarray(exact).save(tmp_path / "digit.png")
    assert torch.equal(model.read_image(tmp_path / "digit.png")[0], digits.test.pixels[3, 0])
    Image.fromarray(np.stack([exact] * 3, -1)).resize((100, 60)).save(tmp_path / "large.jpg")
    assert model.read_image(tmp_path / "large.jpg").shape == (1, 8, 8)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken\.png: not a readable image"):
        model.read_image(tmp_path / "broken.png")


def test_an_image_file_of_16_bits_and_one_that_is_too_large(
    federation: Federation, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(federation, "average")
    Image.fromarray(digits.test.pixels[3, 0].numpy().astype(np.uint16) * 257).save(tmp_path / "deep.png")
    assert torch.equal(model.read_image(tmp_path / "deep.png")[0], digits.test.pixels[3, 0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(DataError, match=r"deep\.png: more than 60 pixels, refused"):
        model.read_image(tmp_path / "deep.png")


def test_a_damaged_model_is_refused(federation: Federation, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_of(federation, "iffi").save(folder)
    first, shard, *_ = sorted(folder.glob("shard_*"))
    whole, manifest = shard.read_bytes(), (folder / "manifest.json").read_text()
    for raw in (whole[:-20], bytes([*whole[:-1], whole[-1] ^ 1]), first.read_bytes()):
        shard.write_bytes(raw)
        with pytest.raises(ProtocolError, match=r"shard_001_\w+\.safetensors: refused"):
            GlobalModel.load(folder)
    shard.unlink()
    with pytest.raises(ProtocolError, match=r"shard_001_\w+\.safetensors: cannot be read"):
        GlobalModel.load(folder)
    shard.write_bytes(whole)
    for text, words in (
        ("{", "it is cut off or was edited"),
        ("[]", "it is cut off or was edited"),
        ("{}", "'format' is missing in it"),
        (manifest.replace('"format": 1', '"format": 7'), "format 7"),
        (manifest.replace("cnn", "cnm"), "does not match its checksum"),
    ):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ProtocolError, match=words):
            GlobalModel.load(folder)
    with pytest.raises(ProtocolError, match="not a saved model"):
        GlobalModel.load(tmp_path)


def test_a_rule_of_a_plugin_that_is_not_loaded_is_named(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the recipe does not name it: a run can be fused by any rule."""
    monkeypatch.setattr(rules, "kinds", dict(rules.kinds))

    @rules.register("own-mean")
    class OwnMean(LogitEnsemble):
        pass

    model_of(federation, "own-mean").save(tmp_path)
    assert isinstance(GlobalModel.load(tmp_path).rule, OwnMean)
    del rules.kinds["own-mean"]
    with pytest.raises(ProtocolError, match=r"unknown fusion 'own-mean'.*name its module \(--plugin\)"):
        GlobalModel.load(tmp_path)


def test_saving_again_leaves_no_old_shards(federation: Federation, tmp_path: Path) -> None:
    _, broadcast, uploads = federation
    acts.fuse(uploads, broadcast).save(tmp_path)
    acts.fuse(uploads[:1], broadcast).save(tmp_path)
    (shard,) = tmp_path.glob("shard*")
    assert shard.name.startswith("shard_000_")
    assert len(GlobalModel.load(tmp_path).inference.experts) == 1


def test_the_same_model_saved_twice_has_the_same_files(federation: Federation, tmp_path: Path) -> None:
    model = model_of(federation, "iffi")
    for folder in ("one", "one", "other"):
        model.save(tmp_path / folder)
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other"))
    assert one == other and len(one) == 4
    GlobalModel.load(tmp_path / "one", streamed=True).save(tmp_path / "one")  # it reads its own files while it writes
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == other


@pytest.mark.parametrize("broken", ["shard_001", "manifest.json"])
def test_a_save_that_is_killed_leaves_the_model_before(
    federation: Federation, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    _, broadcast, uploads = federation
    other = acts.fuse(uploads[::-1], broadcast, rule=rules.parse("logit-ensemble"))  # every shard is another one
    model_of(federation, "iffi").save(tmp_path)
    answers = GlobalModel.load(tmp_path).predict(digits.test.pixels[:20])
    write = blob.write_durably

    def killed(path: Path, *raw: bytes, flush: bool) -> None:
        if path.name.startswith(broken):
            raise KeyboardInterrupt
        write(path, *raw, flush=flush)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blob, "write_durably", killed)
        other.save(tmp_path)
    assert torch.equal(GlobalModel.load(tmp_path).predict(digits.test.pixels[:20]), answers)
    other.save(tmp_path)
    assert GlobalModel.load(tmp_path).rule.kind == "logit-ensemble"
    assert len(list(tmp_path.glob("shard_*"))) == 3, "what the killed save had written is gone"


def test_a_model_with_files_named_by_number_alone_still_loads(
    federation: Federation, digits: Dataset, tmp_path: Path
) -> None:
    """Files of the first version have no checksum in their names."""
    model = model_of(federation, "iffi")
    model.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for number, shard in enumerate(manifest["shards"]):
        (tmp_path / shard["file"]).rename(tmp_path / f"shard_{number:03d}.safetensors")
        shard["file"] = f"shard_{number:03d}.safetensors"
    del manifest["sha256"]
    manifest["sha256"] = _checksum(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    answers = model.predict(digits.test.pixels[:20])
    assert torch.equal(GlobalModel.load(tmp_path).predict(digits.test.pixels[:20]), answers)
    model.save(tmp_path)
    assert not (tmp_path / "shard_000.safetensors").exists()
    assert torch.equal(GlobalModel.load(tmp_path).predict(digits.test.pixels[:20]), answers)


def test_unnormalised_inference_is_an_option(federation: Federation, digits: Dataset) -> None:
    recipe = acts.resolve(small_recipe(evaluation__unnormalised=True), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    model = GlobalModel.of(model_of(federation, "average").inference, rules.parse("average"), broadcast)
    assert (model.mean, model.std) == (0.0, 1.0)
