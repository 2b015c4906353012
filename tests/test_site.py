"""A site: its machine's settings within an act, its folders, and how many clients a machine trains at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oneround.config.recipe import Local
from oneround.config.sections import Adapter
from oneround.errors import RecipeError, RunError
from oneround.site import SMALL_NETWORK, Site, choose_device, num_workers, threads_per_client


def test_how_many_at_once() -> None:
    cores = os.cpu_count() or 1
    assert num_workers(Local(device="cpu"), parameters=100_000, clients=50) == min(50, cores)
    assert num_workers(Local(device="cpu"), parameters=11_000_000, clients=50) == 1
    assert num_workers(Local(device="cpu", workers=3), parameters=100_000, clients=50) == 3
    assert num_workers(Local(device="cpu", workers=3), parameters=100_000, clients=2) == 2


def test_a_small_network_has_one_thread_and_a_recipe_decides_otherwise() -> None:
    assert threads_per_client(Local(device="cpu"), SMALL_NETWORK - 1) == 1
    assert threads_per_client(Local(device="cpu"), SMALL_NETWORK) == (os.cpu_count() or 1)
    assert threads_per_client(Local(device="cpu", threads=3), SMALL_NETWORK - 1) == 3


def test_an_act_has_its_settings_and_leaves_those_of_before() -> None:
    before = torch.get_num_threads()
    local = Local(device="cpu", threads=before + 1, deterministic=True)
    with pytest.raises(KeyError), Site("a", local=local).arithmetic(10):
        assert torch.get_num_threads() == before + 1 and torch.are_deterministic_algorithms_enabled()
        raise KeyError("whatever happens within")
    assert torch.get_num_threads() == before and not torch.are_deterministic_algorithms_enabled()
    with Site("a", local=Local(device="cpu")).arithmetic(10):
        assert not torch.are_deterministic_algorithms_enabled()


def test_of_two_acts_at_a_time_the_last_to_begin_decides_and_the_last_to_end_restores() -> None:
    """As of two threads: the first to begin ends first."""
    before = torch.get_num_threads()
    first, second = (Site("a", local=Local(device="cpu", threads=before + more)).arithmetic(10) for more in (1, 2))
    first.__enter__()
    second.__enter__()
    assert torch.get_num_threads() == before + 2
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == before + 2, "the second goes on"
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == before


def test_state_between_rounds_has_a_folder_for_each_set_of_options(tmp_path: Path) -> None:
    site = Site("server", folder=str(tmp_path))  # type: ignore[arg-type]
    folders = {site.state_folder(options) for options in (Adapter(), Adapter(), Adapter(heads=4))}
    assert len(folders) == 2 and all(folder.parent == tmp_path / "server" for folder in folders)
    with pytest.raises(RunError, match="server: state between rounds needs a folder"):
        Site("server").state_folder(Adapter())


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(RecipeError, match=r"local\.device = cuda:99: not on this machine"):
        choose_device("cuda:99")
    with pytest.raises(RecipeError, match=r"local\.device = gpu: unknown; use auto"):
        choose_device("gpu")


@pytest.mark.parametrize(("precision", "bf16"), [("bf16", True), ("fp32", False)])
def test_the_precision_of_training(precision: str, bf16: bool) -> None:
    assert Site("a", local=Local(device="cpu", precision=precision)).bf16 is bf16
    assert Site("a", local=Local(device="cpu")).bf16 is False
