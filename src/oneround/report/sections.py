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
from oneround.report.charts import Bar, bar_chart
from oneround.report.classes import classes
from oneround.report.epochs import accuracy, alignment, cosines, losses, rounds
from oneround.report.heat import heat_map
from oneround.report.markup import Html, aside, charts, facts, folded, notes, number, score, table, tag, together
from oneround.report.record import Record

FINDINGS = 12  # shown at once
RULES, MODELS = 0, 5  # colours of bars


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
        ("rounds", "Between rounds", rounds),
        ("lambda", "Weight of alignment λ", alignment),
        ("losses", "Loss terms", losses),
        ("gradients", "Gradient cosines", cosines),
        ("classes", "Classes: fused model and clients", classes),
        ("traffic", "Communication", traffic),
        ("again", "Environment and how to repeat it", environment),
    ]
    told = [Section(name, title, make(record)) for name, title, make in makers]
    return [section for section in told if section.content]


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
        (
            "local epochs",
            f"{recipe.training.epochs} in each of {recipe.rounds} rounds"
            if recipe.rounds > 1
            else str(recipe.training.epochs),
        ),
        ("fusion", ", ".join(rule.label for rule in recipe.fusion)),
    ]
    return charts([facts(known), *_scores(record)])


def _scores(record: Record) -> list[Html]:
    """Test accuracy, from the result or, before there is one, from the last snapshot."""
    rules, clients = record.final()
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
    _, alone = record.final()
    rows = []
    for name, row in record.counts.items():
        epochs = record.epochs.get(name, {})
        seconds = sum(event.get("seconds") or 0 for event in epochs.values())
        held = sum(1 for count in row if count)
        rows.append([name, f"{sum(row):,}", str(held), str(max(epochs, default=0)), duration(seconds) if seconds else "–", score(alone.get(name))])  # fmt: skip
    return table(["client", "samples", "classes", "epochs", "training", "alone, %"], rows, "Clients")


# --- what it took ----------------------------------------------------------------------------------------------------


def traffic(record: Record) -> Html:
    """Bytes that crossed the network, by client; with several rounds, of all of them."""
    if record.result is None or "bytes_down" not in record.result:
        return Html("")
    down, up, rounds = record.result["bytes_down"], record.result["bytes_up"], record.recipe.rounds
    by_client = record.result.get("traffic") or record.result["uploads"]
    count = max(len(by_client), 1)
    bars = [Bar(name, value / 1e6, RULES, text=size_in_words(value)) for name, value in (("down", down), ("up", up))]
    shares = {"per client": count} | ({"per round": rounds} if rounds > 1 else {})
    rows = [
        [name, number(value), *(number(round(value / share)) for share in shares.values()), size_in_words(value)]
        for name, value in (("down (broadcasts)", down), ("up (uploads)", up), ("both", down + up))
    ]
    told = f"{f'{rounds} rounds' if rounds > 1 else 'One round'}, {count} clients"
    listed = table(["", "bytes", *shares, "in words"], rows, told)
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
