"""A method in words says what crosses the network."""

from __future__ import annotations

from oneround.analysis.describe import describe


def test_a_preset_is_described_for_a_network() -> None:
    small, large = describe("v12", "cnn", 10, 5000), describe("v12", "resnet18", 10, 5000)
    assert small.name == large.name == "etf-attenuated" and small.alias == "v12"
    assert small.traffic.up < large.traffic.up and small.plain()["bytes_up"] == small.traffic.up
    assert any(line.startswith("  network: ") and large.up in line for line in large.lines())
    assert large.reveals[0] == "the weights of its network" and large.needs == []


def test_what_a_method_needs_beyond_one_round_is_named() -> None:
    assert describe("bank", "cnn", 10, 5000).needs == ["public images"]
    several = describe("fedavg", "cnn", 10, 5000, [("rounds", 7)])
    assert several.needs == ["7 rounds (not one-shot)"] and "in each of 7 rounds" in "\n".join(several.lines())


def test_hidden_class_counts_are_not_among_what_an_upload_has() -> None:
    hidden, noisy = (
        describe("fafi", "cnn", 10, 5000, [("fusion", ["iffi"]), ("reveal.class_counts", counts)]).lines()
        for counts in (False, {"epsilon": 1.0})
    )
    assert any("up (network, number of samples; fp32)" in line for line in hidden)
    assert any("up (network, class counts; fp32)" in line for line in noisy)
