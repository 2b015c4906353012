"""The in-process transport: all clients on this machine, or on the workers of a Ray cluster.

All clients train to the next snapshot, then their uploads are fused and scored. The state of idle clients is on disk, on a GPU in its memory
as long as there is room, and scoring holds one network at a time, so memory does not grow with the number of clients. A run can be killed at
any moment and resumed: uploads and states are replaced whole, and a client that is behind trains again.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset, load_dataset
from oneround.errors import Interrupted, OutOfTime, RecipeError, RunError
from oneround.files import BackgroundFlush, logging_to
from oneround.privacy.disclosure import disclosed_counts
from oneround.processes import load_workers
from oneround.protocol import Broadcast, Upload, UploadFolder, blob
from oneround.runs.folder import RunFolder
from oneround.runs.result import Result
from oneround.server.loop import is_begun, open_run, serve
from oneround.server.plan import DealtPlan
from oneround.simulate.batching import REMARK, Members, groups, trains_batched
from oneround.simulate.ray_pool import RayPool, connected
from oneround.simulate.workers import GroupJob, TrainJob, WorkerPool
from oneround.site import num_workers
from oneround.training import Emit, silent
from oneround.training.alignment.schedules import consensus, spread

log = logging.getLogger("oneround")
Trained = Future[str] | Future[list[str]]
"""The future of a client's upload, or of those of a group."""


def run(
    recipe: Recipe,
    folder: str | os.PathLike[str],
    *,
    data: Dataset | None = None,
    resume: bool = False,
    emit: Emit = silent,
    workers: WorkerPool | None = None,
    deadline: float | None = None,
    ray: str | None = None,
    ray_gpus: float | None = None,
    draws: bool = True,
) -> Result:
    """Run a recipe with all clients on this machine; writes everything to `folder` and returns the result.

    `resume`: continue where an earlier run in the folder was stopped. `workers`: a pool that several runs share. At `deadline`
    (`time.time()`) every client ends its epoch and saves its state, and `OutOfTime` is raised. `ray`: train the clients on the
    Ray cluster at this address, each with `ray_gpus` GPUs (default: one where the cluster has any, otherwise none). `draws`: leave
    pictures too.
    """
    run_folder = RunFolder(Path(folder))
    if run_folder.recipe.exists() and not resume:
        raise RecipeError(
            f"{run_folder.path}: there is a run here already; continue with --resume, or choose another --out"
        )
    if ray_gpus is not None and ray is None:
        raise RecipeError(f"--ray-gpus {ray_gpus:g}: only with --ray, the address of the cluster")
    emit = _one_at_a_time(partial(_log_trouble, emit))
    data = data or load_dataset(recipe.data, recipe.local.data_path)
    plan = DealtPlan.of(recipe, data)
    local, parameters, clients = plan.recipe.local, plan.traffic.parameters, len(plan.clients)
    size, cluster = num_workers(local, parameters, clients), ExitStack()

    def make_pool() -> WorkerPool | RayPool:
        if ray is None:
            return WorkerPool(plan.data.train, size, emit, deadline)
        cluster.enter_context(connected(ray))
        return RayPool(plan.data.train, clients, local, parameters, ray_gpus, emit, deadline)

    with run_folder.locked(), logging_to(run_folder.path / "run.log"), cluster:
        finished = is_begun(plan, run_folder) and run_folder.result.exists()
        try:
            if ray is None and workers is None and size > 1 and not finished:
                load_workers(WorkerPool.__module__)
            batched = trains_batched(plan, run_folder, on_ray=ray is not None)
            remarks = [*plan.remarks(), *simulation_remarks(plan, batched)]
            notes = [f"  note: {remark}" for remark in remarks]
            lines = [*plan.lines(batched), *notes]
            emit({"event": "plan", "lines": lines, "steps": plan.steps, "epochs": plan.round_ends[-1]})
            if not finished:
                for remark in remarks:
                    log.warning(remark)
            own = None if finished or workers else make_pool()  # a cluster that cannot be used leaves nothing behind
            open_run(plan, run_folder, emit, batched)
            if run_folder.result.exists():
                return Result.read(run_folder.path)
            with nullcontext(workers) if workers else own or make_pool() as pool:
                if isinstance(pool, RayPool):
                    _record_workers(run_folder, pool)
                result = serve(plan, run_folder, SimulatedClients(plan, run_folder, pool, batched), emit, draws)
                if isinstance(pool, WorkerPool):
                    pool.settle()  # the states are removed below
        except KeyboardInterrupt:
            advice = (
                f"continue with {run_folder.resume_command}"
                if run_folder.recipe.exists()
                else "nothing was trained yet"
            )
            raise Interrupted(f"interrupted; {advice}") from None
        except BrokenProcessPool:
            raise RunError(
                f"{run_folder.path}: a training process died (out of memory?); continue with {run_folder.resume_command}, "
                "perhaps with --set local.workers=1"
            ) from None
        for name in ("clients", "ahead"):
            shutil.rmtree(run_folder.path / name, ignore_errors=True)
        return result


def _record_workers(folder: RunFolder, pool: RayPool) -> None:
    """The device that trains is that of the workers."""
    if (folder.path / "environment.json").is_file():
        environment = folder.read_json("environment.json", "remove it")
        folder.write_json("environment.json", {**environment, "device": pool.device, "ray": str(pool.resources)})


def simulation_remarks(plan: DealtPlan, batched: bool = False) -> list[str]:
    """Remarks on what only a simulation can do, or does worse than a real federation."""
    remarks = []
    if plan.recipe.secure:
        remarks.append(
            "masks are made from the seed: a simulation has no secrets, only a real federation hides anything"
        )
    if plan.needs_other_clients:
        remarks.append("clients learn of each other's prototypes every epoch: simulation only, not a one-round method")
    if batched:
        remarks.append(REMARK)
    return remarks


class SimulatedClients:
    """The transport: clients that workers train in turn or in groups; their uploads and states are in the run's folder."""

    snapshots = live = trusted = True

    def __init__(self, plan: DealtPlan, folder: RunFolder, pool: WorkerPool | RayPool, batched: bool = False) -> None:
        self.plan, self.folder, self.pool, self.batched = plan, folder, pool, batched
        self.spreads = folder.read_spreads()
        """Epoch → spread of the clients' prototypes after it, if a schedule needs it."""
        self.reached = self._reached()
        """Client → epoch of its upload."""
        self._begun: Begun | None = None
        # Uploads that a kill left there: their clients go on from their states.
        shutil.rmtree(folder.path / "ahead", ignore_errors=True)

    def agree(self, broadcast: Broadcast) -> Broadcast:
        """A simulation has no keys: the roster has names only."""
        return replace(broadcast, roster=dict.fromkeys(self.plan.clients, ""))

    def survey(self, broadcast: Broadcast) -> dict[str, Tensor]:
        counts = torch.from_numpy(self.plan.split.counts)
        return {
            name: disclosed_counts(counts[number], broadcast.recipe.reveal)
            for name, number in self.plan.clients.items()
        }

    def discard(self, client: str) -> None:
        raise RunError(f"{client}: its upload cannot be fused")

    def traffic(self) -> dict[str, tuple[int, int]]:
        each = self.plan.traffic
        return {name: (rounds * each.down, rounds * each.up) for name, rounds in self.plan.rounds_by_client.items()}

    def remarks(self) -> list[str]:
        return simulation_remarks(self.plan, self.batched)

    def collect(self, broadcast: Broadcast, epoch: int) -> list[str]:
        """Train this round's participants to the end of `epoch`; one epoch at a time if they need each other's prototypes."""
        names = self.plan.participants(broadcast.round)
        if self.plan.needs_other_clients and broadcast.weights:
            self._catch_up()
            first = max([broadcast.first_epoch, *self.spreads])
            for shared_epoch in range(first + 1, epoch + 1):
                self._train_to(broadcast, names, shared_epoch)
                uploads = UploadFolder(self._paths(names), broadcast, acts.statistics_of(broadcast))
                if isinstance(self.pool, WorkerPool):
                    self.pool.settle()  # a state that is behind the spreads could not catch up
                self.spreads[shared_epoch] = spread(upload.weights["prototypes"] for upload in uploads)
                self.folder.write_spreads(self.spreads)
        self._train_to(broadcast, names, epoch)
        return names

    def begin(self, broadcast: Broadcast, epoch: int) -> None:
        """Let clients train on, on a GPU, whose lanes would have nothing to do; their uploads are put in place when they are collected."""
        names = self.plan.participants(broadcast.round)
        going_on = isinstance(self.pool, WorkerPool) and self.pool.goes_on and not self.pool.out_of_time
        if going_on and not self.plan.needs_other_clients:
            behind = [name for name in names if self.reached[name] != epoch]
            self._begun = Begun(epoch, behind, self._submit(behind, epoch, names, ahead=True))

    def _put_in_place(self, done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            for name in _names(done):
                blob.move(self.folder.upload_ahead(name), self.folder.upload(name), "upload")

    def _paths(self, names: Sequence[str]) -> list[Path]:
        return [self.folder.upload(name) for name in names]

    def _train_to(self, broadcast: Broadcast, names: Sequence[str], epoch: int) -> None:
        """Train the clients that have not reached that epoch; RunError if safeguards have stopped one of them."""
        self._train([name for name in names if self.reached[name] != epoch], epoch, names)
        manifests = [blob.peek(path, "upload") for path in self._paths(names)]
        stopped = [each["stopped"] for each in manifests if each["stopped"] and each["epoch"] < broadcast.last_epoch]
        if stopped:
            raise RunError(
                "\n".join(stopped)
                + f"\nevery client's upload so far is in {self.folder.path}/uploads; "
                + f"score them with oneround fuse {self.folder.path}"
            )

    def _catch_up(self) -> None:
        """Train clients whose state was lost again from the start, with the recorded spreads."""
        behind = [
            name
            for name in self.plan.clients
            if self.spreads and self.reached[name] != self.plan.recipe.epochs and not self.folder.states(name)
        ]
        for epoch in sorted(self.spreads) if behind else ():
            self._train(behind, epoch, list(self.plan.clients))

    def _reached(self) -> dict[str, int | None]:
        """The epoch of every client's upload. Removes damaged uploads and states; those clients train again.

        A client whose state is older than its upload goes on from the state; where clients need each other's prototypes, one epoch
        at a time. At the end of a round the upload is all that counts.
        """
        reached: dict[str, int | None] = {}
        for name in self.plan.clients:
            upload = self.folder.upload(name)
            reached[name] = Upload.epoch_of(upload)
            damaged = [path for path in self.folder.states(name) if not blob.is_whole(path, "state")]
            if reached[name] is None and upload.exists():
                damaged.append(upload)
            for path in damaged:
                log.warning("%s: damaged; discarded, %s trains again", path, name)
                path.unlink()
            epochs = [int(blob.peek(path, "state")["epoch"]) for path in self.folder.states(name)]
            between = reached[name] is not None and reached[name] not in self.plan.round_ends
            if self.plan.needs_other_clients and between and epochs:
                reached[name] = min(epochs)
        return reached

    def _groups(self, names: Sequence[str], epoch: int, participants: Sequence[str]) -> list[Members]:
        """Clients in the order they train: the groups of a round's participants, or each of `names` alone."""
        sizes = self.plan.sizes
        if self.batched and epoch <= self.plan.recipe.epochs:
            return groups(self.plan.recipe, self.plan.data.shape, {name: sizes[name] for name in participants})
        return [Members([name], 1) for name in sorted(names, key=lambda name: -sizes[name])]

    def _train(self, names: Sequence[str], epoch: int, participants: Sequence[str]) -> None:
        """Train these clients to the end of an epoch, the largest first; at least one, even if the time is over.

        Uploads at the end of a round are on disk afterwards, whatever happens to the machine.
        """
        begun, self._begun = self._begun, None
        with BackgroundFlush() as flush:
            if begun is None:
                self._drop_states_after(names, epoch)
                self._wait(self._submit(names, epoch, participants, flush), names, epoch, flush)
            else:
                assert (begun.epoch, begun.names) == (epoch, list(names)), "what is begun is collected next"
                self._wait(begun.futures, names, epoch, flush, ahead=True)
        self.reached |= dict.fromkeys(names, epoch)

    def _drop_states_after(self, names: Sequence[str], epoch: int) -> None:
        """Remove states of later epochs: a client whose upload is lost while it was already training on has to train again."""
        for name in names:
            for path in self.folder.states(name) if self.reached[name] is None else ():
                if int(blob.peek(path, "state")["epoch"]) > epoch:
                    path.unlink()

    def _submit(
        self,
        names: Sequence[str],
        epoch: int,
        participants: Sequence[str],
        flush: BackgroundFlush | None = None,
        ahead: bool = False,
    ) -> list[Trained]:
        """Give the clients to the pool; the futures have the names of those who have uploaded. `ahead`: beside the uploads before."""
        clients, split, local = self.plan.clients, self.plan.split, self.plan.recipe.local
        agreement = consensus(self.spreads, epoch - 1)

        def job(name: str) -> TrainJob:
            samples, validation = split.clients[clients[name]], split.client_validation[clients[name]]
            return TrainJob(name, samples, self.folder, epoch, local, agreement, validation, ahead)

        def flush_uploads(done: Trained) -> None:
            if flush is not None and not done.cancelled() and done.exception() is None:
                for name in _names(done):
                    flush.add(self.folder.upload(name))

        futures: list[Trained] = []
        due = set(names)
        for members in self._groups(names, epoch, participants):
            behind = {slot: job(name) for slot, name in enumerate(members.names) if name in due}
            if not behind:
                continue
            if futures and self.pool.out_of_time:  # in a pool of one, `submit` returns after training
                break
            if members.slots == 1:
                futures.append(self.pool.submit(behind[0]))
            else:
                assert isinstance(self.pool, WorkerPool), "Ray's workers train one client at a time"
                futures.append(self.pool.submit_group(GroupJob(behind, members.slots)))
            if epoch in self.plan.round_ends:  # an earlier upload that is lost is made again
                futures[-1].add_done_callback(flush_uploads)
        return futures

    def _wait(
        self,
        futures: Sequence[Trained],
        names: Sequence[str],
        epoch: int,
        flush: BackgroundFlush,
        ahead: bool = False,
    ) -> None:
        """Wait for the uploads; OutOfTime if some are missing. `ahead`: they are not in their place yet."""
        arrived = 0
        out_of_time: OutOfTime | None = None
        for done in as_completed(futures):
            if ahead:
                self._put_in_place(done)
            try:
                uploaded = _names(done)
                for name in uploaded:
                    log.info("%s has uploaded, epoch %d", name, epoch)
                    if epoch in self.plan.round_ends:  # a future is done before its callbacks are called
                        flush.add(self.folder.upload(name))
                arrived += len(uploaded)
            except OutOfTime as error:
                out_of_time = error  # the others end their epoch too and save it
            except CancelledError:
                continue
            for each in futures if self.pool.out_of_time else ():
                each.cancel()
        if out_of_time is not None:
            raise out_of_time
        if arrived < len(names) or (names and epoch < self.plan.recipe.epochs and self.pool.out_of_time):
            raise OutOfTime(
                f"{self.folder.path}: stopped before epoch {epoch} was scored, the time is over; resume to go on"
            )


class Begun(NamedTuple):
    """Clients that train on while the uploads before are scored."""

    epoch: int
    names: list[str]
    futures: list[Trained]


def _names(done: Future[Any]) -> list[str]:
    """The clients whose uploads have arrived."""
    trained = done.result()
    return [trained] if isinstance(trained, str) else trained


def _one_at_a_time(emit: Emit) -> Emit:
    """For callbacks that are not made for several threads: clients may train on while their uploads are scored."""
    lock = threading.RLock()

    def locked(event: dict[str, Any]) -> None:
        with lock:
            emit(event)

    return locked


def _log_trouble(emit: Emit, event: dict[str, Any]) -> None:
    """Emit an event; a warning of training ("trouble") also goes into the log."""
    if event["event"] == "trouble" and emit is not silent:  # `silent` logs it itself
        log.warning(event["text"])
    emit(event)
