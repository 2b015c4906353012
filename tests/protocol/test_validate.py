"""What a manifest may say, and numbers that no training gives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oneround import acts
from oneround.config.sections import Sums
from oneround.data import Dataset, Images
from oneround.errors import ProtocolError
from oneround.protocol import Broadcast, Upload, blob
from oneround.protocol.validate import check_sums
from oneround.site import Site
from oneround.sums.moments import Moments, packed
from small_sums import broadcast_of, upload_of
from tampering import Federation, altered, nested, refuse, worded


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"history": [{}]}, r"history.0.epoch: Field required"),
        ({"history": "no list"}, r"history: Input should be a valid list"),
        ({"history": [7]}, r"history.0: "),
        ({"history": [{"epoch": "1"}]}, r"history.0.epoch: Input should be a valid integer"),
        ({"history": [{"epoch": 0}]}, r"history.0.epoch"),
        ({"history": [{"epoch": 3}]}, r"its history has epoch 3; expected 1 to 2"),
        ({"history": [{"epoch": 2}, {"epoch": 1}]}, r"its history has epoch 1; expected 3 to 2"),
        ({"history": [{"epoch": 1}, {"epoch": 1}]}, r"its history has epoch 1"),
        ({"history": [{"epoch": 1, "loss": nested(700)}]}, r"damaged manifest \(.* deep\)"),
        ({"history": [{"epoch": 1, "loss": {"a": 1}}]}, r"history.0.loss"),
        ({"history": [{"epoch": 1, "loss": "x" * 201}]}, r"history.0.loss"),
        ({"history": [{"epoch": 1, "loss": 2**70}]}, r"history.0.loss"),
        ({"history": [{"epoch": 1, "a\nb": 1.0}]}, r"printable characters"),
        ({"history": [{"epoch": 1, "gradients": {"features": {"norm": []}}}]}, r"history.0.gradients.features.norm"),
        (
            {"history": [{"epoch": 1, "event": "snapshot"}]},
            r"its history has the key event, which is reserved for the log",
        ),
        ({"history": [{"epoch": 1, "rule": "mine"}]}, r"its history has the key rule"),
        ({"stopped": ["no"]}, r"stopped: Input should be a valid string"),
        ({"client": 5}, r"client: Input should be a valid string"),
        ({"client": "a\nb"}, r"client: String should match pattern"),
        ({"client": ""}, r"client: String should have at least 1 character"),
        ({"class_counts": {"a": 1}}, r"class_counts: "),
        ({"class_counts": [True] * 10}, r"class_counts.0: "),
        ({"shapes": []}, r"shapes: "),
        ({"greeting": "hello"}, r"greeting: Extra inputs are not permitted"),
        ({"line\nbreak": "hello"}, r"damaged manifest"),
        ({"epoch": nested(24)}, r"more than 24 levels deep"),
    ],
    ids=lambda value: None,
)
def test_a_manifest_says_what_is_known_and_nothing_else(
    federation: Federation, changes: dict[str, Any], reason: str
) -> None:
    refuse(federation, worded(federation[2][0].pack(), **changes), reason)


def test_other_kinds_of_files_have_a_schema_too(federation: Federation, tmp_path: Path) -> None:
    upload, broadcast = federation[2][0], federation[1]
    for changes, reason in (
        ({"greeting": 1}, "greeting: Extra inputs"),
        ({"shape": [1, 2]}, "shape: "),
        ({"class_names": [1]}, "class_names.0: "),
        ({"recipe": nested(400)}, "levels deep"),
        ({"roster": [["a"]]}, "roster.0: "),
    ):
        with pytest.raises(ProtocolError, match=reason):
            Broadcast.unpack(worded(broadcast.pack(), **changes))
    state = {"client": "a", "recipe_digest": "b", "epoch": 1, "history": upload.history}
    for kind, words, changes in (("state", state, {"history": [{}]}), ("shard", {}, {"greeting": 1})):
        raw = blob.pack(kind, upload.weights, words)
        blob.unpack(raw, "file", kind)
        with pytest.raises(ProtocolError, match="file: refused, damaged manifest"):
            blob.unpack(worded(raw, **changes), "file", kind)
        (tmp_path / kind).write_bytes(worded(raw, **changes))
        with pytest.raises(ProtocolError, match="damaged manifest"):
            blob.peek(tmp_path / kind, kind)


def test_all_that_training_writes_into_a_history_is_accepted(federation: Federation) -> None:
    _, broadcast, (upload, *_) = federation
    figures = {"steps": 7, "learning_rate": 0.05, "loss": 1.5, "base": 1.0, "align": 0.5, "cross-entropy": 1.0}
    figures |= {"gradient_norm": 3.0, "spread": 0.5, "classes_seen": 10, "seconds": 0.1, "my_plugin:Term": 1.0}
    figures |= {"lambda_raw": math.inf, "s": 1.0, "lambda_effective": 2.0, "lambda_applied": 2.0, "entropy": 0.3}
    figures |= {"sigma_base": 1.0, "sigma_align": math.nan, "adapter_error": 0.1, "adapter_adapter_moved": 0.0}
    figures |= {"adapter_changed": 0.1, "adapter_by_teacher": 0.2, "trouble": ["weight"]}
    traced = {"norm": {"cross-entropy": 1.0, "base": 2.0}, "cosine": {"base · alignment": None, "a · b": -0.5}}
    history = [{"epoch": 1, **figures, "gradients": {"features": traced, "prototypes": traced}}, {"epoch": 2}]
    again = Upload.unpack(replace(upload, history=history).pack(), broadcast, acts.statistics_of(broadcast))
    assert repr(again.history) == repr(json.loads(json.dumps(history, sort_keys=True)))


def test_norm_statistics_below_zero_are_refused(federation: Federation) -> None:
    upload = federation[2][0]
    for suffix in ("running_var", "num_batches_tracked"):
        name = next(name for name in upload.weights if name.endswith(suffix))
        changed = upload.weights[name].clone()
        changed.view(-1)[0] = -1
        raw = altered(upload, weights={**upload.weights, name: changed})
        refuse(federation, raw, f"{name} holds -1, and it cannot be below 0")


def some_moments() -> Moments:
    """Of features among which one is constant, one is zero and one is tiny."""
    random = torch.Generator().manual_seed(3)
    features = torch.randn(200, 12, generator=random).double() + torch.arange(12)
    features[:, 3], features[:, 4] = 5.0, 0.0
    features[:, 5] *= 1e-8
    labels = torch.nn.functional.one_hot(torch.randint(0, 3, (200,), generator=random), 4).double()
    return Moments(features.T @ features, features.T @ labels, features.sum(0), labels.sum(0))


@pytest.mark.parametrize("how", [{}, {"precision": "int16"}, {"precision": "fp16"}, {"precision": "bf16"}, {"rank": 4}])
def test_sums_are_bounded_by_cauchy_and_schwarz(how: dict[str, Any]) -> None:
    sums = packed(some_moments(), Sums(features={"kind": "patches", "size": 12}, **how))
    check_sums(sums, "a")
    for changes, reason in (
        ({"cross": sums["cross"] * 50}, "larger than its squares and counts allow"),
        ({"cross": sums["cross"] + torch.eye(12, 4)}, "do not add up|larger than its squares"),
    ):
        with pytest.raises(ProtocolError, match=f"a: refused, its sums by class .*({reason})|{reason}"):
            check_sums({**sums, **changes}, "a")
    if "triangle" in sums and sums["triangle"].dtype != torch.int16:  # which cannot say more than 1 of the diagonal
        product = sums["triangle"].clone()
        product[1] = 100 * product[0]
        with pytest.raises(ProtocolError, match=r"products larger than their squares allow \(row 0\)"):
            check_sums({**sums, "triangle": product}, "a")


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return broadcast_of(digits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"triangle": None}, "sums.triangle is missing"),
        ({"more": torch.zeros(3)}, "sums.more is not asked for"),
        ({"total": torch.zeros(96)}, "sums.total is torch.float32"),
        ({"counts": torch.full((10,), 7.0)}, "its sums and its class_counts are over different numbers of images"),
        ({"cross": torch.full((96, 10), torch.nan)}, "sums.cross holds values that are not finite"),
        ({"total": torch.full((96,), 1e160, dtype=torch.float64)}, r"features of 3.3e\+158 on average"),
        ({"triangle": torch.full((96 * 97 // 2,), -1.0)}, r"negative squares \(-1\)"),
    ],
)
def test_sums_that_do_not_fit_are_refused(
    broadcast: Broadcast, digits: Dataset, change: dict[str, Tensor | None], words: str
) -> None:
    upload = upload_of(broadcast, digits, "site", np.arange(30))
    given = {name: value for name, value in {**upload.sums, **change}.items() if value is not None}
    with pytest.raises(ProtocolError, match=words):
        Upload.unpack(replace(upload, sums=given).pack(), broadcast, {}, "site-7")


@pytest.mark.parametrize("how", [{"precision": "int16"}, {"precision": "fp16"}, {"rank": 20}])
def test_negative_squares_are_refused_in_smaller_uploads_too(
    broadcast: Broadcast, digits: Dataset, how: dict[str, object]
) -> None:
    asking = broadcast_of(digits, **{f"sums__{key}": value for key, value in how.items()})
    upload = upload_of(asking, digits, "site", np.arange(30))
    name = "rest" if "rank" in how else "diagonal"
    given = {**upload.sums, name: upload.sums[name] - 1}
    with pytest.raises(ProtocolError, match="negative squares"):
        Upload.unpack(replace(upload, sums=given).pack(), asking, {}, "site-7")


def test_images_that_are_all_alike_are_sums_all_the_same(broadcast: Broadcast, digits: Dataset) -> None:
    """Around their mean nothing is left but rounding, of either sign."""
    alike = Images(digits.train.pixels[:1].expand(500, -1, -1, -1), digits.train.labels[:500])
    upload = acts.train(broadcast, Site("site", alike))
    again = Upload.unpack(upload.pack(), broadcast, {})
    assert torch.isfinite(acts.fuse([again], broadcast).predict(digits.test.pixels)).all()
