"""The section on classes: accuracy and confusion of the fused model and of each client."""

from __future__ import annotations

from collections.abc import Sequence

from oneround.report.epochs import CLIENTS, left_out
from oneround.report.heat import heat_map
from oneround.report.markup import EMPTY, Html, charts, folded, percent, remark, table, together
from oneround.runs.record import RunRecord

CLASSES = 40  # beyond that, confusion is drawn for the fused model only


def classes(record: RunRecord) -> Html:
    """Accuracy per class and confusion matrices of the fused model and of each client."""
    rules, clients = ((record.result or {}).get(key, {}) for key in ("rules", "clients"))
    if record.main_rule not in rules:  # not finished, or the server had no test images
        return EMPTY
    if any(len(each.get("per_class", ())) != len(record.class_names) for each in (*rules.values(), *clients.values())):
        return remark("Left out: result.json does not have the classes of the broadcast.")
    client_names = [name for name in record.largest(CLIENTS) if name in clients]
    models = {record.main_rule: rules[record.main_rule], **{name: clients[name] for name in client_names}}
    rows = [[None if share is None else 100 * share for share in each["per_class"]] for each in models.values()]
    names = [f"fused ({record.main_rule})", *client_names]
    drawn = [heat_map("Accuracy on each class, %", names, record.class_names, rows, ("model", "class"),
                      _per_class_description(names, record.class_names, rows), most=100, format_value=_whole)]  # fmt: skip
    every = {**rules, **{name: clients[name] for name in client_names}}
    listed = table(["model", "all", *record.class_names],
                   [[name, percent(each["accuracy"]), *map(percent, each["per_class"])] for name, each in every.items()],
                   "Accuracy on each class in %, every rule and client")  # fmt: skip
    matrices = [(names[0], rules[record.main_rule]), *((name, clients[name]) for name in client_names)]
    few = matrices if len(record.class_names) <= CLASSES else matrices[:1]
    squares = [_confusion(f"Confusion of {name}", each["confusion"], record.class_names) for name, each in few]
    missing = f"With {len(record.class_names)} classes the clients' own matrices are left to result.json."
    below = [*([] if few == matrices else [remark(missing)]), left_out(record)]
    folding = folded("Every rule and client, by class", listed)
    return together([charts(drawn), folding, charts(squares, small=True), *below])


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _per_class_description(names: Sequence[str], labels: Sequence[str], rows: Sequence[Sequence[float | None]]) -> str:
    extremes = []
    for name, row in zip(names, rows, strict=True):
        scores = [(value, label) for value, label in zip(row, labels, strict=True) if value is not None]
        if scores:
            (low, worst), (high, best) = min(scores), max(scores)
            extremes.append(f"{name}: best on {best} ({high:.0f}), worst on {worst} ({low:.0f}).")
    return "Heat map of test accuracy in percent by model and class. " + " ".join(extremes)


def _confusion(title: str, cells: Sequence[Sequence[int]], labels: Sequence[str]) -> Html:
    """A confusion matrix, true classes in rows and predicted classes in columns, shaded by share of the row."""
    wrong = sorted(
        ((count, labels[true], labels[answer]) for true, row in enumerate(cells) for answer, count in enumerate(row) if count and true != answer),
        key=lambda each: -each[0],
    )  # fmt: skip
    worst = "; ".join(f"{true} taken for {answer} {count} times" for count, true, answer in wrong[:3])
    right = sum(row[label] for label, row in enumerate(cells))
    description = f"Confusion matrix: {right:,} of {sum(map(sum, cells)):,} test images right. Most often wrong: {worst or 'nothing'}."
    data = None
    if len(labels) > 20:
        rows = [[true, answer, str(count)] for count, true, answer in wrong[:30]]
        data = table(
            ["true class", "predicted class", "images"], rows, f"{title}: most frequent errors", text_columns=(1,)
        )
    return heat_map(
        title, labels, labels, cells, ("true class", "predicted class"), description, by_row=True, data=data
    )
