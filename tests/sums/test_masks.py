"""Masked sums: the total is the plain one, and a single upload tells nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from noise import ignores
from oneround.errors import ProtocolError
from oneround.sums import Moments, masks
from oneround.sums.masks import Masked, Masker, add_up
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
    found, wanted = add_up(uploads()), sums(0) + sums(1) + sums(2)
    for name in ("gram", "cross", "total", "counts"):
        assert float((getattr(found, name) - getattr(wanted, name)).abs().max()) <= 3 * 2.0**-24, name


def tells_nothing(first: list[Masked], second: list[Masked], plain: Tensor) -> bool:
    """One upload, two of three together, and the difference of two messages all look like noise that ignores the data."""
    one, two, again = (each.numbers["triangle"].numpy() for each in (first[0], first[1], second[0]))
    return all(ignores(view, plain.numpy()) for view in (one, one + two, one - again))


def test_a_single_masked_upload_is_independent_of_its_data() -> None:
    assert tells_nothing(uploads("federation/1"), uploads("federation/2"), triangle_of(sums(0).gram))


def test_the_same_test_finds_a_missing_and_a_reused_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = triangle_of(sums(0).gram)
    real = masks._stream
    monkeypatch.setattr(masks, "_stream", lambda secret, context, name, shape: np.zeros(shape, np.uint64))
    assert not tells_nothing(uploads("federation/1"), uploads("federation/2"), plain)
    monkeypatch.setattr(masks, "_stream", lambda secret, context, name, shape: real(secret, "always", name, shape))
    assert not tells_nothing(uploads("federation/1"), uploads("federation/2"), plain)
    monkeypatch.setattr(masks, "_stream", lambda secret, context, name, shape: real(b"public", context, name, shape))
    assert not tells_nothing(uploads("federation/1"), uploads("federation/2"), plain)


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
    later = Masker("client_000", secrets(NAMES)["client_000"], masker.said)
    with pytest.raises(ProtocolError, match="masks are used once"):
        later.mask(sums(1), "federation/1")


def test_what_cannot_be_masked_is_said() -> None:
    masker = Masker("client_000", secrets(NAMES)["client_000"])
    with pytest.raises(ProtocolError, match="too large to be masked"):
        masker.mask(replace(sums(0), total=torch.full((60,), 1e12)), "federation/1")
    with pytest.raises(ProtocolError, match="a secret of 16 bytes"):
        Masker("client_000", {"client_001": b"short"})
