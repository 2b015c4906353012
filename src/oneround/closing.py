"""How a run is written up, whoever carried its uploads: its log in words, a snapshot in the metrics, the model and the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.data import Images
from oneround.evaluate import Score, score_personal
from oneround.folder import RunFolder
from oneround.models import Single
from oneround.observe import pictures
from oneround.protocol import GlobalModel, Upload, UploadFolder, blob
from oneround.runs import Result
from oneround.site import Site

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Facts:
    """What a result says besides scores."""

    data: str
    partition: str
    """Digest of who holds what."""
    traffic: Mapping[str, tuple[int, int]]
    """Bytes down to and up from every client."""
    remarks: list[str]


def record(
    place: RunFolder,
    uploads: UploadFolder,
    epochs: range,
    scores: Mapping[str, Score],
    alone: Mapping[str, Score],
    held: Mapping[str, Score],
    made: Mapping[str, GlobalModel],
    seconds: float,
    elapsed: float,
) -> list[dict[str, Any]]:
    """Log what the clients measured in these epochs, then the snapshot at the end of the last.

    `held`: scores on validation images; `made`: models of rules that make one network; `seconds`: of scoring.
    """
    stop = epochs[-1]
    times = {"seconds": seconds, "elapsed": elapsed}
    events: list[dict[str, Any]] = []
    for path in uploads.paths:
        manifest = blob.peek(path, "upload")
        events += [
            {"event": "epoch", "client": manifest["client"], **entry}
            for entry in manifest["history"]
            if entry["epoch"] in epochs
        ]
    events += [
        {"event": "client", "epoch": stop, "client": name, "accuracy": score.accuracy} for name, score in alone.items()
    ]
    events += [
        {"event": "snapshot", "epoch": stop, "rule": name, **score.short(), **times}
        | ({"validation": held[name].accuracy} if name in held else {})
        for name, score in scores.items()
    ]
    told = {name: model.inference.told for name, model in made.items() if isinstance(model.inference, Single)}
    events += [{"event": "fusion", "epoch": stop, "rule": name, **each} for name, each in told.items() if each]
    place.metrics.append(events)
    return events


def finish(
    place: RunFolder,
    uploads: UploadFolder,
    site: Site,
    facts: Facts,
    scores: Mapping[str, Score],
    alone: Mapping[str, Score],
    made: Mapping[str, GlobalModel],
    test: Images,
) -> None:
    """Fuse the uploads into the model and write the result; nothing says a run is finished before its model is there.

    `made`: models that scoring made already, by rule.
    """
    broadcast = uploads.broadcast
    rules = {rule.label: rule for rule in acts.rules_of(broadcast.recipe)}
    first = next(iter(rules))
    with site.arithmetic(sum(tensor.numel() for tensor in broadcast.weights.values())):
        (made[first] if first in made else acts.fuse(uploads, broadcast, site)).save(place.model)
        mixes_known = broadcast.recipe.reveal.class_counts is not False
        personal = (
            score_personal(rules, scores, alone, uploads, broadcast, test, site) if scores and mixes_known else {}
        )
    place.write_json(
        "result.json",
        {
            "recipe_digest": broadcast.digest,
            "partition": facts.partition,
            "uploads": {path.stem: Upload.content_of(path) for path in uploads.paths},
            "bytes_down": sum(down for down, _ in facts.traffic.values()),
            "bytes_up": sum(up for _, up in facts.traffic.values()),
            "traffic": {name: {"down": down, "up": up} for name, (down, up) in facts.traffic.items()},
            "remarks": facts.remarks,
            "rules": {name: score.plain() for name, score in scores.items()},
            "clients": {name: score.plain() for name, score in alone.items()},
            "personalised": personal,
        },
    )
    curves = Result.read(place.path).curves
    if curves:
        pictures.draw_accuracy(
            {name: [curve] for name, curve in curves.items()},
            place.path / "accuracy.png",
            f"{broadcast.recipe.method} on {facts.data}",
        )


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """`run.log`: what happened when, in words."""
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
