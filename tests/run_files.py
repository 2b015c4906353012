"""What a run wrote, without times: to compare runs."""

from __future__ import annotations

import json
from pathlib import Path

from oneround.runs.log import MetricsLog


def final(folder: Path) -> dict[str, object]:
    """Everything a finished run says it found: scores, confusion, hashes of what was learned."""
    return json.loads((folder / "result.json").read_text())


def timeless(folder: Path) -> list[dict[str, object]]:
    events = [
        {key: value for key, value in event.items() if key not in ("seconds", "elapsed")}
        for event in MetricsLog(folder / "metrics.jsonl")
    ]
    return sorted(events, key=lambda event: json.dumps(event, sort_keys=True))
