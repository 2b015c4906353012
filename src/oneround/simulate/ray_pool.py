"""Workers on a Ray cluster train the clients of one run; its folder stays on the machine where the command runs.

A worker is a Ray actor: it keeps the data, its network and its recorded step from client to client. The broadcast goes out once a
round; states and uploads come back as bytes, so nodes need no shared folder and no data files. A client whose worker is lost
trains again on another, from the last state that has arrived, with the same numbers.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oneround.config.recipe import Local
from oneround.data import Images
from oneround.errors import OneroundError, OutOfTime, RecipeError, RunError, in_one_line
from oneround.files import write_durably
from oneround.simulate.ray_worker import versions
from oneround.simulate.workers import TrainJob
from oneround.site import threads_per_client
from oneround.training import Emit, silent

log = logging.getLogger("oneround")
MOST_LOSSES = 3  # of workers under one client, or before the first has begun
PATIENCE = 10.0  # seconds until a line says that the cluster has no room


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a Ray cluster, unless this process is connected already; `local` starts one on this machine."""
    try:
        import ray
    except ImportError:
        raise RecipeError("--ray: Ray is not installed here; pip install ray") from None
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if match := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray itself would try for minutes
            socket.create_connection((match[1], int(match[2])), timeout=PATIENCE).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about what a later Ray will do with GPUs
            dashboard = False if address == "local" else None
            ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise RecipeError(f"--ray {address}: no cluster answers ({in_one_line(error)})") from None
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process without a word
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Resources:
    """What a worker reserves, and how many workers the cluster has room for."""

    cpus: int
    gpus: float
    workers: int
    nodes: int

    @staticmethod
    def of(nodes: list[Mapping[str, float]], local: Local, parameters: int, gpus: float | None) -> Resources:
        """`nodes`: the resources of each; `gpus`: of a worker, otherwise one where the cluster has any."""
        most = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
        if gpus is None:
            gpus = 1.0 if most and local.device in ("auto", "cuda") else 0.0
        if gpus and local.device not in ("auto", "cuda"):
            raise RecipeError(f"local.device = {local.device}: Ray chooses the GPU of a worker; use auto or cuda")
        if local.device == "cuda" and not gpus:
            raise RecipeError("local.device = cuda: the Ray cluster has no GPU; use auto or cpu")
        cpus = 1 if gpus else threads_per_client(local.model_copy(update={"device": "cpu"}), parameters)
        room = [_room(node, cpus, gpus) for node in nodes]
        if not any(room):
            if gpus:
                raise RecipeError(
                    f"--ray-gpus {gpus:g}: no node of the Ray cluster has so many, and a CPU; the most is {most:g}"
                )
            raise RecipeError(f"local.threads = {cpus}: no node of the Ray cluster has so many CPUs; set it lower")
        return Resources(cpus, gpus, min(sum(room), local.workers or sum(room)), sum(map(bool, room)))

    def local(self, local: Local) -> Local:
        """The local half of the recipe on a worker."""
        device = "cuda" if self.gpus else "cpu"
        return local.model_copy(update={"device": device} | ({} if self.gpus else {"threads": self.cpus}))

    def __str__(self) -> str:
        each = f"{self.gpus:g} GPU(s)" if self.gpus else f"{self.cpus} CPU(s)"
        return f"{self.workers} worker(s) on {self.nodes} node(s), {each} each"


def _room(node: Mapping[str, float], cpus: int, gpus: float) -> int:
    """How many workers fit on a node."""
    fit = int(node.get("CPU", 0.0) // cpus)
    if not gpus:
        return fit
    cards = node.get("GPU", 0.0)
    return min(fit, int(cards) * int(1 / gpus) if gpus < 1 else int(cards // gpus))


@dataclass
class Task:
    """A client that waits for a worker, or is on one."""

    job: TrainJob
    future: Future[str]
    losses: int = 0

    def starts(self) -> bool:
        """Whether it may be given to a worker: it was begun before, or nobody has cancelled it."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def fail(self, error: Exception) -> None:
        if not self.future.done():  # its upload has not arrived
            self.future.set_exception(error)


@dataclass(frozen=True)
class Hired:
    """A worker that is ready."""

    actor: Any
    node: str
    """Its node, for messages."""


class RayPool:
    """Workers on a Ray cluster that take jobs, as a context; the interface of `WorkerPool`."""

    def __init__(
        self,
        data: Images,
        clients: int,
        local: Local,
        parameters: int,
        gpus: float | None = None,
        emit: Emit = silent,
        deadline: float | None = None,
    ) -> None:
        """The process is connected to the cluster. `parameters`: of the network; `gpus`: of every worker."""
        import ray

        if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
            raise RecipeError("--ray ray://…: for a sweep only; start a run on a node of the cluster, with --ray auto")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        self.resources = Resources.of(nodes, local, parameters, gpus)
        self.size = min(self.resources.workers, clients)
        self.resources = replace(self.resources, workers=self.size, nodes=min(self.resources.nodes, self.size))
        self.local, self.deadline = self.resources.local(local), deadline
        self.device = ""
        """Of the first worker."""
        self._data, self._listener = data, emit
        self._emitting, self._changed = threading.RLock(), threading.Condition()
        self._waiting: deque[Task] = deque()
        self._error: OneroundError | None = None
        self._closed = False
        self._ready = self._hired = self._failed = 0
        self._announced = False
        self._actors: list[Any] = []
        self._broadcast: tuple[tuple[Path, int, int], Any] | None = None
        self._reached: dict[tuple[Path, str], int] = {}
        self._threads: list[threading.Thread] = []

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline

    def __enter__(self) -> RayPool:
        import ray

        options = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "max_restarts": 0}
        self._worker: Any = ray.remote(_worker_class()).options(**options, scheduling_strategy="SPREAD")
        self._pixels, self._labels = (ray.put(part.numpy()) for part in (self._data.pixels, self._data.labels))
        self._emit({"event": "prepare", "text": f"Ray cluster: {self.resources}"})
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self.size)]
        try:
            for thread in self._threads:
                thread.start()
            self._wait_for_a_worker()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        import ray

        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for actor in self._actors if kind else ():
            ray.kill(actor)
        for thread in self._threads:
            thread.join(timeout=10)

    def submit(self, job: TrainJob) -> Future[str]:
        """Train one client; the future has its name."""
        task = Task(replace(job, local=self.local), Future())
        with self._changed:
            if self._error is not None:
                task.future.set_exception(self._error)
            else:
                self._waiting.append(task)
                self._changed.notify()
        return task.future

    def _wait_for_a_worker(self) -> None:
        """Until the first worker is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self._hired or self._error)
            if self._error is not None:
                raise self._error

    def _emit(self, event: dict[str, Any]) -> None:
        """Emit, one event at a time."""
        with self._emitting:
            self._listener(event)

    def _emit_new(self, job: TrainJob, event: dict[str, Any]) -> None:
        """Emit an event of a client, unless it is of an epoch that a lost worker had trained before."""
        if event["event"] in ("epoch", "steps"):
            if event["epoch"] <= self._reached.get((job.folder.path, job.client), 0):
                return
            if event["event"] == "epoch":
                self._reached[job.folder.path, job.client] = event["epoch"]
        self._emit(event)

    # --- a thread for every worker -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._serve_clients()
        except Exception as error:
            log.exception("the workers of the Ray cluster")
            self._give_up(RunError(f"the Ray cluster cannot be used any more: {_reason(error)}"))

    def _serve_clients(self) -> None:
        """Hire a worker, give it one client after another, and hire another when it is lost."""
        import ray

        while (hired := self._hire()) is not None:
            while (task := self._next()) is not None and self._train(hired, task):
                pass
            with self._changed:
                self._ready -= 1
            if task is None:
                with suppress(ray.exceptions.RayError):
                    ray.get(hired.actor.close.remote(), timeout=5)
            ray.kill(hired.actor)

    def _hire(self) -> Hired | None:
        """A worker that is ready; None when the pool is closed or cannot go on."""
        import ray

        while not self._closed and self._error is None:
            actor = self._worker.remote()
            self._actors.append(actor)
            try:
                node = self._introduce(actor)
                if node is not None:
                    return Hired(actor, node)
            except ray.exceptions.RayError as error:
                log.warning("a worker of the Ray cluster did not start: %s", _reason(error))
                with self._changed:
                    self._failed += 1
                    if self._failed >= MOST_LOSSES and not self._hired:
                        self._give_up(RunError(f"the Ray cluster starts no worker: {_reason(error)}"))
                    self._changed.wait(timeout=1)
            ray.kill(actor)
        return None

    def _introduce(self, actor: Any) -> str | None:
        """Give a new worker the data; returns its node, or None when the pool is closed meanwhile."""
        import ray

        waiting, since = actor.hello.remote(), time.monotonic()
        while not ray.wait([waiting], timeout=0.5)[0]:
            if self._closed:
                return None
            if not self._ready and not self._announced and time.monotonic() - since > PATIENCE:
                self._announced = True
                self._emit({"event": "trouble", "text": "the Ray cluster has no room for a worker; waiting"})
            if self.out_of_time and self._hired and not self._ready:
                self._drop_waiting(
                    OutOfTime("the time is over and the Ray cluster has lost its workers; resume to go on")
                )
        hello: dict[str, str] = ray.get(waiting)
        node, here = f"node {hello['node']} of the Ray cluster", versions()
        if fault := fault_of(node, hello, here):
            self._give_up(RunError(fault))
            return None
        if hello["torch"] != here["torch"]:
            text = f"{node} has torch {hello['torch']}, here it is {here['torch']}: last digits may differ"
            self._emit({"event": "trouble", "text": text})
        try:
            device: str = ray.get(actor.begin.remote(self._pixels, self._labels, self.local.device))
        except ray.exceptions.RayTaskError as error:
            self._give_up(RunError(f"{node}: {_reason(error)}"))
            return None
        log.info("a worker is ready on %s (%s): %s", node, hello["id"], device)
        with self._changed:
            self.device = self.device or device
            self._ready, self._hired = self._ready + 1, self._hired + 1
            self._changed.notify_all()
        return node

    def _next(self) -> Task | None:
        """The next client; None when the pool is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
                task = self._waiting.popleft()
                if task.starts():
                    return task

    def _train(self, hired: Hired, task: Task) -> bool:
        """Train a client; whether the worker is still there."""
        import ray

        job = task.job
        try:
            ray.get(hired.actor.hello.remote())
        except ray.exceptions.RayError as error:
            log.warning("a worker on %s was lost between two clients: %s", hired.node, _reason(error))
            self._return(task)
            return False
        try:
            states = {path.name: path.read_bytes() for path in job.folder.states(job.client)}
            seconds = None if self.deadline is None else self.deadline - time.time()
            call = hired.actor.train.options(num_returns="streaming")
            for message in call.remote(job, states, seconds, [self._sent(job.folder.broadcast)]):
                self._take(hired, task, *ray.get(message))
            return True
        except ray.exceptions.RayTaskError as error:
            log.error("%s on %s: %s", job.client, hired.node, error)
            text = f"{job.client}, on {hired.node}: {_reason(error)}"
            task.fail(RunError(text))
            return True
        except ray.exceptions.RayError as error:
            self._lose(hired, task, error)
        except Exception as error:  # of the run's folder: a full disk
            task.fail(error)
        return False

    def _take(self, hired: Hired, task: Task, kind: str, content: Any) -> None:
        """One message of a worker."""
        job = task.job
        if kind == "event":
            self._emit_new(job, content)
        elif kind == "state":
            for name, raw in content.items():
                write_durably(job.folder.state(job.client) / name, raw, flush=False)
        elif kind == "upload":
            write_durably(job.folder.upload(job.client), content, flush=False)
            task.future.set_result(job.client)
        elif isinstance(content, RecipeError):  # of a plug-in, a device
            task.fail(RecipeError(f"{hired.node}: {content}"))
        else:
            task.fail(content)

    def _sent(self, path: Path) -> Any:
        """The broadcast as an object of the cluster, put there once."""
        import ray

        with self._changed:
            status = path.stat()
            version = path, status.st_mtime_ns, status.st_ino
            if self._broadcast is None or self._broadcast[0] != version:
                self._broadcast = version, ray.put(path.read_bytes())
            return self._broadcast[1]

    def _lose(self, hired: Hired, task: Task, error: Exception) -> None:
        """A worker is lost while it trains: its client is the next that another one trains."""
        if task.future.done():  # its upload has arrived
            return
        task.losses += 1
        lost = f"{task.job.client}: its worker on {hired.node} is lost"
        log.warning("%s: %s", lost, _reason(error))
        if self._closed:
            task.fail(RunError(lost))
        elif self.out_of_time:
            task.fail(OutOfTime(f"{lost}, and the time is over; resume to go on"))
        elif task.losses >= MOST_LOSSES:
            resume = f"continue with {task.job.folder.resume_command}"
            task.fail(RunError(f"{lost}, like {task.losses - 1} before it (out of memory?); {resume}"))
        else:
            self._return(task)
            self._emit({"event": "trouble", "text": f"{lost}; another trains it again"})

    def _return(self, task: Task) -> None:
        """Make a client the next that is trained."""
        with self._changed:
            self._waiting.appendleft(task)
            if self._closed or self._error is not None:
                self._drop_waiting(self._error or RunError(f"{task.job.client}: the Ray cluster was given up"))
            self._changed.notify()

    def _give_up(self, error: OneroundError) -> None:
        """The cluster cannot be used: what waits fails, and what is submitted later."""
        with self._changed:
            self._error = self._error or error
            self._drop_waiting(self._error)
            self._changed.notify_all()

    def _drop_waiting(self, error: OneroundError) -> None:
        with self._changed:
            while self._waiting:
                task = self._waiting.popleft()
                if task.starts():
                    task.fail(error)


def fault_of(node: str, hello: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Why a worker cannot be used, from what it says of its node and the versions here."""
    install = f"install oneround {here['oneround']} on every node"
    if "missing" in hello:
        return f"{node}: oneround cannot be imported ({hello['missing']}); {install}"
    if hello["oneround"] != here["oneround"]:
        return f"{node} has oneround {hello['oneround']}; {install}"
    return None


def _reason(error: Exception) -> str:
    """One line; of an error raised on a worker, the error itself."""
    return in_one_line(getattr(error, "cause", None) or error)


def _worker_class() -> type:
    """The class of the actors. A class inside a function travels by value, so that a node without oneround can say so."""

    class RayWorker:
        def hello(self) -> dict[str, str]:
            import ray

            node = {"node": ray.util.get_node_ip_address(), "id": ray.get_runtime_context().get_node_id()}  # type: ignore[no-untyped-call]
            try:
                from oneround.simulate.ray_worker import versions
            except ImportError as error:
                return {**node, "missing": str(error)}
            return {**node, **versions()}

        def begin(self, pixels: Any, labels: Any, device: str) -> str:
            from oneround.simulate.ray_worker import NodeWorker

            self.worker, self.broadcast = NodeWorker(pixels, labels), None
            return self.worker.device(device)

        def train(self, job: Any, states: Any, seconds: float | None, broadcast: list[Any]) -> Iterator[Any]:
            import ray

            if self.broadcast != broadcast[0]:
                self.worker.set_broadcast(ray.get(broadcast[0]))
                self.broadcast = broadcast[0]
            yield from self.worker.train(job, states, seconds)

        def close(self) -> None:
            self.worker.close()

    return RayWorker
