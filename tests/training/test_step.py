"""One step: clipped, compiled, with a batch that fits into memory, and with no more operations than it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clients import broadcast_of, prepared, some
from oneround import acts
from oneround.config.recipe import Local
from oneround.data import Dataset, Images
from oneround.errors import RunError
from oneround.site import Site
from oneround.training.loop import Learner, Trainer
from oneround.training.step import AHEAD, MOST_RECORDED, WARM_UP, StageSteps, Stepper


def test_gradients_are_clipped(digits: Dataset) -> None:
    """With a tiny norm allowed the weights hardly move; without clipping they do."""
    broadcast = {norm: prepared(digits, training__clip_norm=norm) for norm in (1e-6, 0.0)}
    moved = {}
    for norm, each in broadcast.items():
        upload = acts.train(each, some(digits, 100))
        moved[norm] = float((upload.weights["prototypes"] - each.weights["prototypes"]).norm())
    assert moved[1e-6] < 1e-5 < 1e-2 < moved[0.0]


@pytest.mark.release
def test_compiled_training_learns_the_same(digits: Dataset) -> None:
    broadcast = prepared(digits, training__batch_size=50)
    data = digits.train.take(torch.arange(100))
    plain, compiled = (acts.train(broadcast, Site("site", data, local=Local(compile=how))) for how in (False, True))
    for name, value in plain.weights.items():
        assert torch.allclose(value.float(), compiled.weights[name].float(), atol=1e-4), name


@pytest.mark.parametrize(
    ("room", "words"), [(25, "16 would \\(--set training.batch_size=16\\)"), (0, "not even 1 would")]
)
def test_a_batch_that_does_not_fit_is_answered_with_one_that_does(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, room: int, words: str
) -> None:
    """Memory for so many samples, and no more."""
    step = Stepper._step

    def short_of_memory(self: Stepper, pixels: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> None:
        if len(labels) > 2 * room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, pixels, labels, numbers)

    monkeypatch.setattr(Stepper, "_step", short_of_memory)
    with pytest.raises(RunError, match=rf"site: training.batch_size = 64 does not fit into the memory of cpu; {words}"):
        acts.train(prepared(digits), some(digits, 100))


def test_binding_fills_the_buffers_at_the_same_addresses(digits: Dataset) -> None:
    """A recorded step reads fixed addresses, so new values must come into the old tensors."""
    first = broadcast_of(digits, "v8", 2)
    weights = {name: value + 1 for name, value in first.weights.items()}
    other = replace(first, weights=weights, extras={name: -value for name, value in first.extras.items()})
    site, trainer = some(digits, 10), Trainer()
    stepper = trainer.bind(first, site)
    assert stepper.aligner is not None
    buffers = [stepper.net.prototypes.data, stepper.aligner.anchors, stepper.aligner.start]
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert trainer.bind(other, site) is stepper
    expected = [weights["prototypes"], -first.extras["anchors"], weights["prototypes"]]
    assert all(torch.equal(buffer, value) for buffer, value in zip(buffers, expected, strict=True))
    assert [
        stepper.net.prototypes.data_ptr(),
        stepper.aligner.anchors.data_ptr(),
        stepper.aligner.start.data_ptr(),
    ] == addresses


def test_another_recipe_or_another_size_makes_another_step(digits: Dataset) -> None:
    site, trainer = some(digits, 10), Trainer()
    first = broadcast_of(digits, "etf", 2)
    stepper = trainer.bind(first, site)
    assert trainer.bind(broadcast_of(digits, "etf", 3), site) is not stepper
    stepper = trainer.bind(first, site)
    assert trainer.bind(first, site) is stepper
    taught, teachers = trainer.bind(first, site, torch.abs), (torch.abs, torch.neg)
    assert [trainer.bind(first, site, each).teacher for each in teachers] == [*teachers] and taught is not stepper
    assert trainer.bind(first, site).teacher is None
    weights = first.weights | {"prototypes": first.weights["prototypes"][:9]}
    extras = {"anchors": first.extras["anchors"][:9]}
    fewer = replace(first, class_names=first.class_names[:9], weights=weights, extras=extras)
    assert trainer.bind(fewer, site).net.prototypes.shape[0] == 9


def test_a_restart_forgets_the_momentum_or_takes_a_saved_one(digits: Dataset) -> None:
    stepper = Trainer().bind(prepared(digits), some(digits, 10))
    saved = {name: torch.full_like(value, 2.0) for name, value in stepper.momentum.items()}
    stepper.restart(saved)
    assert saved.keys() == dict(stepper.net.named_parameters()).keys()
    assert all((value == 2).all() for value in stepper.momentum.values())
    stepper.restart()
    assert not any(value.any() for value in stepper.momentum.values())


class Operations(TorchDispatchMode):
    """Counts operations, and how often Python reads values of tensors, for which a GPU would have to be waited for."""

    READING = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = self.reads = 0
        for name in self.READING:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.reads += 1
            return method(*args, **kwargs)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("preset", "limit"),
    [("fafi", 370), ("v10", 465), ("v12", 460), ("bank", 380), ("fafi+queue", 390), ("fafi+hard", 415)],
)
def test_a_step_is_few_operations_and_waits_for_nothing(
    preset: str, limit: int, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reads values once an epoch, not once a step; the limits are a tenth above what a step takes."""
    counts = {}
    for steps in (2, 5):
        options = {"public": 0.2, "bank__teacher_epochs": 1, "bank__size": 64} if preset == "bank" else {}
        learner = Learner(prepared(digits, preset, trace__every=0, **options), some(digits, 64 * steps))
        with monkeypatch.context() as patch, Operations(patch) as operations:
            assert learner._run_epoch(1)["steps"] == steps
        counts[steps] = operations
    assert counts[2].reads == counts[5].reads > 0
    assert (counts[5].count - counts[2].count) / 3 <= limit


TRAINED = """
import sys, numpy
from oneround import acts
from oneround.config.load import load
from oneround.data import dataset_from_arrays
from oneround.site import Site
x, y = numpy.zeros((8, 8, 8), numpy.uint8), numpy.arange(8) % 2
data = dataset_from_arrays("few", x, y, x, y)
recipe = acts.resolve(load("v10", [("model.encoder", {"kind": "cnn", "width": 4}), ("training.epochs", 1)]), data)
acts.train(acts.prepare(recipe, data.class_names, data.shape), Site("site", data.train))
print(*sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_a_step_loads_neither_the_compiler_nor_sympy() -> None:
    """Each takes as long to load as PyTorch, in every process that trains."""
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


def test_a_step_is_recorded_after_its_warm_up_and_not_for_every_size() -> None:
    stage = StageSteps({}, False, [], torch.zeros(0), records=True)

    def eager_steps_until_due(images: int) -> int:
        while not stage.is_due(images):
            stage.eager[images] += 1
            assert stage.eager[images] < 10
        return stage.eager[images]

    assert eager_steps_until_due(64) == WARM_UP
    stage.recorded[64] = None  # type: ignore[assignment]
    assert not stage.is_due(64), "there is one"
    assert eager_steps_until_due(10) == 1, "libraries are warm"
    stage.recorded |= dict.fromkeys(range(1000, 1000 + MOST_RECORDED))  # type: ignore[arg-type]
    assert not stage.is_due(10), "there are enough"
    off = StageSteps({}, False, [], torch.zeros(0), records=False)
    off.eager[64] = 99
    assert not off.is_due(64)


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_are_compared_in_training_alone_and_not_where_repeats_are_bit_equal(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """The setting is of the whole process: what is measured beside another client's training must not change it."""
    seen: dict[str, set[bool]] = {"training": set(), "measuring": set()}

    def noting(act: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            seen[act].add(torch.backends.cudnn.benchmark)
            return function(*args)

        return noted

    monkeypatch.setattr(Stepper, "_step", noting("training", Stepper._step))
    monkeypatch.setattr(acts, "_measure", noting("measuring", acts._measure))
    acts.train(prepared(digits), Site("site", some(digits, 100).data, local=Local(deterministic=deterministic)))
    assert seen == {"training": {not deterministic}, "measuring": {False}}
    assert not torch.backends.cudnn.benchmark


def test_statistics_are_measured_with_the_memory_there_is(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = prepared(digits, fusion=["typicality-gated"])
    plenty = acts.train(broadcast, some(digits, 100)).statistics
    batches = Images.batches

    def short_of_memory(images: Images, device: torch.device, mean: float, std: float, sizes: Any) -> Any:
        if sizes > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batches(images, device, mean, std, sizes)

    monkeypatch.setattr(Images, "batches", short_of_memory)
    little = acts.train(broadcast, some(digits, 100)).statistics
    assert plenty and plenty.keys() == little.keys()
    for name, value in plenty.items():
        assert torch.allclose(value, little[name], atol=1e-5), name


def test_recorded_steps_wait_for_the_device_before_its_queue_is_full(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "a thread that waits leaves the processor to others"

        def record(self) -> None:
            waiting.append(0)

        def synchronize(self) -> None:
            waiting.pop(0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Stepper, "_inputs", Stepper._blank_batch)
    learner = Learner(prepared(digits), some(digits, 100))
    replayed: list[int] = []
    graph = SimpleNamespace(replay=lambda: replayed.append(len(waiting)))
    learner.stepper.stage.recorded[8] = graph, None  # type: ignore[assignment]
    for _ in range(3 * AHEAD):
        learner.stepper(*learner.stepper._blank_batch(8), 0.1)
    assert len(replayed) == 3 * AHEAD and max(replayed) == AHEAD
