"""Masked sums: the total is the plain one, and a single upload says nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from noise import ignores
from oneround.errors import ProtocolError
from oneround.privacy import masks
from oneround.privacy.masks import Masked, Masker, add_up, simulated_masker
from oneround.sums import Moments
from oneround.sums.moments import triangle_of

NAMES = ["client_000", "client_001", "client_002"]


def secrets(names: list[str], seed: int = 0) -> dict[str, dict[str, bytes]]:
    random = np.random.RandomState(seed)
    shared = {frozenset(pair): random.bytes(32) for pair in itertools.combinations(names, 2)}
    return {name: {peer: shared[frozenset((name, peer))] for peer in names if peer != name} for name in names}


def sums(seed: int) -> Moments:
    random = torch.Generator().manual_seed(seed)
    gram, *others = (1e4 * torch.rand(shape, generator=random).double() for shape in ((60, 60), (60, 10), (60,), (10,)))
    return Moments(gram + gram.T, *others)


def uploads(context: str = "federation/1", seed: int = 0) -> list[Masked]:
    mine = secrets(NAMES, seed)
    return [Masker(name, mine[name]).mask(sums(number), context) for number, name in enumerate(NAMES)]


def test_masked_sums_add_up_to_the_plain_ones() -> None:
    found, expected = add_up(uploads()), sums(0) + sums(1) + sums(2)
    for name in ("gram", "cross", "total", "counts"):
        assert float((getattr(found, name) - getattr(expected, name)).abs().max()) <= 3 * 2.0**-24, name


def tells_nothing() -> bool:
    """One upload, two of three together, two messages and two tensors of one: all look like noise that ignores the data."""
    mine = sums(0)
    hidden = {"triangle": triangle_of(mine.gram), "cross": mine.cross, "total": mine.total, "counts": mine.counts}
    plain = {name: value.numpy().reshape(-1) for name, value in hidden.items()} | {"check": np.zeros(8)}
    messages = [
        uploads(f"federation/{number}") for number in range(150)
    ]  # so that ten counts are noise enough to judge
    first, second = (
        {name: np.stack([message[who].numbers[name].numpy().reshape(-1) for message in messages]) for name in plain}
        for who in (0, 1)
    )
    views = []
    for name, data in plain.items():
        views += [(seen, data) for seen in (first[name], first[name] + second[name], np.diff(first[name], axis=0))]
    for one, other in itertools.combinations(plain, 2):
        width = min(len(plain[one]), len(plain[other]))
        views.append((first[one][:, :width] - first[other][:, :width], plain[one][:width] - plain[other][:width]))
    return all(ignores(seen, np.broadcast_to(data, seen.shape)) for seen, data in views)


def test_a_single_masked_upload_is_independent_of_its_data() -> None:
    assert tells_nothing()


REAL = masks._stream
BUGS: dict[str, Callable[[bytes, str, str, tuple[int, ...]], Any]] = {
    "no masks": lambda secret, context, name, shape: np.zeros(shape, np.uint64),
    "the same for all messages": lambda secret, context, name, shape: REAL(secret, "always", name, shape),
    "the same for all tensors": lambda secret, context, name, shape: REAL(secret, context, "any", shape),
    "known to all": lambda secret, context, name, shape: REAL(b"public", context, name, shape),
    "only the triangle": lambda secret, context, name, shape: (
        REAL(secret, context, name, shape) if name in ("triangle", "check") else np.zeros(shape, np.uint64)
    ),
    "bare counts": lambda secret, context, name, shape: (
        np.zeros(shape, np.uint64) if name == "counts" else REAL(secret, context, name, shape)
    ),
    "few bits": lambda secret, context, name, shape: REAL(secret, context, name, shape) >> np.uint64(16),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_same_test_finds_a_missing_and_a_reused_mask(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_stream", BUGS[bug])
    assert not tells_nothing()


def test_masks_that_do_not_cancel_are_noticed() -> None:
    whole = uploads()
    with pytest.raises(ProtocolError, match="missing: client_002"):
        add_up(whole[:2])
    with pytest.raises(ProtocolError, match="client_001: uploaded twice"):
        add_up([*whole[:2], whole[1]])
    with pytest.raises(ProtocolError, match="client_002: masked for another message than client_000"):
        add_up([*whole[:2], uploads("federation/2")[2]])
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        add_up([*whole[:2], uploads(seed=1)[2]])
    bare = {name: torch.zeros_like(value) for name, value in whole[2].numbers.items()}
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        add_up([*whole[:2], replace(whole[2], numbers=bare)])


def test_a_masker_masks_one_message_per_context() -> None:
    masker = Masker("client_000", secrets(NAMES)["client_000"])
    first = masker.mask(sums(0), "federation/1")
    assert torch.equal(masker.mask(sums(0), "federation/1").numbers["cross"], first.numbers["cross"])
    with pytest.raises(ProtocolError, match="masks are used once"):
        masker.mask(sums(1), "federation/1")
    later = Masker("client_000", secrets(NAMES)["client_000"], masker.masked)
    with pytest.raises(ProtocolError, match="masks are used once"):
        later.mask(sums(1), "federation/1")


def test_what_was_masked_is_remembered_before_it_is_handed_out_and_tells_nothing() -> None:
    remembered: list[dict[str, str]] = []
    given = secrets(NAMES)["client_000"]
    Masker("client_000", given, None, lambda masked: remembered.append(dict(masked)), b"mine").mask(
        sums(0), "federation/1"
    )
    Masker("client_000", given, None, lambda masked: remembered.append(dict(masked)), b"other").mask(
        sums(0), "federation/1"
    )
    assert [list(masked) for masked in remembered] == [["federation/1"]] * 2 and remembered[0] != remembered[1]

    def full(masked: Mapping[str, str]) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        Masker("client_000", given, None, full).mask(sums(0), "federation/1")


def test_a_total_that_cannot_be_one_of_sums_is_refused() -> None:
    mine, bad = secrets(NAMES), replace(sums(2), counts=torch.full((10,), -1e6, dtype=torch.float64))
    sent = [Masker(name, mine[name]).mask(each, "x") for name, each in zip(NAMES, (sums(0), sums(1), bad), strict=True)]
    with pytest.raises(ProtocolError, match="negative counts or squares"):
        add_up(sent)


def test_what_cannot_be_masked_is_refused() -> None:
    masker = Masker("client_000", secrets(NAMES)["client_000"])
    with pytest.raises(ProtocolError, match="too large to be masked"):
        masker.mask(replace(sums(0), total=torch.full((60,), 1e12)), "federation/1")
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="sums that are not finite cannot be masked"):
            masker.mask(replace(sums(0), total=torch.full((60,), wrong)), "federation/1")
    with pytest.raises(ProtocolError, match="a secret of 16 bytes"):
        Masker("client_000", {"client_001": b"short"})


def test_simulated_masks_cancel_and_differ_from_seed_to_seed() -> None:
    first, second = ([simulated_masker(name, NAMES, seed).mask(sums(0), "x") for name in NAMES] for seed in (1, 2))
    total, expected = add_up(first), sums(0) + sums(0) + sums(0)
    assert torch.allclose(total.gram, expected.gram, atol=1e-6)
    assert not torch.equal(first[0].numbers["cross"], second[0].numbers["cross"])
