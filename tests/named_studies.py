"""A study of a few seconds on digits, and its record without what differs from one measurement to the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

STUDY: dict[str, Any] = {
    "question": "Does it run?",
    "source": "nobody",
    "set": {
        "model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 3, "training.batch_size": 64, "snapshots": [1],
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.3}, "fusion": ["iffi", "average"], "evaluation.batch_norm": "batch",
        "local.workers": 1,
    },
    "settings": {
        "plain": {},
        "unnormalised": {"set": {"evaluation.unnormalised": True}, "variants": ["V7"]},
        "wrong labels": {"set": {"label_noise": {"clients": 1, "share": 0.5}}, "partitions": [2], "variants": ["V4"]},
    },
    "variants": {"V4": "fafi", "V7": "etf"},
    "baseline": "V4",
    "partitions": "1-2",
    "note": {"plain": {"V4": {1: 20.0, 3: 60.0}, "V7": 30.0}},
    "traces": ["anchor_cosine"],
}  # fmt: skip


def study_file(folder: Path, **changes: Any) -> Path:
    """The study with other top-level keys."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, allow_unicode=True), encoding="utf-8")
    return path


def content(record: Path) -> list[dict[str, Any]]:
    """The runs of a record in the order of their keys, without times."""
    runs = json.loads(record.read_text())["runs"]
    for run in runs:
        assert run.pop("seconds") > 0
        run["traces"].pop("seconds elapsed", None)
    return sorted(runs, key=lambda run: json.dumps(run["keys"], sort_keys=True))
