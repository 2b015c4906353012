"""A run's folder on disk: paths, readers and writers of its files."""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.config.load import checked, load
from oneround.config.recipe import Recipe
from oneround.errors import ProtocolError, RecipeError, RunError, did_you_mean
from oneround.files import write_durably
from oneround.protocol import Broadcast, UploadFolder
from oneround.runs.integrity import Content, EnvironmentContent, PartitionContent, ResultContent
from oneround.runs.log import MetricsLog

log = logging.getLogger("oneround")


def client_name(number: int, count: int) -> str:
    """`client_007`: the name of a client to whom the partition deals samples."""
    return f"client_{number:0{max(3, len(str(count - 1)))}d}"


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.broadcast = path / "broadcast.safetensors"
        self.result = path / "result.json"
        self.model = path / "model"
        self.metrics = MetricsLog(path / "metrics.jsonl")

    def round_model(self, number: int) -> Path:
        """The model of a round, where there are several."""
        return self.path / "rounds" / f"round_{number:03d}"

    def upload(self, client: str) -> Path:
        return self.path / "uploads" / f"{client}.safetensors"

    def upload_ahead(self, client: str) -> Path:
        """Where an upload waits until the one before it is scored."""
        return self.path / "ahead" / f"{client}.safetensors"

    def state(self, client: str) -> Path:
        return self.path / "clients" / client

    def states(self, client: str) -> list[Path]:
        """Files of a client's training state."""
        return sorted(self.state(client).glob("*.safetensors"))

    @property
    def first_exchange(self) -> RunFolder:
        """Recipe, broadcast and uploads of the first of two exchanges: a folder that `oneround fuse` takes."""
        return RunFolder(self.path / "first_exchange")

    def keep_first_exchange(self) -> None:
        """Copy what the second exchange overwrites; the uploads are moved when it begins."""
        first = self.first_exchange
        (first.path / "uploads").mkdir(parents=True, exist_ok=True)
        for own, copy in ((self.broadcast, first.broadcast), (self.recipe, first.recipe)):
            write_durably(copy, own.read_bytes())

    def quarantine(self, sender: str) -> Path:
        """A path for a bad upload, which nothing reads; at most three per sender are kept, the latest."""
        folder = self.path / "quarantine"
        folder.mkdir(exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", sender)[:80] or "unknown"
        earlier = sorted(folder.glob(f"{name}.*.bin"), key=lambda path: path.stat().st_mtime_ns)
        if len(earlier) >= 3:
            earlier[0].unlink()
        return folder / f"{name}.{time.time_ns()}.bin"

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return f"oneround run {self.path} --resume"

    @property
    def is_batched(self) -> bool:
        """Whether its clients were trained together when the run was begun."""
        try:
            content = self.read_environment()
        except (OSError, RunError):  # missing or damaged: one by one, which differs in rounding only
            return False
        return content.get("batched") is True

    def read_spreads(self) -> dict[int, float]:
        """Epoch → distance between the clients' prototypes after it; empty unless a schedule depends on it."""
        if not (self.path / "consensus.json").is_file():
            return {}
        content = self.read_json("consensus.json", "start over with another --out")
        return {int(epoch): value for epoch, value in content.items()}

    def write_spreads(self, spreads: Mapping[int, float]) -> None:
        self.write_json("consensus.json", spreads)

    def write_json(self, name: str, content: Any) -> None:
        write_durably(self.path / name, json.dumps(content, indent=1, ensure_ascii=False).encode())

    def read_json(self, name: str, fix: str, content: type[Content] = Content) -> dict[str, Any]:
        """A JSON object with the keys of `content`; where it is damaged, RunError with `fix` as advice."""
        path = self.path / name
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            checked(content, raw, "content")
        except (ValueError, RecipeError) as error:
            raise RunError(f"{path}: damaged ({str(error).splitlines()[0]}); {fix}") from None
        return raw

    @property
    def rebuild_advice(self) -> str:
        """Advice for a damaged file that can be made again."""
        return f"remove it and make it again with {self.resume_command}"

    def read_result(self) -> dict[str, Any]:
        """`result.json`, which can be made again from the uploads."""
        return self.read_json("result.json", self.rebuild_advice, ResultContent)

    def read_partition(self) -> dict[str, Any]:
        """`partition.json`, which can be made again from the recipe."""
        return self.read_json("partition.json", self.rebuild_advice, PartitionContent)

    def read_environment(self) -> dict[str, Any]:
        """`environment.json`"""
        return self.read_json("environment.json", "remove it", EnvironmentContent)

    def read_recipe(self, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
        """The recipe of the run; ProtocolError where the folder has none."""
        if not self.recipe.is_file():
            raise ProtocolError(f"{self.path}: not a run folder (no recipe.yaml in it)")
        try:
            return load(self.recipe, overrides)
        except RecipeError as error:
            message = str(error)
            raise RecipeError(message if str(self.recipe) in message else f"{self.recipe}: {message}") from None

    def uploads(self, without: Sequence[str] = (), late: Sequence[Path] = ()) -> UploadFolder:
        """The uploads so far, checked when they are read.

        Args:
            without: clients whose uploads are left out.
            late: files of further uploads.
        """
        broadcast = Broadcast.read(self.broadcast)
        paths = sorted((self.path / "uploads").glob("*.safetensors"))
        if not paths:
            raise ProtocolError(f"{self.path}: no uploads yet; continue with {self.resume_command}")
        if self.result.is_file():
            lost = sorted(set(self.read_result()["uploads"]) - {path.stem for path in (*paths, *late)})
            if lost:
                log.warning("%s/uploads: missing and left out: %s", self.path, ", ".join(lost))
        names = [path.stem for path in paths]
        if broadcast.masked and (without or late):
            option = f"--without {without[0]}" if without else f"--with {late[0]}"
            raise ProtocolError(
                f"{option}: these sums are under masks (sums.secure), which cancel only in the sum over all sites that masked together"
            )
        for name in without:
            if name not in names:
                raise ProtocolError(
                    f"--without {name}: no upload of that name{did_you_mean(name, names)} (there are {', '.join(names[:20])})"
                )
        for path in late:
            if path.stem in names and path.stem not in without:
                raise ProtocolError(f"--with {path}: {path.stem} is among the uploads already and would count twice")
        remaining = [path for path in paths if path.stem not in without]
        if not remaining and not late:
            raise ProtocolError(f"{self.path}: no upload is left; keep at least one client")
        return UploadFolder([*remaining, *late], broadcast, acts.statistics_of(broadcast))

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the folder's lock, so that only one process works in it; wait `patience` seconds for another process to end.

        A folder that is new, and whose run fails before anything is in it but lock and log, is removed.
        """
        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        deadline, waiting = time.monotonic() + patience, False
        with (self.path / ".lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if patience and not waiting:
                        log.warning("%s: waiting for another process here to end", self.path)
                        waiting = True
                    if time.monotonic() >= deadline:
                        raise RunError(
                            f"{self.path}: another process is running here; wait for it or choose another --out"
                        ) from None
                    time.sleep(0.2)
            try:
                yield
            except BaseException:
                if new and {path.name for path in self.path.iterdir()} <= {".lock", "run.log"}:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
