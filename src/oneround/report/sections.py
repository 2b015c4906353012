"""What a report says about one run, section by section; a section with nothing to say is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import yaml

from oneround.diagnose import diagnose
from oneround.observe.diagnosis import Finding
from oneround.observe.words import duration, size_in_words
from oneround.reading import presets
from oneround.report.again import command
from oneround.report.charts import Bar, Series, bar_chart, heat_map, line_chart
from oneround.report.markup import Html, facts, folded, notes, number, percent, table, tag, together
from oneround.report.record import Record, Trace

CLIENTS = 8  # drawn one by one; of more, those with most samples
CLASSES = 40  # beyond that, confusion is drawn for the fused model only
FINDINGS = 12  # shown at once
RULES, MODELS = 0, 5  # colours of bars
EPOCHS = "local epochs"


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    name: str
    title: str
    content: Html


def sections(record: Record) -> list[Section]:
    """Everything there is to say about a run."""
    makers: list[tuple[str, str, Callable[[Record], Html]]] = [
        ("result", "Result", result),
        ("findings", "Findings", found),
        ("mixes", "On each client's own mix of classes", mixes),
        ("partition", "Who holds what", partition),
        ("accuracy", "Accuracy over local training", accuracy),
        ("lambda", "Weight of alignment λ", alignment),
        ("losses", "Loss terms", losses),
        ("gradients", "Gradient cosines", cosines),
        ("classes", "Classes: fused model and clients", classes),
        ("traffic", "Communication", traffic),
        ("again", "Environment and how to repeat it", environment),
    ]
    told = [Section(name, title, make(record)) for name, title, make in makers]
    return [section for section in told if section.content]


def charts(drawn: Sequence[Html], *, small: bool = False) -> Html:
    return tag("div", *drawn, class_="charts small" if small else "charts") if drawn else Html("")


def score(value: object) -> str:
    """Accuracy in percent, as tables show it."""
    return f"{value:.2f}" if isinstance(value, float) else "–"


def aside(text: str) -> Html:
    return tag("p", text, class_="aside")


# --- what came out ---------------------------------------------------------------------------------------------------


def state(record: Record) -> Html:
    """Whether the run is finished, and what to know before believing it."""
    told = []
    if not record.finished:
        upto = f"epoch {record.reached} of {record.recipe.epochs}"
        told.append(tag("p", tag("strong", "Not finished"), f" ({upto}): what follows is what is known so far. Go on with ",
                        tag("code", f"oneround run {record.folder} --resume"), class_="warning"))  # fmt: skip
    told += [tag("p", tag("strong", "Stopped"), f": {reason}", class_="warning") for reason in record.stopped]
    told += [tag("p", tag("strong", "Note"), f": {remark}", class_="warning") for remark in _remarks(record)]
    return together(told)


def _remarks(record: Record) -> list[str]:
    return [str(remark) for remark in (record.result or {}).get("remarks", [])]


def result(record: Record) -> Html:
    """The run in a few numbers, and every rule beside the clients alone."""
    recipe = record.recipe
    about = presets().get(recipe.method, {}).get("about", {})
    known = [
        ("method", recipe.method + (f" ({about['alias']})" if about.get("alias") else "")),
        *(("idea", str(about[key])) for key in ("idea",) if about.get(key)),
        ("data", f"{recipe.data.kind}, {len(record.class_names)} classes"),
        ("partition", f"{recipe.partition.label}, seed {recipe.seeds.partition}"),
        ("clients", f"{len(record.clients)} with {sum(map(sum, record.counts.values())):,} samples"),
        ("encoder", recipe.model.encoder.label if recipe.model.encoder else "none, nothing is trained"),
        *([("sums of", recipe.sums.features.label)] if recipe.sums else []),
        ("local epochs", str(recipe.training.epochs)),
        ("fusion", ", ".join(rule.label for rule in recipe.fusion)),
    ]
    return charts([facts(known), *_scores(record)])


def _scores(record: Record) -> list[Html]:
    """Test accuracy, from the result or, before there is one, from the last snapshot."""
    rules, clients = final(record)
    if not rules:
        return []
    bars = [Bar(name, value, RULES, text=score(value)) for name, value in rules.items()]
    if clients:
        best = max(clients, key=lambda name: clients[name])
        bars.append(Bar(f"best alone: {best}", clients[best], MODELS, text=score(clients[best])))
        mean = sum(clients.values()) / len(clients)
        bars.append(Bar("mean client alone", mean, MODELS, text=score(mean)))
    when = "" if record.finished else f" after epoch {max(chain(*record.curves.values()))}"
    return [bar_chart(f"Test accuracy of every fusion rule{when}", bars, "test accuracy, %", most=100)]


def final(record: Record) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy in percent of rules and of clients alone."""
    if record.result is not None:
        rules, clients = (
            {name: 100 * each["accuracy"] for name, each in record.result[key].items()} for key in ("rules", "clients")
        )
        return rules, clients
    return _last(record.curves), _last(record.alone)


def _last(trace: Trace) -> dict[str, float]:
    ends = {name: values[max(values)] for name, values in trace.items()}
    return {name: value for name, value in ends.items() if value is not None}


def mixes(record: Record) -> Html:
    """Accuracy on test images that come in a client's own mix: of rules, of the client alone, of what a rule makes for it."""
    personal = (record.result or {}).get("personalised", {})
    if not personal:
        return Html("")
    names = list(next(iter(personal.values())))
    shown = {client: [score(_in_percent(by.get(client))) for by in personal.values()] for client in names}
    known = [[value for value in by.values() if value is not None] for by in personal.values()]
    means = [score(100 * sum(values) / len(values)) if values else "–" for values in known]
    rows = [["mean", *means], *([client, *values] for client, values in shown.items())]
    return table(
        ["client", *(f"{name}, %" for name in personal)],
        rows,
        "Test accuracy, classes weighed as the client holds them",
    )


def _in_percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def found(record: Record) -> Html:
    """What the diagnosis has to say, what it looked for, and what it could not look at."""
    told = diagnose(record.folder)
    first, rest = told.findings[:FINDINGS], told.findings[FINDINGS:]
    listed = [_listed(first) if first else tag("p", "Nothing amiss was found.")]
    if rest:
        listed.append(folded(f"{len(rest)} more findings", _listed(rest)))
    more = [f"looked for: {', '.join(told.looked)}"] if told.looked else []
    more += [f"not looked for: {rule} ({why})" for rule, why in told.aside.items()]
    return together([*listed, notes([*more, *told.remarks])])


def _listed(findings: Sequence[Finding]) -> Html:
    return tag("ul", *map(_finding, findings), class_="findings")


def _finding(finding: Finding) -> Html:
    head = [tag("strong", finding.severity, class_="badge"), " ", tag("b", finding.rule), f" {finding.where}".rstrip()]
    return tag(
        "li", tag("p", *head), tag("p", finding.evidence), tag("p", "→ ", finding.advice), class_=finding.severity
    )


# --- who holds what --------------------------------------------------------------------------------------------------


def partition(record: Record) -> Html:
    """Class × client with counts, and the clients as a table."""
    counts = record.counts
    if not counts:
        return Html("")
    sizes = {name: sum(row) for name, row in counts.items()}
    largest, smallest = (pick(sizes, key=lambda name: sizes[name]) for pick in (max, min))
    held = [sum(1 for count in row if count) for row in counts.values()]
    told = (
        f"Heat map of the number of samples by client and class: {len(counts)} clients, {len(record.class_names)} classes, "
        f"{sum(sizes.values()):,} samples. {largest} holds most ({sizes[largest]:,}), {smallest} least ({sizes[smallest]:,}). "
        f"A client holds samples of {min(held)} to {max(held)} classes."
    )
    drawn = heat_map(
        "Samples by class and client", list(counts), record.class_names, list(counts.values()), ("client", "class"), told
    )  # fmt: skip
    more = [f"digest {str(record.partition.get('digest', '–'))[:16]}: runs with the same one can be compared"]
    if record.partition.get("public_samples"):
        more.append(f"the server keeps {record.partition['public_samples']:,} public samples that no client holds")
    return together([charts([drawn, tag("div", _client_table(record))]), notes(more)])


def _client_table(record: Record) -> Html:
    _, alone = final(record)
    rows = []
    for name, row in record.counts.items():
        epochs = record.epochs.get(name, {})
        seconds = sum(event.get("seconds") or 0 for event in epochs.values())
        held = sum(1 for count in row if count)
        rows.append([name, f"{sum(row):,}", str(held), str(max(epochs, default=0)), duration(seconds) if seconds else "–", score(alone.get(name))])  # fmt: skip
    return table(["client", "samples", "classes", "epochs", "training", "alone, %"], rows, "Clients")


# --- over the epochs -------------------------------------------------------------------------------------------------


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


# --- classes ---------------------------------------------------------------------------------------------------------


def classes(record: Record) -> Html:
    """Accuracy per class and who is taken for whom: the fused model against each client."""
    if record.result is None:
        return Html("")
    rules, clients = record.result["rules"], record.result["clients"]
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


# --- what it took ----------------------------------------------------------------------------------------------------


def traffic(record: Record) -> Html:
    """Bytes that crossed the network: one broadcast and one upload for each client."""
    if record.result is None or "bytes_down" not in record.result:
        return Html("")
    down, up, count = record.result["bytes_down"], record.result["bytes_up"], max(len(record.result["uploads"]), 1)
    bars = [Bar(name, value / 1e6, RULES, text=size_in_words(value)) for name, value in (("down", down), ("up", up))]
    rows = [
        [name, number(value), number(round(value / count)), size_in_words(value)]
        for name, value in (("down (broadcast)", down), ("up (uploads)", up), ("both", down + up))
    ]
    listed = table(["", "bytes", "per client", "in words"], rows, f"One round, {count} clients")
    return charts([bar_chart("Bytes across the network, all clients", bars, "MB"), tag("div", listed)])


def environment(record: Record) -> Html:
    """What it ran on, the resolved recipe, and how to run it again."""
    told = dict(record.environment)
    packages = told.pop("packages", None) or {}
    pairs = [(str(key), number(value)) for key, value in told.items()]
    pairs += [(str(name), str(version)) for name, version in packages.items()]
    again = command(record.recipe)
    lines = [tag("p", "Save the recipe below as recipe.yaml, then:" if again is None else "The same recipe again:"),
             tag("pre", tag("code", again or "oneround run recipe.yaml"), tabindex="0")]  # fmt: skip
    if record.recipe.local.data_path is not None:
        lines.append(aside("The data lay in a folder of its own: add --data-dir, or the file with --data."))
    text = yaml.safe_dump(record.recipe.plain(), sort_keys=False, allow_unicode=True)
    digest = f"Recipe digest {record.recipe.digest[:16]}; paths, device and threads of the machine are not part of it."
    whole = folded("The resolved recipe", tag("pre", tag("code", text), tabindex="0"), aside(digest))
    return together([*lines, whole, facts(pairs, class_="facts two") if pairs else Html("")])
