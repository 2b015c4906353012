"""A run's folder on disk: where everything lies, and how it is read and written."""

from __future__ import annotations

import fcntl
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneround import acts
from oneround.crew import Job
from oneround.errors import ProtocolError, RecipeError, RunError, did_you_mean
from oneround.observe.log import MetricsLog
from oneround.observe.sound import fault_of_result, is_table
from oneround.protocol import Broadcast, UploadFolder, blob
from oneround.reading import load
from oneround.recipe import Local, Recipe

log = logging.getLogger("oneround")


def client_name(number: int, count: int) -> str:
    """`client_007`: the name a partition's client trains under, wherever it does."""
    return f"client_{number:0{max(3, len(str(count - 1)))}d}"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def broadcast(self) -> Path:
        return self.path / "broadcast.safetensors"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @cached_property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.path / "metrics.jsonl")

    def upload(self, client: str) -> Path:
        return self.path / "uploads" / f"{client}.safetensors"

    def state(self, client: str) -> Path:
        return self.path / "clients" / client

    def states(self, client: str) -> list[Path]:
        """What is kept of a client between epochs."""
        return sorted(self.state(client).glob("*.safetensors"))

    def quarantine(self, sender: str) -> Path:
        """A place for a bad upload that nothing reads; a few per sender, the oldest goes first."""
        folder = self.path / "quarantine"
        folder.mkdir(exist_ok=True)
        word = re.sub(r"[^A-Za-z0-9_.-]", "_", sender)[:80] or "unknown"
        there = sorted(folder.glob(f"{word}.*.bin"), key=lambda path: path.stat().st_mtime_ns)
        if len(there) >= 3:
            there[0].unlink()
        return folder / f"{word}.{time.time_ns()}.bin"

    @property
    def resumption(self) -> str:
        """What to type to go on."""
        return f"oneround run {self.path} --resume"

    def job(
        self,
        client: str,
        samples: NDArray[np.int64],
        until: int,
        local: Local,
        told: Mapping[str, float],
        held: NDArray[np.int64] | None = None,
    ) -> Job:
        """Work for the crew: train that client to the end of an epoch, its state and upload kept here."""
        upload, state = self.upload(client), self.state(client)
        return Job(client, samples, self.broadcast, upload, state, until, local, told, held=held)

    def read_spreads(self) -> dict[int, float]:
        """How far apart the clients' prototypes were after each epoch; kept only where a schedule looks at it."""
        if not (self.path / "consensus.json").is_file():
            return {}
        told = self.read_json("consensus.json", [], "begin anew with another --out")
        return {int(epoch): value for epoch, value in told.items()}

    def write_spreads(self, spreads: Mapping[int, float]) -> None:
        self.write_json("consensus.json", spreads)

    def write_json(self, name: str, content: Any) -> None:
        blob.write_durably(self.path / name, json.dumps(content, indent=1, ensure_ascii=False).encode())

    def read_json(self, name: str, keys: Sequence[str], fix: str) -> dict[str, Any]:
        """What `write_json` wrote, with at least these keys; otherwise `fix` says what to do."""
        path = self.path / name
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{path}: damaged ({error}); {fix}") from None
        missing = [key for key in keys if not isinstance(told, dict) or key not in told]
        if missing or not isinstance(told, dict):
            raise RunError(f"{path}: damaged (no {', '.join(missing) or 'mapping'} in it); {fix}")
        return told

    def read_result(self) -> dict[str, Any]:
        """`result.json`, which follows from the uploads and can be made again."""
        keys, fix = (
            ("rules", "clients", "partition", "remarks", "uploads"),
            f"remove it and make it again with {self.resumption}",
        )
        told = self.read_json("result.json", keys, fix)
        fault = fault_of_result(told)
        if fault:
            raise RunError(f"{self.result}: damaged ({fault}); {fix}")
        return told

    def read_environment(self) -> dict[str, Any]:
        """What the run ran on; empty where it was not written down."""
        if not (self.path / "environment.json").is_file():
            return {}
        told = self.read_json("environment.json", ["device", "packages", "commit"], "remove it")
        if not isinstance(told["packages"], dict):
            raise RunError(f"{self.path}/environment.json: damaged (packages is no mapping); remove it")
        return told

    def read_partition(self, classes: int | None = None) -> dict[str, Any]:
        """Who holds what, of so many classes; empty where it was not written down."""
        if not (self.path / "partition.json").is_file():
            return {}
        fix = f"remove it and make it again with {self.resumption}"
        told = self.read_json("partition.json", ["class_counts", "shared_samples"], fix)
        rows = told["class_counts"]
        width = len(rows[0]) if classes is None and is_table(rows) and rows else classes
        if not (
            is_table(rows)
            and rows
            and all(len(row) == width for row in rows)
            and isinstance(told["shared_samples"], int)
        ):
            of = f" of {width} classes" if width else ""
            raise RunError(f"{self.path}/partition.json: damaged (class_counts is no table{of}); {fix}")
        return told

    def read_recipe(self, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
        """The recipe the run was begun with."""
        if not self.recipe.is_file():
            raise ProtocolError(f"{self.path}: not a run folder (no recipe.yaml in it)")
        try:
            return load(self.recipe, overrides)
        except RecipeError as error:
            told = str(error)
            raise RecipeError(told if str(self.recipe) in told else f"{self.recipe}: {told}") from None

    def uploads(self, without: Sequence[str] = (), late: Sequence[Path] = ()) -> UploadFolder:
        """The uploads that are there, checked when read; without those of some clients, with some that came late."""
        broadcast = Broadcast.read(self.broadcast)
        paths = sorted((self.path / "uploads").glob("*.safetensors"))
        if not paths:
            raise ProtocolError(f"{self.path}: no uploads yet; go on with {self.resumption}")
        if self.result.is_file():
            lost = sorted(set(self.read_result()["uploads"]) - {path.stem for path in (*paths, *late)})
            if lost:
                log.warning("%s/uploads: missing and left out: %s", self.path, ", ".join(lost))
        names = [path.stem for path in paths]
        if broadcast.recipe.secure and (without or late):
            word = f"--without {without[0]}" if without else f"--with {late[0]}"
            raise ProtocolError(
                f"{word}: these sums are under masks (sums.secure), which cancel only in the sum of all who masked together"
            )
        for name in without:
            if name not in names:
                raise ProtocolError(
                    f"--without {name}: no upload of that name{did_you_mean(name, names)} (there are {', '.join(names[:20])})"
                )
        for path in late:
            if path.stem in names and path.stem not in without:
                raise ProtocolError(f"--with {path}: {path.stem} is among the uploads already and would count twice")
        kept = [path for path in paths if path.stem not in without]
        if not kept and not late:
            raise ProtocolError(f"{self.path}: nobody's upload is left; keep at least one client")
        return UploadFolder([*kept, *late], broadcast, acts.statistics_of(broadcast))

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """One process at a time; the lock goes with the process, however it ends, which may take it some seconds."""
        self.path.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + patience
        with (self.path / ".lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= until:
                        raise RunError(
                            f"{self.path}: another process is running here; wait for it or choose another --out"
                        ) from None
                    time.sleep(0.2)
            yield
