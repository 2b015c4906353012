"""The page: one run from top to bottom, or a sweep with its comparison first and a folded section for each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from oneround.compare import Group, compare
from oneround.diagnose import diagnose
from oneround.errors import RecipeError
from oneround.finished import Run, find_runs
from oneround.layouts import methods_sheet
from oneround.observe.diagnosis import SEVERITIES
from oneround.observe.statistics import Summary
from oneround.report.charts import Bar, Series, bar_chart, line_chart
from oneround.report.epochs import EPOCHS
from oneround.report.markup import Html, aside, charts, folded, notes, score, table, tag, together
from oneround.report.record import Record, find_folders, read
from oneround.report.sections import Section, sections, state

RUNS = 6  # of a sweep told in full; of more, the first partition of each method
MOST = 12
FINDINGS = 40  # of a sweep
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report(paths: Sequence[Path], baseline: str | None = None, interest: float = 1.0) -> str:
    """The whole file, for run folders or folders with run folders in them."""
    folders = find_folders(paths)
    if len(folders) == 1:
        return run_page(read(folders[0]))
    return sweep_page(paths, [read(folder) for folder in folders], baseline, interest)


# --- one run ---------------------------------------------------------------------------------------------------------


def run_page(record: Record) -> str:
    told = sections(record)
    body = together([state(record), *(_section(each, 2) for each in told)])
    return _page(record.title, _subtitle(record), [(each.name, each.title) for each in told], body)


def _subtitle(record: Record) -> str:
    done = "" if record.finished else "not finished · "
    return f"{done}{record.recipe.partition.label} · partition seed {record.recipe.seeds.partition} · {record.recipe.training.epochs} local epochs"


def _section(section: Section, level: int, prefix: str = "") -> Html:
    name = prefix + section.name
    return tag(
        "section", tag(f"h{level}", section.title, id=name), section.content, class_="part", aria_labelledby=name
    )


# --- a sweep ---------------------------------------------------------------------------------------------------------


def sweep_page(paths: Sequence[Path], records: Sequence[Record], baseline: str | None, interest: float) -> str:
    """The comparison, curves of every method, then run by run."""
    overview: list[Section] = []
    finished = [record for record in records if record.finished]
    if finished:
        overview += _comparison(find_runs(paths), baseline, interest)
    overview.append(Section("findings", "Findings", _findings(records, paths)))
    overview.append(Section("cells", "All runs", _cells(records, paths)))
    chosen = _chosen(records)
    runs = [_run(record, f"run{at}-") for at, record in enumerate(chosen, 1)]
    left = len(records) - len(chosen)
    if left:
        runs.append(aside(f"Told in full: {len(chosen)} of {len(records)} runs, one partition of each method. For another: oneround report RUN."))  # fmt: skip
    overview.append(Section("runs", "Run by run", together(runs)))
    methods = list(dict.fromkeys(record.recipe.method for record in records))
    title = (
        f"{len(records)} runs of {', '.join(methods[:3])}{f' and {len(methods) - 3} more' if len(methods) > 3 else ''}"
    )
    data = ", ".join(dict.fromkeys(record.recipe.data.kind for record in records))
    subtitle = f"{data} · {len(finished)} finished" + (f" · {len(records) - len(finished)} not" if len(finished) < len(records) else "")  # fmt: skip
    body = together(_section(each, 2) for each in overview)
    return _page(title, subtitle, [(each.name, each.title) for each in overview], body)


def _comparison(runs: Sequence[Run], baseline: str | None, interest: float) -> list[Section]:
    """Who is better and whether that is real; with one method, its rules are compared."""
    rule = "all" if len({run.method for run in runs}) == 1 and _same_keys(runs) else None
    told: list[str] = []
    try:
        groups = compare(runs, baseline, rule)
    except RecipeError as error:
        try:
            groups = compare(runs, baseline, rule, common=True)
        except RecipeError:
            if baseline is not None:
                raise
            return [Section("comparison", "Comparison", tag("p", f"Not possible: {error}", class_="warning"))]
        told.append(f"only partitions that all have are compared ({error})")
    blocks = [_group(group, interest, len(groups) > 1) for group in groups]
    curves = [_curves(group, len(groups) > 1) for group in groups]
    return [
        Section("comparison", "Comparison", together([notes(told), *blocks])),
        Section("curves", "Accuracy over local training", together(curves)),
    ]


def _same_keys(runs: Sequence[Run]) -> bool:
    """Whether runs differ in nothing but seeds, so that only rules are left to compare."""
    return len({str({k: v for k, v in run.keys.items() if not k.startswith("seeds.")}) for run in runs}) == 1


def _group(group: Group, interest: float, named: bool) -> Html:
    """The verdicts in words, the table behind them, and both as pictures."""
    sheet, base = methods_sheet(group, interest), group.short(group.baseline)
    tested = [(group.short(entry), group.comparisons[entry.name]) for entry in group.entries if entry.name in group.comparisons]  # fmt: skip
    verdicts = [tag("li", tag("b", name), f" against {base}: {each.verdict(interest)}") for name, each in tested]
    drawn = [_means(group)]
    if tested:
        bars = [_bar(name, each.difference, 0 if each.real else 5) for name, each in tested]
        drawn.append(bar_chart(f"Paired difference to {base} with 95 % interval", bars, "points of test accuracy"))
    return together(
        [
            tag("h3", sheet.title) if named else Html(""),
            tag("ul", *verdicts) if verdicts else Html(""),
            table(sheet.heads, sheet.rows, "What is compared, partition by partition", words=(2, len(sheet.heads) - 1)),
            notes(sheet.notes),
            charts(drawn),
        ]
    )


def _means(group: Group) -> Html:
    best = max(entry.summary.mean for entry in group.entries)
    bars = [_bar(group.short(entry), entry.summary, 0 if entry.summary.mean == best else 5) for entry in group.entries]
    return bar_chart("Mean with 95 % interval; dots are partitions", bars, "test accuracy, %", most=100)


def _bar(name: str, values: Summary, style: int) -> Bar:
    dots = values.values if len(values.values) > 1 else ()
    return Bar(name, values.mean, style, values.margin, dots, _mean_in_words(values))


def _mean_in_words(summary: Summary) -> str:
    return f"{summary.mean:.1f}" + (f" ± {summary.margin:.1f}" if summary.margin is not None else "")


def _curves(group: Group, named: bool) -> Html:
    """The compared lines together; then, of each method, every rule."""
    lines = [_over_partitions(group.short(entry), entry.runs, entry.rule) for entry in group.entries if entry.curve()]
    drawn = [line_chart("What is compared", lines, EPOCHS, "test accuracy, %", bounds=(0, 100), shown=score)]
    for method, runs in {entry.method: entry.runs for entry in group.entries}.items():
        rules = [rule for rule in runs[0].result.curves if all(rule in run.result.curves for run in runs)]
        if len({entry.method for entry in group.entries}) > 1 and len(rules) > 1:
            each = [_over_partitions(rule, runs, rule) for rule in rules]
            drawn.append(line_chart(f"{method}, every rule", each, EPOCHS, "test accuracy, %", bounds=(0, 100), shown=score))  # fmt: skip
    told = f"Lines are means over {len(group.seeds)} partition{'s' * (len(group.seeds) > 1)}"
    told += "; bands are 95 % intervals of the mean." if len(group.seeds) > 1 else "."
    return together([tag("h3", group.setting) if named else Html(""), tag("p", told), charts(drawn)])


def _over_partitions(name: str, runs: Iterable[Run], rule: str) -> Series:
    """Mean and interval at every epoch; repeats on one partition are averaged first."""
    by_partition: dict[str, list[Run]] = {}
    for run in runs:
        by_partition.setdefault(run.result.partition, []).append(run)
    every = [run.result.curves.get(rule, {}) for same in by_partition.values() for run in same]
    epochs = sorted(set.intersection(*(set(curve) for curve in every)))
    found = {epoch: _at(epoch, by_partition.values(), rule) for epoch in epochs}
    means: dict[int, float | None] = {epoch: each.mean for epoch, each in found.items()}
    if any(each.margin is None for each in found.values()):
        return Series(name, means)
    low = {epoch: max(each.mean - (each.margin or 0), 0.0) for epoch, each in found.items()}
    high = {epoch: min(each.mean + (each.margin or 0), 100.0) for epoch, each in found.items()}
    return Series(name, means, low, high)


def _at(epoch: int, partitions: Iterable[Sequence[Run]], rule: str) -> Summary:
    return Summary(tuple(100 * sum(run.result.curves[rule][epoch] for run in same) / len(same) for same in partitions))


def _place(folder: Path, paths: Sequence[Path]) -> str:
    """Where a run lies in the sweep."""
    root = next((path for path in paths if folder != path and folder.is_relative_to(path)), folder.parent)
    return str(folder.relative_to(root))


def _findings(records: Sequence[Record], paths: Sequence[Path]) -> Html:
    """What the diagnosis says of any run, notes left to the runs themselves."""
    rows = [
        [_place(record.folder, paths), finding.severity, finding.rule, finding.where, finding.evidence]
        for record in records
        for finding in diagnose(record.folder).findings
        if finding.severity != SEVERITIES[-1]
    ]
    if not rows:
        return tag("p", "Nothing amiss was found in any run.")
    heads = ["run", "severity", "finding", "where", "evidence"]
    shown = table(heads, rows[:FINDINGS], "Findings of all runs", words=(1, 2, 3, 4))
    left = len(rows) - FINDINGS
    return together([shown, aside(f"{left} more are in the runs: oneround diagnose RUN.")]) if left > 0 else shown


def _cells(records: Sequence[Record], paths: Sequence[Path]) -> Html:
    """Every run on a line, those not finished among them."""
    rows = []
    for record in records:
        rules, alone = record.final()
        recipe, seeds = record.recipe, record.recipe.seeds
        upto = "finished" if record.finished else f"epoch {record.reached} of {recipe.epochs}"
        rows.append([
            _place(record.folder, paths), recipe.method, recipe.partition.label, str(seeds.partition), str(seeds.training), upto,
            record.rule, score(rules.get(record.rule)), score(max(alone.values(), default=None)),
        ])  # fmt: skip
    heads = ["run", "method", "partition", "seed", "training seed", "state", "rule", "%", "best client, %"]
    return table(heads, rows, "Every run", words=(1, 2, 5, 6))


def _chosen(records: Sequence[Record]) -> list[Record]:
    """Runs to tell in full: all of few, the first of each method and setting of many."""
    if len(records) <= RUNS:
        return list(records)
    first: dict[str, Record] = {}
    for record in records:
        plain = {key: value for key, value in record.recipe.plain().items() if key != "seeds"}
        first.setdefault(str(plain), record)
    return list(first.values())[:MOST]


def _run(record: Record, prefix: str) -> Html:
    rules, _ = record.final()
    shown = f": {record.rule} {score(rules[record.rule])} %" if record.rule in rules else ""
    summary = f"{record.title}, {_subtitle(record)}{shown}"
    inside = [tag("h3", summary), state(record), *(_section(each, 4, prefix) for each in sections(record))]
    return folded(summary, *inside, class_="run")


# --- the file --------------------------------------------------------------------------------------------------------


def _page(title: str, subtitle: str, parts: Sequence[tuple[str, str]], body: Html) -> str:
    style = (resources.files("oneround.report") / "style.css").read_text(encoding="utf-8")
    head = together(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            tag("title", f"{title} · oneround"),
            tag("style", Html(style)),
        ]
    )
    contents = tag(
        "nav", tag("ul", *(tag("li", tag("a", name, href=f"#{at}")) for at, name in parts)), aria_label="Contents"
    )
    top = tag("header", tag("p", "oneround report", class_="kind"), tag("h1", title), tag("p", subtitle), contents)
    page = together([tag("a", "Skip to the content", href="#content", class_="skip"), top, tag("main", body, id="content", tabindex="-1")])  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', tag('head', head), tag('body', page), lang='en')}\n"
