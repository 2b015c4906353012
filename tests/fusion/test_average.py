"""Parameter averaging: every tensor, batch-norm statistics included."""

from __future__ import annotations

import numpy as np
import torch

from oneround.fusion.average import average_weights
from oneround.models.prototype import network_from
from oneround.protocol import Upload
from oracle import Federation, Oracle


def test_average_includes_batch_norm_statistics(oracle: Oracle, federation: Federation) -> None:
    averaged = average_weights(oracle.uploads)
    total = sum(oracle.n)
    assert averaged.keys() == oracle.uploads[0].weights.keys()
    for name, value in averaged.items():
        expected = sum(u.weights[name].double().numpy() * u.samples for u in oracle.uploads) / total
        assert np.abs(value.double().numpy() - expected).max() <= (
            0.5 if value.dtype == torch.int64 else 1e-6 * max(1, np.abs(expected).max())
        ), name
    statistics = [name for name in averaged if "running" in name]
    assert len(statistics) == 6
    fresh = federation[1].weights
    assert all(not torch.equal(averaged[name], fresh[name]) for name in statistics)


def test_average_answers_like_its_network(oracle: Oracle) -> None:
    net = network_from(oracle.broadcast.recipe.model.encoder, 1, 10, average_weights(oracle.uploads)).double().eval()
    with torch.no_grad():
        expected = net((oracle.pixels.double() / 255 - 0.5) / 0.5).numpy()
    assert np.abs(oracle.scores("average") - expected).max() < 1e-4


def test_uploads_count_by_their_samples_and_counters_are_rounded() -> None:
    def upload(samples: int, value: float, batches: int) -> Upload:
        weights = {"w": torch.tensor([value, 0.0]), "num_batches_tracked": torch.tensor(batches)}
        return Upload(str(samples), "", 1, torch.tensor([samples]), weights)

    averaged = average_weights([upload(1, 4.0, 1), upload(3, 8.0, 2)])
    assert averaged["w"].tolist() == [7.0, 0.0] and averaged["w"].dtype == torch.float32
    assert int(averaged["num_batches_tracked"]) == 2 and averaged["num_batches_tracked"].dtype == torch.int64
