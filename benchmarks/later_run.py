"""Do features that clients uploaded after training help a later run? FAFI from their class means against FAFI from random prototypes.

    python benchmarks/later_run.py --out results/digits_later_run.json
    oneround compare results/digits_later_run.json

On the embedded digits: a first run uploads features (fafi+features), later ones train anew, with other views and shuffles, on the same
partition and from the same encoder weights. Prototypes start at the features' class means (`local.initial_features`), or at random.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import parser_of
from oneround.config.load import load
from oneround.data import load_dataset
from oneround.runs.archive import find_runs, keep
from oneround.simulate import run

SETTINGS: dict[str, Any] = {
    "data": "digits", "model.encoder": "cnn", "training.epochs": 20, "training.batch_size": 64, "training.augment.crop_scale": [0.6, 1.0],
    "evaluation.batch_norm": "batch", "snapshots": 0, "trace.every": 0,
}  # fmt: skip
LATER = 100  # added to the training seed of a later run


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.05, 0.5])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--epochs", type=int, default=SETTINGS["training.epochs"])
    parser.add_argument("--out", type=Path, default=Path("results/digits_later_run.json"))
    options = parser.parse_args()
    data = load_dataset(load("fafi", SETTINGS).data)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        for alpha in options.alphas:
            for seed in options.partitions:
                own = {**SETTINGS, "training.epochs": options.epochs, "partition.alpha": alpha, "seeds.partition": seed}
                own |= {"seeds.initialisation": seed, "fusion": ["iffi", "typicality-gated"]}
                first = runs / f"first-{alpha}-{seed}"
                features = [*own["fusion"], "feature-vote"]
                run(load("fafi", {**own, "seeds.training": seed, "fusion": features}), first, data=data)
                for method, local in (("fafi", None), ("fafi-from-features", first)):
                    later = load(
                        "fafi",
                        {**own, "seeds.training": seed + LATER, "local.initial_features": local, "method": method},
                    )
                    result = run(later, runs / "later" / f"{method}-{alpha}-{seed}", data=data)
                    print(
                        f"{method}, α = {alpha}, partition {seed}: iffi {100 * result.rules['iffi']:.1f} %", flush=True
                    )
        keep(find_runs([runs / "later"]), options.out)


if __name__ == "__main__":
    main()
