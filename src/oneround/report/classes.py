"""What a report says class by class: accuracy, and who is taken for whom, of the fused model and of each client."""

from __future__ import annotations

from collections.abc import Sequence

from oneround.report.epochs import left_out
from oneround.report.heat import heat_map
from oneround.report.markup import Html, aside, charts, folded, percent, table, together
from oneround.report.record import CLIENTS, Record

CLASSES = 40  # beyond that, confusion is drawn for the fused model only


def classes(record: Record) -> Html:
    """Accuracy per class and who is taken for whom: the fused model against each client."""
    rules, clients = ((record.result or {}).get(key, {}) for key in ("rules", "clients"))
    if record.rule not in rules:  # not finished, or the server had no test images
        return Html("")
    if any(len(each.get("per_class", ())) != len(record.class_names) for each in (*rules.values(), *clients.values())):
        return aside("Left out: result.json does not have the classes of the broadcast.")
    kept = [name for name in record.largest(CLIENTS) if name in clients]
    models = {record.rule: rules[record.rule], **{name: clients[name] for name in kept}}
    rows = [[None if share is None else 100 * share for share in each["per_class"]] for each in models.values()]
    names = [f"fused ({record.rule})", *kept]
    drawn = [heat_map("Accuracy on each class, %", names, record.class_names, rows, ("model", "class"),
                      _per_class_words(names, record.class_names, rows), most=100, shown=_whole)]  # fmt: skip
    every = {**rules, **{name: clients[name] for name in kept}}
    listed = table(["model", "all", *record.class_names],
                   [[name, percent(each["accuracy"]), *map(percent, each["per_class"])] for name, each in every.items()],
                   "Accuracy on each class in %, every rule and client")  # fmt: skip
    matrices = [(names[0], rules[record.rule]), *((name, clients[name]) for name in kept)]
    few = matrices if len(record.class_names) <= CLASSES else matrices[:1]
    squares = [_confusion(f"Confusion of {name}", each["confusion"], record.class_names) for name, each in few]
    told = (
        []
        if few == matrices
        else [aside(f"With {len(record.class_names)} classes the clients' own matrices are left to result.json.")]
    )
    return together(
        [
            charts(drawn),
            folded("Every rule and client, by class", listed),
            charts(squares, small=True),
            *told,
            left_out(record),
        ]
    )


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _per_class_words(names: Sequence[str], labels: Sequence[str], rows: Sequence[Sequence[float | None]]) -> str:
    told = []
    for name, row in zip(names, rows, strict=True):
        known = [(value, label) for value, label in zip(row, labels, strict=True) if value is not None]
        if known:
            (low, worst), (high, best) = min(known), max(known)
            told.append(f"{name}: best on {best} ({high:.0f}), worst on {worst} ({low:.0f}).")
    return "Heat map of test accuracy in percent by model and class. " + " ".join(told)


def _confusion(title: str, cells: Sequence[Sequence[int]], labels: Sequence[str]) -> Html:
    """Rows are what an image shows, columns what the model says; shaded by share of the row."""
    wrong = sorted(
        ((count, labels[true], labels[said]) for true, row in enumerate(cells) for said, count in enumerate(row) if count and true != said),
        key=lambda each: -each[0],
    )  # fmt: skip
    worst = "; ".join(f"{true} taken for {said} {count} times" for count, true, said in wrong[:3])
    right = sum(row[label] for label, row in enumerate(cells))
    told = f"Confusion matrix: {right:,} of {sum(map(sum, cells)):,} test images right. Most often wrong: {worst or 'nothing'}."
    data = None
    if len(labels) > 20:
        rows = [[true, said, str(count)] for count, true, said in wrong[:30]]
        data = table(["image shows", "model says", "times"], rows, f"{title}: what is wrong most often", words=(1,))
    return heat_map(title, labels, labels, cells, ("image shows", "model says"), told, by_row=True, data=data)
