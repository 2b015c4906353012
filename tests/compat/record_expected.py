"""Write expected.json: what the version on the path says of the runs beside this file.

    PYTHONPATH=SRC:TESTS python record_expected.py UNDISTURBED

SRC and TESTS are of a checkout of the version that wrote the runs; UNDISTURBED is the run that `unfinished` would have become.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import test_old_runs as old

from commands import good, oneround


def recorded(folder: Path, undisturbed: Path) -> dict[str, Any]:
    run = {name: old.copy_of(name, folder) for name in (*old.FINISHED, *old.BEGUN, "study", "sweep")}
    expected: dict[str, Any] = {
        "written by": {"version": "0.1.0", "commit": "1282dff"},
        "result": {name: old.accuracies(run[name]) for name in old.FINISHED},
        "scores": old.compared([run[name] for name in old.FINISHED], folder, "--rule", "all"),
        "evaluate": {name: old.evaluation(run[name]) for name in old.WITH_MODEL},
        "predict": {name: old.prediction(run[name], folder) for name in old.PREDICTED},
        "fuse all": {name: old.table(good("fuse", str(run[name]))) for name in (*old.FINISHED, *old.BEGUN)},
        "fuse": {name: {rule: old.fused(run[name], rule) for rule in rules} for name, rules in old.FUSED_BY.items()},
        "diagnose": {name: old.diagnosis(run[name]) for name in (*old.FINISHED, *old.BEGUN)},
        "diagnose deep": {"v9": old.diagnosis(run["v9"], "--deep")},
        "compare": {
            layout: old.compared([run[name]], folder, "--layout", layout) for layout, name in old.COMPARED.items()
        },
        "resume": {name: old.resumed(run[name]) for name in old.FINISHED},
        "rails": oneround("run", str(run["rails"]), "--resume").stderr.splitlines()[0],
    }
    for name, whole in (("unfinished", undisturbed), ("unfinished-rounds", run["mergenet"])):
        expected["result"][name] = old.accuracies(whole)
        expected["resume"][name] = old.resumed(whole)  # of the same run, left alone
        expected["evaluate"][name] = old.evaluation(whole)
    for name in old.WITHOUT_MODEL:  # made by resuming, above
        expected["evaluate"][name] = old.evaluation(run[name])
    study = old.read(run["study"] / "study.json")
    expected["study"] = {
        key: study[key] for key in ("partitions", "partition_digests", "rules", "clients", "centralised")
    }
    return expected


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        expected = recorded(Path(folder), Path(sys.argv[1]))
    target = old.FIXTURES / "expected.json"
    target.write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
