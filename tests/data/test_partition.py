"""Partitions: the seeds' own ones rebuilt to the sample, and what must hold for every one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import labelled
from oneround.data import Dataset, Split, partitions
from oneround.errors import RecipeError

CIFAR_LABELS = np.repeat(np.arange(10), 5000)


def split(data: Dataset, seed: int = 1, **options: object) -> Split:
    return partitions.parse(options).split(data, seed)


def test_the_partition_of_seed_002() -> None:
    result = split(labelled(CIFAR_LABELS), kind="dirichlet", alpha=0.05, clients=5)
    assert result.sizes == [15274, 13309, 4729, 9738, 6950]
    assert result.counts[0].tolist() == [3651, 0, 4858, 2, 1764, 0, 0, 0, 0, 4999]
    assert result.shared == 0


def test_the_overlapping_partition_of_seed_000() -> None:
    result = split(labelled(CIFAR_LABELS), kind="dirichlet-overlap", alpha=0.05, clients=5)
    assert sum(result.sizes) == 82_695
    assert result.shared > 0
    assert "SHARE" in result.remarks()[0]
    assert all(len(set(client.tolist())) == len(client) for client in result.clients)


RULES = st.one_of(
    st.builds(dict, kind=st.just("dirichlet"), alpha=st.sampled_from([1e-6, 1e-3, 0.05, 0.5, 100.0])),
    st.builds(dict, kind=st.just("quantity-skew"), alpha=st.sampled_from([1e-6, 0.1, 1.0])),
    st.builds(dict, kind=st.just("iid")),
)
LABELS = st.lists(st.integers(0, 5), min_size=12, max_size=150)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rule=RULES, labels=LABELS, clients=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_every_sample_goes_to_exactly_one_client(
    rule: dict[str, object], labels: list[int], clients: int, seed: int
) -> None:
    data = labelled(labels, classes=6)
    result = split(data, seed, clients=clients, **rule)
    assert len(result.clients) == clients
    assert sorted(np.concatenate(result.clients).tolist()) == list(range(len(labels)))
    assert result.counts.sum() == len(labels)
    assert result.counts.sum(0).tolist() == np.bincount(labels, minlength=6).tolist()
    assert result.empty == [k for k, size in enumerate(result.sizes) if size == 0]
    again = split(data, seed, clients=clients, **rule)
    assert again.digest == result.digest


def test_another_seed_is_another_partition() -> None:
    data = labelled(np.arange(300) % 5)
    assert split(data, 1, kind="dirichlet").digest != split(data, 2, kind="dirichlet").digest


def test_the_digest_covers_the_data() -> None:
    labels = np.arange(300) % 5
    assert split(labelled(labels), kind="iid").digest != split(labelled(labels[::-1].copy()), kind="iid").digest


@settings(max_examples=60, deadline=None)
@given(clients=st.integers(1, 12), each=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_shards_hold_so_many_labels(clients: int, each: int, seed: int) -> None:
    data = labelled(np.arange(240) % 6)
    if clients * each < 6:
        with pytest.raises(RecipeError, match="labels_per_client"):
            split(data, seed, kind="shards", clients=clients, labels_per_client=each)
        return
    result = split(data, seed, kind="shards", clients=clients, labels_per_client=each)
    assert sorted(np.concatenate(result.clients).tolist()) == list(range(240))
    assert ((result.counts > 0).sum(1) == each).all()


def test_shards_ask_for_no_more_labels_than_there_are() -> None:
    with pytest.raises(RecipeError, match="labels_per_client = 7: must be ≤ 6"):
        split(labelled(np.arange(240) % 6), kind="shards", labels_per_client=7)


def test_natural_keeps_groups_together() -> None:
    groups = np.repeat(["a", "b", "c", "d"], [10, 20, 30, 60])
    data = labelled(np.arange(120) % 3, groups=groups)
    result = split(data, kind="natural")
    assert sorted(result.sizes) == [10, 20, 30, 60]
    two = split(data, kind="natural", clients=2)
    assert two.sizes == [60, 60]
    for client in two.clients:
        mine = set(groups[client])
        assert all(set(np.flatnonzero(groups == name)) <= set(client.tolist()) for name in mine)
    with pytest.raises(RecipeError, match="must be ≤ 4, the number of groups"):
        split(data, kind="natural", clients=5)
    with pytest.raises(RecipeError, match="no group ids"):
        split(labelled([0, 1, 2]), kind="natural")


@pytest.mark.parametrize("clients", [None, 4, 3])
def test_a_natural_group_that_is_all_public_leaves_a_client_without_samples(clients: int | None) -> None:
    sizes = [1, 40, 1, 1] if clients == 3 else [40, 20, 30, 1]
    data = labelled(np.arange(sum(sizes)) % 2, groups=np.repeat(["a", "b", "c", "d"], sizes))
    rule = partitions.parse({"kind": "natural", "clients": clients})
    for seed in range(30):
        split = rule.split(data, seed, public=0.5)
        assert len(split.clients) == rule.num_clients(data)
        assert sum(split.sizes) + len(split.public) == sum(sizes)
        if split.empty:
            return
    raise AssertionError("no seed took a whole group")


@pytest.mark.slow
def test_a_minimum_is_honoured_or_refused_with_a_reason() -> None:
    data = labelled(np.arange(1000) % 10)
    assert min(split(data, 6, kind="dirichlet", alpha=0.05).sizes) < 20
    assert min(split(data, 6, kind="dirichlet", alpha=0.05, minimum=20).sizes) >= 20
    with pytest.raises(RecipeError, match=r"minimum = 201: .* must be ≤ 200"):
        split(data, kind="iid", clients=5, minimum=201)
    with pytest.raises(RecipeError, match=r"no draw of 1000 gave every client that many \(best: \d+\)"):
        split(data, kind="dirichlet", alpha=1e-6, clients=50, minimum=1)


def test_more_clients_than_samples_are_refused() -> None:
    with pytest.raises(RecipeError, match="clients = 13: must be ≤ 12"):
        split(labelled([0, 1] * 6), kind="iid", clients=13)


def test_an_empty_client_is_reported() -> None:
    result = split(labelled([0, 1] * 6), kind="dirichlet", alpha=1e-6, clients=5)
    assert len(result.empty) >= 3
    assert str(result.empty[0]) in result.remarks()[0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    labels=LABELS, clients=st.integers(1, 6), public=st.sampled_from([0.0, 0.3]), share=st.sampled_from([0.1, 0.5, 0.9])
)
def test_what_is_held_back_is_trained_on_by_nobody(
    labels: list[int], clients: int, public: float, share: float
) -> None:
    data, rule = labelled(labels, classes=6), partitions.parse({"kind": "dirichlet", "clients": clients})
    if clients > len(labels) * 0.6:
        return
    whole, result = (rule.split(data, 3, public, validation) for validation in (0.0, share))
    assert not set(result.validation) & {*result.public, *np.concatenate(result.clients)}
    assert {*result.validation, *result.public, *np.concatenate(result.clients)} == set(range(len(labels)))
    if public:  # from the server's images alone: clients train on the same samples, so such runs can be compared
        assert result.digest == whole.digest and set(result.validation) <= set(whole.public)
        assert len(result.validation) == int(share * len(whole.public))
    else:
        assert result.sizes == [size - int(share * size) for size in whole.sizes]
        assert (result.digest == whole.digest) == (len(result.validation) == 0)


def test_what_is_held_back_of_shared_samples_is_held_back_from_all() -> None:
    rule = partitions.parse({"kind": "dirichlet-overlap", "clients": 5, "alpha": 0.5})
    data = labelled(np.repeat(np.arange(10), 50))
    whole, result = (rule.split(data, 1, 0.0, share) for share in (0.0, 0.2))
    assert all(0.7 * size < kept < 0.9 * size for size, kept in zip(whole.sizes, result.sizes, strict=True))
    assert min(rule.split(data, 1, 0.0, 0.99).sizes) > 0, "nobody is left with nothing"
    assert result.shared and len(result.validation) and not set(result.validation) & set(np.concatenate(result.clients))


def test_clients_may_hold_back_although_there_are_public_images() -> None:
    data, rule = labelled(np.repeat(np.arange(10), 30)), partitions.parse({"kind": "iid", "clients": 3})
    result = rule.split(data, 1, 0.2, 0.1, clients_hold_back=True)
    assert (
        len(result.public) == 60
        and result.sizes == [72, 72, 72]
        and [len(validation) for validation in result.client_validation] == [8, 8, 8]
    )
    assert rule.split(data, 1, 0.2, 0.1).sizes == [80, 80, 80]


def test_the_fewest_samples_are_counted_after_some_are_held_back() -> None:
    rule = partitions.parse({"kind": "iid", "clients": 3, "minimum": 40})
    with pytest.raises(RecipeError, match=r"partition.minimum = 40: no draw"):
        rule.split(labelled(np.repeat(np.arange(10), 15)), 1, 0.0, 0.5)
