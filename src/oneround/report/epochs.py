"""Sections of the report on training, by epoch and by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneround.report.charts import Series, line_chart
from oneround.report.markup import EMPTY, Html, charts, remark, score, table, tag, together
from oneround.runs.log import Curves, is_number
from oneround.runs.record import RunRecord

EPOCHS = "local epochs"
CLIENTS = 8  # drawn one by one; of more, those with most samples


def accuracy(record: RunRecord) -> Html:
    """Test accuracy of every rule and of local models, at every snapshot."""
    if not record.curves:
        return EMPTY
    rules = [Series(name, values) for name, values in _in_percent(record.curves).items()]
    drawn = [accuracy_chart("Fused model, by rule", rules)]
    if record.measurements.local_accuracy:
        lines = by_client(record, _in_percent(record.measurements.local_accuracy))
        drawn.append(accuracy_chart("Each client alone", lines))
    return together([charts(drawn), left_out(record)])


def accuracy_chart(title: str, lines: Sequence[Series]) -> Html:
    """Test accuracies in percent over local epochs."""
    return line_chart(title, lines, EPOCHS, "test accuracy, %", bounds=(0, 100), format_value=score)


def _in_percent(curves: Curves) -> Curves:
    return {name: {epoch: 100 * share for epoch, share in curve.items()} for name, curve in curves.items()}


def rounds(record: RunRecord) -> Html:
    """Rules that work between rounds: whether their network was sent and why, and how their adapter learned."""
    length = record.recipe.training.epochs
    fusions = {
        rule: {epoch // length: facts for epoch, facts in by_epoch.items()}
        for rule, by_epoch in record.measurements.fusions.items()
        if any(len(facts) > 1 for facts in by_epoch.values())
    }
    kinds = [rule.partition(" ")[0] for rule in fusions]
    drawn = []
    for kind, (rule, events) in zip(kinds, fusions.items(), strict=True):
        name = kind if kinds.count(kind) == 1 else rule
        for title, keys, axis in BETWEEN:
            lines = [Series(label, values) for key, label in keys.items() if (values := _numbers(events, key))]
            scale: dict[str, Any] = {"bounds": (0, 100), "format_value": score} if axis.endswith("%") else {}
            if lines:
                drawn.append(line_chart(f"{name}: {title}", lines, "round", axis, **scale))
        rows = [[str(at), SENT[event.get("accepted")], str(event.get("reason", ""))] for at, event in events.items()]
        drawn.append(tag("div", table(["round", "sent", "why"], rows, f"{name}, round by round", text_columns=(1, 2))))
    return charts(drawn)


SENT = {None: "the average", True: "fused", False: "not the fused one"}
BETWEEN: list[tuple[str, dict[str, str], str]] = [
    (
        "on validation images",
        {"fused_validation": "fused", "average_validation": "the average", "teacher_validation": "the teacher"},
        "accuracy, %",
    ),
    ("adapter error", {"error": "‖W_out − W_final‖ / ‖W_final‖"}, "relative distance"),
    ("relative change of the student", {"changed": "total", "by_teacher": "due to the teacher"}, "relative distance"),
    ("adapter updates", {"gradient_norm": "gradient norm", "adapter_moved": "step length"}, "norm"),
]
"""Charts of the metrics of such a rule: title, keys with their labels, axis."""


def _numbers(events: dict[int, dict[str, Any]], key: str) -> dict[int, float | None]:
    factor = 100 if key.endswith("validation") else 1
    return {at: factor * event[key] for at, event in events.items() if is_number(event.get(key))}


def by_client(record: RunRecord, trace: Curves) -> list[Series]:
    """A line for each client; of many clients, for the largest ones, and the range of all."""
    names = [name for name in record.largest(CLIENTS) if name in trace]
    lines = [Series(name, trace[name]) for name in names]
    if len(names) < len(trace):
        lines.append(_range(trace))
    return lines


def _range(trace: Curves) -> Series:
    values = _by_epoch(trace)
    low, high = ({epoch: pick(each) for epoch, each in values.items()} for pick in (min, max))
    return Series(f"all {len(trace)} clients", {}, low, high, faint=True)


def left_out(record: RunRecord) -> Html:
    more = len(record.clients) - CLIENTS
    if more <= 0:
        return EMPTY
    return remark(f"Drawn one by one: the {CLIENTS} clients with most samples; {more} more are in metrics.jsonl.")


def alignment(record: RunRecord) -> Html:
    """λ before and after the schedule on log axes, s(p), the ratio of alignment to the base loss, σ², and where prototypes are."""
    raw, effective, schedule = record.trace("lambda_raw"), record.trace("lambda_effective"), record.trace("s")
    if not raw:
        return EMPTY
    same = raw == effective
    drawn = [line_chart("λ" if same else "Raw λ", by_client(record, raw), EPOCHS, "λ", log=True)]
    if not same:
        title = "Effective λ, after schedule and guard"
        drawn.append(line_chart(title, by_client(record, effective), EPOCHS, "λ", log=True))
    if schedule:
        alike = len({tuple(values.items()) for values in schedule.values()}) == 1
        same_for_all = [Series("s(p), the same for all clients", next(iter(schedule.values())))]
        lines = same_for_all if alike else by_client(record, schedule)
        drawn.append(line_chart("Schedule s(p)", lines, EPOCHS, "s(p)", bounds=(0, 1) if _within(schedule) else None))
    share = _pull(record)
    if share:
        title = "Pull of alignment, λ·L_align / L_base"
        drawn.append(line_chart(title, by_client(record, share), EPOCHS, "ratio", log=True))
    for key, name in (("sigma_base", "σ² of L_base"), ("sigma_align", "σ² of L_align")):
        if record.trace(key):
            drawn.append(line_chart(name, by_client(record, record.trace(key)), EPOCHS, "σ²", log=True))
    if turned := record.trace("anchor_cosine"):
        title = "Cosine of prototypes to their anchors"
        drawn.append(line_chart(title, by_client(record, turned), EPOCHS, "cosine", bounds=(-1, 1), level=0))
        lengths = by_client(record, record.trace("prototype_norm"))
        drawn.append(line_chart("Length of prototypes", lengths, EPOCHS, "‖P‖"))
    return together([charts(drawn), left_out(record)])


def _within(trace: Curves) -> bool:
    return all(0 <= value <= 1 for values in trace.values() for value in values.values())


def _pull(record: RunRecord) -> Curves:
    ratios: Curves = {}
    for client in record.measurements.epochs:
        for entry in record.series(client, "base", "align", "lambda_effective"):
            if entry["base"]:
                ratios.setdefault(client, {})[entry["epoch"]] = (
                    entry["lambda_effective"] * entry["align"] / entry["base"]
                )
    return ratios


def losses(record: RunRecord) -> Html:
    """A chart for each client with every term of its loss."""
    terms = [*record.recipe.objective.terms, "align", "base"]
    drawn = []
    for client in record.largest(CLIENTS):
        lines = []
        for term in terms:
            values = {entry["epoch"]: entry[term] for entry in record.series(client, term)}
            if values:
                lines.append(Series(TERM_LABELS.get(term, term), values))
        if lines:
            drawn.append(line_chart(f"Loss terms of {client}", lines, EPOCHS, "loss"))
    return together([charts(drawn, small=True), left_out(record)]) if drawn else EMPTY


TERM_LABELS = {"align": "alignment (before λ)", "base": "L_base, all without alignment"}


def cosines(record: RunRecord) -> Html:
    """Gradient cosines between alignment and the base loss by client, and between all other terms averaged over clients."""
    drawn = []
    every = record.cosines()
    for tensor in ("features", "prototypes"):
        pairs = {pair: trace for (pair, at), trace in every.items() if at == tensor}
        against = pairs.pop("base · alignment", {})
        if against:
            title = f"L_base and alignment, at the {tensor}"
            drawn.append(_cosine_chart(title, by_client(record, against)))
        if pairs:
            lines = [Series(pair, _mean(trace)) for pair, trace in pairs.items()]
            drawn.append(_cosine_chart(f"Between terms, at the {tensor} (mean over clients)", lines))
    if not drawn:
        return EMPTY
    explanation = (
        "Cosine between the gradients of two terms: below 0 they undo each other's work, near 1 they want the same."
    )
    return together([tag("p", explanation), charts(drawn), left_out(record)])


def _cosine_chart(title: str, lines: Sequence[Series]) -> Html:
    return line_chart(title, lines, EPOCHS, "cosine", bounds=(-1, 1), level=0)


def _mean(trace: Curves) -> dict[int, float]:
    return {epoch: sum(values) / len(values) for epoch, values in _by_epoch(trace).items()}


def _by_epoch(trace: Curves) -> dict[int, list[float]]:
    """The values of all clients at every epoch."""
    epochs = sorted({epoch for values in trace.values() for epoch in values})
    return {epoch: [values[epoch] for values in trace.values() if epoch in values] for epoch in epochs}
