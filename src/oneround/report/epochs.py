"""What a report says of the training, epoch by epoch and round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneround.observe.sound import is_number
from oneround.report.charts import Series, line_chart
from oneround.report.markup import Html, aside, charts, score, table, tag, together
from oneround.report.record import CLIENTS, Record, Trace

EPOCHS = "local epochs"


def accuracy(record: Record) -> Html:
    """Of every rule, and of clients alone, at every snapshot."""
    if not record.curves:
        return Html("")
    rules = [Series(name, values) for name, values in record.curves.items()]
    drawn = [line_chart("Fused model, by rule", rules, EPOCHS, "test accuracy, %", bounds=(0, 100), shown=score)]
    if record.alone:
        lines = by_client(record, record.alone)
        drawn.append(line_chart("Each client alone", lines, EPOCHS, "test accuracy, %", bounds=(0, 100), shown=score))
    return together([charts(drawn), left_out(record)])


def rounds(record: Record) -> Html:
    """What a rule that acts between rounds did: whether what it made was sent, what for and against it, and how its adapter learned."""
    told = {rule: events for rule, events in record.fusions.items() if any(len(event) > 1 for event in events.values())}
    kinds = [rule.partition(" ")[0] for rule in told]
    drawn = []
    for kind, (rule, events) in zip(kinds, told.items(), strict=True):
        name = kind if kinds.count(kind) == 1 else rule
        for title, keys, axis in BETWEEN:
            lines = [Series(label, values) for key, label in keys.items() if (values := _numbers(events, key))]
            scale: dict[str, Any] = {"bounds": (0, 100), "shown": score} if axis.endswith("%") else {}
            if lines:
                drawn.append(line_chart(f"{name}: {title}", lines, "round", axis, **scale))
        rows = [[str(at), SENT[event.get("accepted")], str(event.get("reason", ""))] for at, event in events.items()]
        drawn.append(tag("div", table(["round", "sent", "why"], rows, f"{name}, round by round", words=(1, 2))))
    return charts(drawn)


SENT = {None: "the average", True: "fused", False: "not the fused one"}
BETWEEN: list[tuple[str, dict[str, str], str]] = [
    ("on validation images", {"fused_validation": "fused", "average_validation": "the average"}, "accuracy, %"),
    ("its adapter's error", {"error": "from what it made to where training went"}, "relative distance"),
    ("how far it changed the student", {"changed": "in all", "by_teacher": "by the teacher"}, "relative distance"),
    ("its adapter's lessons", {"gradient_norm": "norm of the gradient", "adapter_moved": "moved by"}, "norm"),
]
"""Charts of what a fusion tells: title, keys with their names, axis."""


def _numbers(events: dict[int, dict[str, Any]], key: str) -> dict[int, float | None]:
    factor = 100 if key.endswith("validation") else 1
    return {at: factor * event[key] for at, event in events.items() if is_number(event.get(key))}


def by_client(record: Record, trace: Trace) -> list[Series]:
    """A line for each client; with too many, the largest ones and the range of all."""
    kept = [name for name in record.largest(CLIENTS) if name in trace]
    lines = [Series(name, trace[name]) for name in kept]
    if len(kept) < len(trace):
        lines.append(_range(trace))
    return lines


def _range(trace: Trace) -> Series:
    epochs = sorted({epoch for values in trace.values() for epoch in values})
    there = {epoch: [v for values in trace.values() if (v := values.get(epoch)) is not None] for epoch in epochs}
    low = {epoch: min(values) for epoch, values in there.items() if values}
    high = {epoch: max(values) for epoch, values in there.items() if values}
    return Series(f"all {len(trace)} clients", {}, low, high, faint=True)


def left_out(record: Record) -> Html:
    more = len(record.clients) - CLIENTS
    if more <= 0:
        return Html("")
    return aside(f"Drawn one by one: the {CLIENTS} clients with most samples; {more} more are in metrics.jsonl.")


def alignment(record: Record) -> Html:
    """λ before and after the schedule on log axes, s(p), what alignment weighs against the rest, and σ²."""
    raw, effective, schedule = record.trace("lambda_raw"), record.trace("lambda_effective"), record.trace("s")
    if not raw:
        return Html("")
    same = raw == effective
    drawn = [line_chart("λ" if same else "Raw λ", by_client(record, raw), EPOCHS, "λ", log=True)]
    if not same:
        title = "Effective λ, after schedule and guard"
        drawn.append(line_chart(title, by_client(record, effective), EPOCHS, "λ", log=True))
    if schedule:
        alike = len({tuple(values.items()) for values in schedule.values()}) == 1
        lines = (
            [Series("s(p), the same for all clients", next(iter(schedule.values())))]
            if alike
            else by_client(record, schedule)
        )
        drawn.append(line_chart("Schedule s(p)", lines, EPOCHS, "s(p)", bounds=(0, 1) if _within(schedule) else None))
    share = _pull(record)
    if share:
        title = "Pull of alignment, λ·L_align / L_base"
        drawn.append(line_chart(title, by_client(record, share), EPOCHS, "ratio", log=True))
    for key, name in (("sigma_base", "σ² of L_base"), ("sigma_align", "σ² of L_align")):
        if record.trace(key):
            drawn.append(line_chart(name, by_client(record, record.trace(key)), EPOCHS, "σ²", log=True))
    return together([charts(drawn), left_out(record)])


def _within(trace: Trace) -> bool:
    return all(value is not None and 0 <= value <= 1 for values in trace.values() for value in values.values())


def _pull(record: Record) -> Trace:
    found: Trace = {}
    for client, epochs in record.epochs.items():
        for epoch, event in epochs.items():
            base, align, weight = (event.get(key) for key in ("base", "align", "lambda_effective"))
            if base and align is not None and weight is not None:
                found.setdefault(client, {})[epoch] = weight * align / base
    return found


def losses(record: Record) -> Html:
    """Every term of the loss, a chart for each client."""
    terms = [*record.recipe.objective.terms, "align", "base"]
    drawn = []
    for client in (name for name in record.largest(CLIENTS) if name in record.epochs):
        lines = []
        for term in terms:
            values = {
                epoch: event[term] for epoch, event in record.epochs[client].items() if event.get(term) is not None
            }
            if values:
                lines.append(Series(WORDS.get(term, term), values))
        if lines:
            drawn.append(line_chart(f"Loss terms of {client}", lines, EPOCHS, "loss"))
    return together([charts(drawn, small=True), left_out(record)]) if drawn else Html("")


WORDS = {"align": "alignment (before λ)", "base": "L_base, all without alignment"}


def cosines(record: Record) -> Html:
    """Between alignment and the rest by client, and between every two terms, averaged over clients."""
    drawn = []
    for place in ("features", "prototypes"):
        pairs = record.cosines(place)
        against = pairs.pop("base · alignment", {})
        if against:
            title = f"L_base and alignment, at the {place}"
            drawn.append(_cosine_chart(title, by_client(record, against)))
        if pairs:
            lines = [Series(pair, _mean(trace)) for pair, trace in pairs.items()]
            drawn.append(_cosine_chart(f"Between terms, at the {place} (mean over clients)", lines))
    if not drawn:
        return Html("")
    what = "Cosine between the gradients of two terms: below 0 they undo each other's work, near 1 they want the same."
    return together([tag("p", what), charts(drawn), left_out(record)])


def _cosine_chart(title: str, lines: Sequence[Series]) -> Html:
    return line_chart(title, lines, EPOCHS, "cosine", bounds=(-1, 1), level=0)


def _mean(trace: Trace) -> dict[int, float | None]:
    epochs = sorted({epoch for values in trace.values() for epoch in values})
    there = {epoch: [v for values in trace.values() if (v := values.get(epoch)) is not None] for epoch in epochs}
    return {epoch: sum(values) / len(values) for epoch, values in there.items() if values}
