"""Sections of the report of one run; a section without content is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import yaml

from oneround.analysis.diagnosis import Finding
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.config.load import presets
from oneround.formatting import duration, format_bytes
from oneround.report.charts import Bar, bar_chart
from oneround.report.classes import classes
from oneround.report.epochs import accuracy, alignment, cosines, losses, rounds
from oneround.report.heat import heat_map
from oneround.report.how_to_repeat import command
from oneround.report.markup import (
    EMPTY,
    Html,
    charts,
    facts,
    folded,
    notes,
    number,
    percent,
    remark,
    table,
    tag,
    together,
)
from oneround.runs.record import RunRecord, local_accuracy_summary
from oneround.runs.result import mean_over_clients

FINDINGS = 12  # shown at once
RULES, MODELS = 0, 5  # colours of bars


@dataclass(frozen=True)
class Section:
    """A heading and its content."""

    name: str
    title: str
    content: Html


def sections(record: RunRecord) -> list[Section]:
    """Every section of a run that has content."""
    makers: list[tuple[str, str, Callable[[RunRecord], Html]]] = [
        ("result", "Result", result),
        ("findings", "Findings", findings),
        ("mixes", "On each client's own mix of classes", mixes),
        ("partition", "Who holds what", partition),
        ("accuracy", "Accuracy over local training", accuracy),
        ("rounds", "Between rounds", rounds),
        ("lambda", "Weight of alignment λ", alignment),
        ("losses", "Loss terms", losses),
        ("gradients", "Gradient cosines", cosines),
        ("classes", "Classes: fused model and clients", classes),
        ("traffic", "Communication", traffic),
        ("again", "Environment and how to repeat it", environment),
    ]
    every = [Section(name, title, make(record)) for name, title, make in makers]
    return [section for section in every if section.content]


# --- the result ------------------------------------------------------------------------------------------------------


def state(record: RunRecord) -> Html:
    """Whether the run is finished, and remarks on its result."""
    lines = []
    if not record.finished:
        upto = f"epoch {record.reached} of {record.recipe.epochs}"
        lines.append(tag("p", tag("strong", "Not finished"), f" ({upto}): what follows is what is known so far. Go on with ",
                         tag("code", f"oneround run {record.path} --resume"), class_="warning"))  # fmt: skip
        stopped = [reason for _, reason in record.stopped.values()]
        lines += [tag("p", tag("strong", "Stopped"), f": {reason}", class_="warning") for reason in stopped]
    lines += [tag("p", tag("strong", "Note"), f": {text}", class_="warning") for text in record.remarks]
    return together(lines)


def result(record: RunRecord) -> Html:
    """The run in a few numbers; test accuracy of every rule and of the local models."""
    recipe = record.recipe
    about = presets().get(recipe.method, {}).get("about", {})
    rows = [
        ("method", recipe.method + (f" ({about['alias']})" if about.get("alias") else "")),
        *([("idea", str(about["idea"]))] if about.get("idea") else []),
        ("data", f"{recipe.data.kind}, {len(record.class_names)} classes"),
        ("partition", f"{recipe.partition.label}, seed {recipe.seeds.partition}"),
        ("clients", f"{len(record.clients)} with {sum(map(sum, record.counts.values())):,} samples"),
        ("encoder", recipe.model.encoder.label if recipe.model.encoder else "none, nothing is trained"),
        *([("sums of", recipe.sums.features.label)] if recipe.sums else []),
        (
            "local epochs",
            f"{recipe.training.epochs}" + (f" in each of {recipe.rounds} rounds" if recipe.rounds > 1 else ""),
        ),
        ("fusion", ", ".join(rule.label for rule in recipe.fusion)),
    ]
    return charts([facts(rows), *_scores(record)])


def _scores(record: RunRecord) -> list[Html]:
    """Test accuracy, in the result or, before that exists, in the last snapshot."""
    rules, clients = record.accuracy, record.local_accuracy
    if not rules:
        return []
    bars = [_bar(name, share, RULES) for name, share in rules.items()]
    if clients:
        best = max(clients, key=lambda name: clients[name])
        bars.append(_bar(f"best alone: {best}", clients[best], MODELS))
        bars.append(_bar("mean client alone", local_accuracy_summary(clients)["mean client alone"], MODELS))
    when = "" if record.finished else f" after epoch {max(chain(*record.curves.values()))}"
    return [bar_chart(f"Test accuracy of every fusion rule{when}", bars, "test accuracy, %", most=100)]


def _bar(name: str, share: float, style: int) -> Bar:
    return Bar(name, 100 * share, style, text=percent(share))


def mixes(record: RunRecord) -> Html:
    """Accuracy on each client's own mix of classes: of every rule, of the local and of personal models."""
    personal = record.personalised
    if not personal:
        return EMPTY
    means = mean_over_clients(personal)
    rows = [["mean", *(percent(means.get(name)) for name in personal)]]
    rows += [
        [client, *(percent(by.get(client)) for by in personal.values())] for client in next(iter(personal.values()))
    ]
    heads = ["client", *(f"{name}, %" for name in personal)]
    return table(heads, rows, "Test accuracy, classes weighted by the client's shares")


def findings(record: RunRecord) -> Html:
    """Findings of the diagnosis, the rules that were applied, and those that do not apply."""
    diagnosis = diagnose(record)
    first, rest = diagnosis.findings[:FINDINGS], diagnosis.findings[FINDINGS:]
    listed = [_listed(first) if first else tag("p", "No rule found a problem.")]
    if rest:
        listed.append(folded(f"{len(rest)} more findings", _listed(rest)))
    more = [f"rules applied: {', '.join(diagnosis.applied)}"] if diagnosis.applied else []
    more += [f"not applied: {rule} ({why})" for rule, why in diagnosis.skipped.items()]
    return together([*listed, notes([*more, *diagnosis.remarks])])


def _listed(findings: Sequence[Finding]) -> Html:
    return tag("ul", *map(_finding, findings), class_="findings")


def _finding(finding: Finding) -> Html:
    head = [tag("strong", finding.severity, class_="badge"), " ", tag("b", finding.rule), f" {finding.where}".rstrip()]
    return tag(
        "li", tag("p", *head), tag("p", finding.evidence), tag("p", "→ ", finding.advice), class_=finding.severity
    )


# --- the partition ---------------------------------------------------------------------------------------------------


def partition(record: RunRecord) -> Html:
    """A heat map of the counts by class and client, and a table of the clients."""
    counts = record.partition_counts
    if not counts:
        return EMPTY
    sizes = {name: sum(row) for name, row in counts.items()}
    largest, smallest = (pick(sizes, key=lambda name: sizes[name]) for pick in (max, min))
    classes = [sum(1 for count in row if count) for row in counts.values()]
    description = (
        f"Heat map of the number of samples by client and class: {len(counts)} clients, {len(record.class_names)} classes, "
        f"{sum(sizes.values()):,} samples. {largest} holds most ({sizes[largest]:,}), {smallest} least ({sizes[smallest]:,}). "
        f"A client holds samples of {min(classes)} to {max(classes)} classes."
    )
    drawn = heat_map(
        "Samples by class and client", list(counts), record.class_names, list(counts.values()), ("client", "class"), description
    )  # fmt: skip
    more = [f"digest {str(record.partition.get('digest', '–'))[:16]}: runs with the same one can be compared"]
    if record.partition.get("public_samples"):
        more.append(f"the server keeps {record.partition['public_samples']:,} public samples that no client holds")
    return together([charts([drawn, tag("div", _client_table(record))]), notes(more)])


def _client_table(record: RunRecord) -> Html:
    rows = []
    for name, row in record.partition_counts.items():
        epochs = record.measurements.epochs.get(name, {})
        seconds = sum(entry.get("seconds", 0) for entry in epochs.values())
        trained = duration(seconds) if seconds else "–"
        classes, accuracy = sum(1 for count in row if count), percent(record.local_accuracy.get(name))
        rows.append([name, f"{sum(row):,}", str(classes), str(max(epochs, default=0)), trained, accuracy])
    return table(["client", "samples", "classes", "epochs", "training", "alone, %"], rows, "Clients")


# --- communication and environment -----------------------------------------------------------------------------------


def traffic(record: RunRecord) -> Html:
    """Bytes that crossed the network in all rounds, also per client."""
    if record.result is None or "bytes_down" not in record.result:
        return EMPTY
    down, up, rounds = record.result["bytes_down"], record.result["bytes_up"], record.recipe.rounds
    by_client = record.result.get("traffic") or record.result["uploads"]
    count = max(len(by_client), 1)
    bars = [Bar(name, value / 1e6, RULES, text=format_bytes(value)) for name, value in (("down", down), ("up", up))]
    shares = {"per client": count} | ({"per round": rounds} if rounds > 1 else {})
    rows = [
        [name, number(value), *(number(round(value / share)) for share in shares.values()), format_bytes(value)]
        for name, value in (("down (broadcasts)", down), ("up (uploads)", up), ("both", down + up))
    ]
    caption = f"{f'{rounds} rounds' if rounds > 1 else 'One round'}, {count} clients"
    listed = table(["", "bytes", *shares, "in words"], rows, caption)
    return charts([bar_chart("Bytes across the network, all clients", bars, "MB"), tag("div", listed)])


def environment(record: RunRecord) -> Html:
    """The machine and its software, the resolved recipe, and the command that repeats the run."""
    fields = {key: value for key, value in record.environment.items() if value is not None}
    packages = fields.pop("packages", {})
    pairs = [(str(key), number(value)) for key, value in fields.items()]
    pairs += [(str(name), str(version)) for name, version in packages.items()]
    repeat = command(record.recipe)
    lines = [tag("p", "Save the recipe below as recipe.yaml, then:" if repeat is None else "The same recipe again:"),
             tag("pre", tag("code", repeat or "oneround run recipe.yaml"), tabindex="0")]  # fmt: skip
    if record.recipe.local.data_path is not None:
        lines.append(remark("The data lay in a folder of its own: add --data-dir, or the file with --data."))
    text = yaml.safe_dump(record.recipe.plain(), sort_keys=False, allow_unicode=True)
    digest = f"Recipe digest {record.recipe.digest[:16]}; paths, device and threads of the machine are not part of it."
    resolved = folded("The resolved recipe", tag("pre", tag("code", text), tabindex="0"), remark(digest))
    return together([*lines, resolved, facts(pairs, class_="facts two") if pairs else EMPTY])
