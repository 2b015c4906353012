"""The page of one run, or of a sweep: its comparison first, then a folded section for each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from os import PathLike
from pathlib import Path

from oneround.analysis.comparison import Group, compare, grouped
from oneround.analysis.diagnosis import SEVERITIES
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.analysis.statistics import Summary
from oneround.analysis.tables import methods_sheet
from oneround.errors import RecipeError
from oneround.formatting import plural
from oneround.report.charts import Bar, Series, bar_chart
from oneround.report.epochs import accuracy_chart
from oneround.report.markup import EMPTY, Html, charts, folded, notes, percent, remark, table, tag, together
from oneround.report.sections import Section, sections, state
from oneround.runs.archive import distinct, find_folders
from oneround.runs.record import RunRecord

ALL_RUNS = 6  # a larger sweep shows only the first partition of each method in full
MOST_RUNS = 12  # shown in full
FINDINGS = 40  # of a sweep
STRICT = ("result.json", "partition.json", "environment.json")  # damaged ones are refused


def report(paths: Iterable[str | PathLike[str]], baseline: str | None = None, interest: float = 1.0) -> str:
    """The whole HTML file.

    Args:
        paths: run folders, finished or not, or folders with run folders in them.
        baseline: the method that the others of a sweep are compared with; otherwise the first.
        interest: the smallest difference, in points, that would matter.
    """
    folders = [Path(path) for path in paths]
    records = [RunRecord.read(folder, strict=STRICT) for folder in find_folders(folders)]
    return run_page(records[0]) if len(records) == 1 else sweep_page(folders, records, baseline, interest)


# --- one run ---------------------------------------------------------------------------------------------------------


def run_page(record: RunRecord) -> str:
    return _page(_title(record), _subtitle(record), sections(record), state(record))


def _title(record: RunRecord) -> str:
    return f"{record.recipe.method} on {record.recipe.data.kind}"


def _subtitle(record: RunRecord) -> str:
    done = "" if record.finished else "not finished · "
    return f"{done}{record.recipe.partition.label} · partition seed {record.recipe.seeds.partition} · {record.recipe.training.epochs} local epochs"


def _section(section: Section, level: int, prefix: str = "") -> Html:
    name = prefix + section.name
    heading = tag(f"h{level}", section.title, id=name)
    return tag("section", heading, section.content, class_="part", aria_labelledby=name)


# --- a sweep ---------------------------------------------------------------------------------------------------------


def sweep_page(paths: Sequence[Path], records: Sequence[RunRecord], baseline: str | None, interest: float) -> str:
    """The comparison, curves of every method, then run by run."""
    finished = [record for record in records if record.finished]
    scored = distinct(record for record in finished if record.accuracy)
    chosen = _chosen(records)
    runs = [_run(record, f"run{at}-") for at, record in enumerate(chosen, 1)]
    if len(chosen) < len(records):
        shown = f"Shown in full: {len(chosen)} of {len(records)} runs, one partition of each method."
        runs.append(remark(f"{shown} For another: oneround report RUN."))
    every = [
        *(_comparison(scored, baseline, interest) if scored else []),
        Section("findings", "Findings", _findings(records, paths)),
        Section("cells", "All runs", _cells(records, paths)),
        Section("runs", "Run by run", together(runs)),
    ]
    methods = list(dict.fromkeys(record.recipe.method for record in records))
    more = f" and {len(methods) - 3} more" if len(methods) > 3 else ""
    data = ", ".join(dict.fromkeys(record.recipe.data.kind for record in records))
    unfinished = f" · {len(records) - len(finished)} not" if len(finished) < len(records) else ""
    subtitle = f"{data} · {len(finished)} finished{unfinished}"
    return _page(f"{len(records)} runs of {', '.join(methods[:3])}{more}", subtitle, every)


def _comparison(runs: Sequence[RunRecord], baseline: str | None, interest: float) -> list[Section]:
    """Which method is better and whether the difference is significant; with one method, its rules are compared."""
    rule = "all" if len({run.method for run in runs}) == 1 and _same_keys(runs) else None
    restrictions: list[str] = []
    try:
        groups = compare(runs, baseline, rule)
    except RecipeError as error:
        try:
            groups = compare(runs, baseline, rule, common=True)
        except RecipeError:
            if baseline is not None:
                raise
            return [Section("comparison", "Comparison", tag("p", f"Not possible: {error}", class_="warning"))]
        restrictions.append(f"only partitions that all have are compared ({error})")
    blocks = [_group(group, interest, len(groups) > 1) for group in groups]
    curves = [_curves(group, len(groups) > 1) for group in groups]
    return [
        Section("comparison", "Comparison", together([notes(restrictions), *blocks])),
        Section("curves", "Accuracy over local training", together(curves)),
    ]


def _same_keys(runs: Sequence[RunRecord]) -> bool:
    """Whether runs differ in their seeds only, so that only rules can be compared."""
    return len({str({k: v for k, v in run.keys.items() if not k.startswith("seeds.")}) for run in runs}) == 1


def _group(group: Group, interest: float, named: bool) -> Html:
    """The verdicts in words, the table and the charts."""
    sheet, base = methods_sheet(group, interest), group.short(group.baseline)
    others = [entry for entry in group.entries if entry is not group.baseline]
    tested = [(group.short(entry), group.comparisons[entry.name]) for entry in others]
    verdicts = [tag("li", tag("b", name), f" against {base}: {each.verdict(interest)}") for name, each in tested]
    drawn = [_means(group)]
    if tested:
        bars = [_bar(name, each.difference, 0 if each.significant else 5) for name, each in tested]
        drawn.append(bar_chart(f"Paired difference to {base} with 95 % interval", bars, "points of test accuracy"))
    columns = (2, len(sheet.heads) - 1)
    listed = table(sheet.heads, sheet.rows, "What is compared, partition by partition", text_columns=columns)
    title = tag("h3", sheet.title) if named else EMPTY
    return together([title, tag("ul", *verdicts) if verdicts else EMPTY, listed, notes(sheet.notes), charts(drawn)])


def _means(group: Group) -> Html:
    best = max(entry.summary.mean for entry in group.entries)
    bars = [_bar(group.short(entry), entry.summary, 0 if entry.summary.mean == best else 5) for entry in group.entries]
    return bar_chart("Mean with 95 % interval; dots are partitions", bars, "test accuracy, %", most=100)


def _bar(name: str, values: Summary, style: int) -> Bar:
    dots = values.values if len(values.values) > 1 else ()
    return Bar(name, values.mean, style, values.margin, dots, f"{values:.1f}")


def _curves(group: Group, named: bool) -> Html:
    """A chart of what is compared, then one for each method with every rule."""
    lines = [_over_partitions(group.short(entry), entry.runs, entry.rule) for entry in group.entries if entry.curve()]
    drawn = [accuracy_chart("What is compared", lines)]
    for method, runs in group.runs.items():
        rules = [rule for rule in runs[0].curves if all(rule in run.curves for run in runs)]
        if len(group.runs) > 1 and len(rules) > 1:
            lines = [_over_partitions(rule, runs, rule) for rule in rules]
            drawn.append(accuracy_chart(f"{method}, every rule", lines))
    caption = f"Lines are means over {plural(len(group.seeds), 'partition')}"
    caption += "; bands are 95 % intervals of the mean." if len(group.seeds) > 1 else "."
    return together([tag("h3", group.setting) if named else EMPTY, tag("p", caption), charts(drawn)])


def _over_partitions(name: str, runs: Sequence[RunRecord], rule: str) -> Series:
    """Mean and interval at every epoch; repeats on one partition are averaged first."""
    partitions = grouped(runs, lambda run: run.partition_digest).values()
    epochs = sorted(set.intersection(*(set(run.curves.get(rule, {})) for run in runs)))
    means, low, high = dict[int, float | None](), dict[int, float](), dict[int, float]()
    for epoch in epochs:
        values = (100 * sum(run.curves[rule][epoch] for run in same) / len(same) for same in partitions)
        summary = Summary(tuple(values))
        means[epoch] = summary.mean
        if summary.margin is not None:
            low[epoch], high[epoch] = max(summary.mean - summary.margin, 0.0), min(summary.mean + summary.margin, 100.0)
    return Series(name, means, low or None, high or None)


def _name(folder: Path, paths: Sequence[Path]) -> str:
    """The path of a run within the sweep."""
    root = next((path for path in paths if folder != path and folder.is_relative_to(path)), folder.parent)
    return str(folder.relative_to(root))


def _findings(records: Sequence[RunRecord], paths: Sequence[Path]) -> Html:
    """Problems and warnings of the diagnosis of every run; notes are left to the runs' own sections."""
    rows = [
        [_name(record.path, paths), finding.severity, finding.rule, finding.where, finding.evidence]
        for record in records
        for finding in diagnose(record).findings
        if finding.severity != SEVERITIES[-1]
    ]
    if not rows:
        return tag("p", "No rule found a problem in any run.")
    heads = ["run", "severity", "finding", "where", "evidence"]
    listed = [table(heads, rows[:FINDINGS], "Findings of all runs", text_columns=(1, 2, 3, 4))]
    if len(rows) > FINDINGS:
        listed.append(remark(f"{len(rows) - FINDINGS} more are in the runs: oneround diagnose RUN."))
    return together(listed)


def _cells(records: Sequence[RunRecord], paths: Sequence[Path]) -> Html:
    """A row for every run, also if it is not finished."""
    rows = []
    for record in records:
        best = max(record.local_accuracy.values(), default=None)
        recipe, seeds = record.recipe, record.recipe.seeds
        upto = "finished" if record.finished else f"epoch {record.reached} of {recipe.epochs}"
        rows.append([
            _name(record.path, paths), recipe.method, recipe.partition.label, str(seeds.partition), str(seeds.training), upto,
            record.main_rule, percent(record.accuracy.get(record.main_rule)), percent(best),
        ])  # fmt: skip
    heads = ["run", "method", "partition", "seed", "training seed", "state", "rule", "%", "best client, %"]
    return table(heads, rows, "Every run", text_columns=(1, 2, 5, 6))


def _chosen(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs to show in full: all if they are few, else the first of each method and setting."""
    if len(records) <= ALL_RUNS:
        return list(records)
    first: dict[str, RunRecord] = {}
    for record in records:
        plain = {key: value for key, value in record.recipe.plain().items() if key != "seeds"}
        first.setdefault(str(plain), record)
    return list(first.values())[:MOST_RUNS]


def _run(record: RunRecord, prefix: str) -> Html:
    accuracy = record.accuracy.get(record.main_rule)
    score_text = "" if accuracy is None else f": {record.main_rule} {percent(accuracy)} %"
    summary = f"{_title(record)}, {_subtitle(record)}{score_text}"
    inside = [tag("h3", summary), state(record), *(_section(each, 4, prefix) for each in sections(record))]
    return folded(summary, *inside, class_="run")


# --- the file --------------------------------------------------------------------------------------------------------


META = Html(
    '<meta charset="utf-8">'
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">"""
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    '<link rel="icon" href="data:,">'
)


def _page(title: str, subtitle: str, parts: Sequence[Section], preface: Html = EMPTY) -> str:
    style = (resources.files("oneround.report") / "style.css").read_text(encoding="utf-8")
    head = tag("head", META, tag("title", f"{title} · oneround"), tag("style", Html(style)))
    links = (tag("li", tag("a", each.title, href=f"#{each.name}")) for each in parts)
    contents = tag("nav", tag("ul", *links), aria_label="Contents")
    top = tag("header", tag("p", "oneround report", class_="kind"), tag("h1", title), tag("p", subtitle), contents)
    skip = tag("a", "Skip to the content", href="#content", class_="skip")
    main = tag("main", preface, *(_section(each, 2) for each in parts), id="content", tabindex="-1")
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', skip, top, main), lang='en')}\n"
