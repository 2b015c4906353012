"""Which clients of a simulation train together, as one batched network, and whether they do at all.

It pays where a step is too small to fill the device: on a GPU the launches of a group's step are those of one client. The groups
of a run follow from the sizes of its clients, so a resumed run forms the same ones; a client that has reached its epoch leaves an
empty slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oneround.config.parts import Part
from oneround.config.recipe import Federated
from oneround.data.images import Shape
from oneround.errors import RecipeError
from oneround.models.prototype import meta_network, network_from
from oneround.runs.folder import RunFolder
from oneround.server.loop import is_begun
from oneround.server.plan import DealtPlan
from oneround.site import SMALL_NETWORK, choose_device
from oneround.training.batched_loop import StepShape, step_shape
from oneround.training.batched_step import not_batchable
from oneround.training.batches import steps_per_epoch

MOST_ACTIVATIONS = 2**27
"""Of all clients of a group in one step: 512 MiB in fp32, of which a step keeps a few copies."""
MOST_CLIENTS = 64
LEAST_CLIENTS = 8
"""Of the largest group where nobody asked for it: a step that fills more of a GPU by itself gains little."""
REMARK = "clients with steps of equal shape were trained together, as one network: equal to one by one up to rounding"


class Members(NamedTuple):
    """Clients that train together, one in each slot; the last slots may be empty."""

    names: list[str]
    slots: int


def trains_batched(plan: DealtPlan, folder: RunFolder, *, on_ray: bool = False) -> bool:
    """Whether the clients of a run train together: as it was begun, else as `local.batched` asks.

    `on_ray`: on the workers of a Ray cluster, which train one client at a time. RecipeError where what is asked for cannot be done.
    """
    if is_begun(plan, folder):
        if on_ray and folder.is_batched and not folder.result.exists():
            raise RecipeError(f"{folder.path}: its clients train together (local.batched); continue without --ray")
        return folder.is_batched
    local = plan.recipe.local
    if local.batched is True:
        problem = "Ray's workers train one client at a time; leave it out, or --ray" if on_ray else _problem(plan)
        if problem is not None:
            raise RecipeError(f"local.batched = true: {problem}")
        return True
    if local.batched is False or local.deterministic or on_ray or plan.traffic.parameters >= SMALL_NETWORK:
        return False
    if choose_device(local.device).type != "cuda" or _problem(plan) is not None:
        return False
    return max(len(members.names) for members in groups(plan.recipe, plan.data.shape, plan.sizes)) >= LEAST_CLIENTS


def _problem(plan: DealtPlan) -> str | None:
    """Why no two clients of the plan can train together, and what to do about it."""
    fix = "leave it out (auto), and clients train one by one"
    if plan.recipe.local.compile:
        return "local.compile compiles the network of one client; set it to false"
    reason = not_batchable(plan.recipe, plan.data.shape[0])
    if reason is not None:
        return f"{reason}; {fix}"
    sizes = plan.sizes
    if any(len(members.names) > 1 for members in groups(plan.recipe, plan.data.shape, sizes)):
        return None
    training = plan.recipe.training
    largest = sorted(step_shape(size, training)[0] for size in sizes.values())[-2:]
    if len(largest) < 2:
        return f"there is one client; {fix}"
    rooms = (
        size
        for size in range(min(largest), 0, -1)
        if 2 * activations(plan.recipe, plan.data.shape, size) <= MOST_ACTIVATIONS
    )
    room = next(rooms, 0)
    if room < min(largest):
        smaller = f"set training.batch_size to {room} or less" if room else "take a smaller encoder"
        return (
            f"two clients with {min(largest)} samples in a step do not fit into one, at most {room} would; "
            f"{smaller}, or {fix}"
        )
    return f"no two clients have steps of one shape; set training.batch_size to {min(largest)} or less, or {fix}"


def groups(recipe: Federated, shape: Shape, sizes: Mapping[str, int]) -> list[Members]:
    """The groups of clients with so many samples: equal step shapes, the most steps first, at most twice as many as the last.

    A group has at most `MOST_CLIENTS` clients and `MOST_ACTIVATIONS`, and groups of one shape are of one size as far as possible.
    """
    training = recipe.training
    by_shape: dict[StepShape, list[str]] = {}
    for name, size in sizes.items():
        by_shape.setdefault(step_shape(size, training), []).append(name)
    formed = []
    for (samples, _, _), names in sorted(by_shape.items(), reverse=True):
        steps = {name: steps_per_epoch(sizes[name], training) for name in names}
        most = max(1, min(MOST_CLIENTS, MOST_ACTIVATIONS // activations(recipe, shape, samples)))
        for alike in _alike(sorted(names, key=lambda name: -steps[name]), steps):
            count = -(-len(alike) // most)
            slots = -(-len(alike) // count)
            cuts = [len(alike) * number // count for number in range(count + 1)]
            formed += [Members(alike[start:end], slots) for start, end in pairwise(cuts)]
    return formed


def _alike(names: Sequence[str], steps: Mapping[str, int]) -> list[list[str]]:
    """Cut names, those with the most steps first, where steps fall below half."""
    runs: list[list[str]] = []
    for name in names:
        if not runs or 2 * steps[name] < steps[runs[-1][0]]:
            runs.append([])
        runs[-1].append(name)
    return runs


def activations(recipe: Federated, shape: Shape, samples: int) -> int:
    """Numbers that a step of one client with so many samples keeps: outputs of convolutions, and similarities of all pairs."""
    images = recipe.training.views * samples
    others = sum(section.size for section in (recipe.queue, recipe.bank) if section is not None)
    return images * (outputs_per_image(recipe.encoder, shape) + images + others)


@lru_cache(maxsize=32)
def outputs_per_image(encoder: Part, shape: Shape) -> int:
    """Outputs of all convolutions for one image."""
    total = 0

    def count(_layer: nn.Module, _inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        nonlocal total
        total += outputs.numel()

    layout = meta_network(encoder, shape[0], 2, "prototypes").state_dict()
    blank = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in layout.items()}
    net = network_from(encoder, shape[0], 2, blank).eval()  # on the CPU: the meta device takes seconds to load
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(count)
    with torch.no_grad():
        net.encoder(torch.zeros(1, *shape))
    return total
