"""The claims of the source notes, one by one, and what the records in results/ say of them: writes docs/claims.md.

    python benchmarks/claims.py

claims.yaml has the claims, the notes' numbers and the kind of answer (answers.py) that decides each; numbers of ours and verdicts come
from records. Where a difference is tested, its interval and p are those of oneround.analysis, corrected by Holm's method for all tests
of one note.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import studied
from answers import (
    ANSWERS,
    FAMILY,
    MERGENET,
    NEAR,
    NOT_MEASURED,
    ROOT,
    Answer,
    Test,
    in_study,
    learned_by_client,
    listed,
    notes,
    pairs_of_000,
    percent,
    record,
    runs_of,
)
from bank_pairs import METHODS
from common import markdown_head, markdown_row
from oneround.analysis.comparison import grouped
from oneround.analysis.statistics import (
    CLOSE,
    LEVEL,
    PAIRS,
    REFUTED,
    REPRODUCED,
    Comparison,
    agrees,
    compare_decisive,
    pairs_needed,
)
from oneround.formatting import plural
from oneround.studies.named_study import names
from oneround.studies.outcome import EVALUATION
from oneround.studies.outcome import MODES as BOTH

PAGE = ROOT / "docs/claims.md"


@dataclass(frozen=True)
class Row:
    number: int
    claim: str
    note: str
    answer: Answer
    verdict: str
    why: str
    open: str
    """The command that would measure it, or what is missing; empty where the list at the end of the page has the command."""


# --- verdicts --------------------------------------------------------------------------------------------------------------


def verdict_of(tests: Sequence[Test], comparisons: Sequence[Comparison]) -> str:
    """Refuted by a difference the other way, reproduced if none is missing, otherwise open."""
    certain = [each for each, comparison in zip(tests, comparisons, strict=True) if comparison.significant]
    if any(each.of_figure or each.difference.mean < 0 for each in certain):
        return REFUTED
    if len(certain) == len(tests) or all(each.of_figure and agrees(each.difference) for each in tests):
        return REPRODUCED
    return f"undecidable with {plural(max(len(each.difference.values) for each in tests), 'pair')}"


def corrected(tests: Sequence[Test]) -> list[Comparison]:
    """All tests of a note together; those with too few pairs are none."""
    return compare_decisive([each.difference for each in tests])


def needed(comparisons: Sequence[Comparison]) -> str:
    """How many pairs would see a point, of the difference that varies most."""
    unseen = [
        each.difference.values for each in comparisons if not each.significant and len(each.difference.values) >= PAIRS
    ]
    most = max(map(statistics.stdev, unseen), default=0.0)
    pairs = most and pairs_needed(most, 1.0, LEVEL / comparisons[0].comparisons)
    return f"about {pairs} pairs would see a difference of 1 point" if pairs else ""


# --- the rows --------------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """`1-3, 7` → 1, 2, 3, 7"""
    ranges = [part.strip().partition("-") for part in text.split(",")]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]


def left_open(judged: Mapping[str, Sequence[Row]]) -> list[tuple[dict[str, Any], dict[str, list[int]]]]:
    """Commands at the end of the page, and the rows that each would decide: note → numbers, without those that are decided."""
    decided = {(note, row.number) for note, rows in judged.items() for row in rows if is_decided(row.verdict)}
    found = []
    for entry in listed()["more"]:
        by_note = {
            note: [n for n in numbers(which) if (note, n) not in decided] for note, which in entry["rows"].items()
        }
        found.append((entry, {note: which for note, which in by_note.items() if which}))
    return [(entry, by_note) for entry, by_note in found if by_note]


def rows_of(note: str) -> list[Row]:
    """The rows of a note, judged together."""
    claims = notes()[note]["claims"]
    answered, reasons = {}, {}
    for number, claim in claims.items():
        asked = dict(claim.get("answer", {}))
        older = ANSWERS[asked.pop("kind")](**asked) if asked else Answer(verdict=NOT_MEASURED)
        newer, reason = from_study(**claim["study"]) if "study" in claim else (None, "")
        taken = newer is not None and pairs(newer) >= min(PAIRS, pairs(older))
        answered[number], reasons[number] = (newer, reason) if newer and taken else (older, claim.get("why", ""))
    comparisons = iter(corrected([test for answer in answered.values() for test in answer.tests]))
    rows = []
    for number, claim in claims.items():
        answer = answered[number]
        mine = [next(comparisons) for _ in answer.tests]
        verdict = verdict_of(answer.tests, mine) if mine else answer.verdict
        why = answer.why or reasons[number].format(**answer.facts)
        if mine and not is_decided(verdict):
            why = "; ".join(filter(None, [why, needed(mine)]))
        rest = "" if is_decided(verdict) else claim.get("missing") or claim.get("command", "")
        if rest:
            rest = f"missing: {rest}" if "missing" in claim else f"`{rest}`"
        rows.append(Row(number, claim["claim"], answer.note or claim.get("note", "–"), answer, verdict, why, rest))
    return rows


def from_study(why: str, **asked: Any) -> tuple[Answer | None, str]:
    """What a named study says, and why that decides the claim."""
    return in_study(**asked), why


def pairs(answer: Answer) -> int:
    return max((len(each.difference.values) for each in answer.tests), default=0)


def is_decided(verdict: str) -> bool:
    return verdict in (REPRODUCED, REFUTED)


# --- the page --------------------------------------------------------------------------------------------------------------


INTRODUCTION = """The methods here go back to five source notes on experiments with FAFI, its successors (V4 to V14) and MergeNet. The notes
are in Chinese and not published; this page quotes what it needs. It has a row for every claim: what the note says, what is measured here, whether
that decides it, and why. `python benchmarks/claims.py` writes it from the records in [`results/`](../results/README.md), and each verdict links what
it rests on."""
VERDICTS = f"""**Verdicts.** A difference is paired on the same partition and seeds, in points of test accuracy unless the row says otherwise, with its 95 %
interval and the number of pairs n (n.d.: the interval contains 0). *Reproduced* and *refuted*: p < {LEVEL:g} in a paired t-test, corrected by Holm's method for all
tests of the note, with the sign claimed (at every α of the row) or the other. *Undecidable with n pairs*: neither. Fewer than {PAIRS} pairs decide nothing, however large the
difference; and that no difference is seen does not show that there is none. A number of the note is refuted if ours differs from it by that test, and
reproduced if it lies in our interval and that is at most ± {CLOSE:g} points wide. Arithmetic, traces of λ and definitions are decided by computation or a
named test. *Not measured* rows show the nearest there is, and a command. The notes have one run in each cell: how much theirs would vary is not known."""
MODES = """**Evaluation mode.** The code behind the notes scored its ensembles in training mode, so that batch norm took the statistics of the
test batch (256 shuffled images). That is *transductive*: it needs batches with many classes, and can change an accuracy by tens of points. The notes'
accuracies of V4 to V13 are of that kind. Ours are in *evaluation* mode (running statistics) and, for source note 000, in both on the same uploads.
`--set evaluation.batch_norm=batch` measures both in any run; records made before there was that option have the one."""
MORE = """Commands for rows that are not measured at all are in those rows. These would decide the others, or bring them nearer. Seconds: of the runs in
the record, upper bounds, as other work shared the GPU."""


def page() -> str:
    judged = {number: rows_of(number) for number in notes()}
    lines = ["# The claims of the source notes", "", wrapped(INTRODUCTION), "", *_counts(judged), ""]
    of_studies = any(_studies(rows) for rows in judged.values())
    modes = (
        MODES.replace("for source note 000,", "for source note 000 and rows that rest on a study,")
        if of_studies
        else MODES
    )
    lines += [wrapped(f"{VERDICTS} {studied.spread_of_reruns()}"), "", wrapped(modes), ""]
    for number, note in notes().items():
        lines += [
            f"## Source note {number}: {note['title']}",
            "",
            _setting(note["setting"], judged[number]),
            "",
            *_table(judged[number]),
            "",
        ]
    return "\n".join([*lines, "## What more GPU time would change", "", wrapped(MORE), "", *_more(judged)]) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 140, break_long_words=False, break_on_hyphens=False)


def _counts(judged: Mapping[str, Sequence[Row]]) -> list[str]:
    """Rows by verdict."""
    heads = [REPRODUCED, REFUTED, "undecidable", NOT_MEASURED]
    lines = [f"| source note | claims | {' | '.join(heads)} |", "|---" + "|---:" * 5 + "|"]
    total: Counter[str] = Counter()
    for number, rows in judged.items():
        found = Counter("undecidable" if row.verdict.startswith("undecidable") else row.verdict for row in rows)
        total += found
        title = f"[{number}](#{anchor(number)}): {notes()[number]['title']}"
        lines.append(f"| {title} | {len(rows)} | {' | '.join(str(found[head]) for head in heads)} |")
    return [*lines, f"| all | {total.total()} | {' | '.join(str(total[head]) for head in heads)} |"]


def anchor(note: str) -> str:
    return f"source-note-{note}-{notes()[note]['title'].lower().replace(' ', '-')}"


def _studies(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Named study → the rows that rest on it."""
    found: dict[str, list[int]] = {}
    for row in rows:
        name = Path(row.answer.evidence).stem
        if name in names() and row.answer.evidence.startswith("results/"):
            found.setdefault(name, []).append(row.number)
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 → `1-3, 7`"""
    groups = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ]
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in groups)


def _of_studies(rows: Sequence[Row]) -> str:
    """Which rows rest on which study, and how much of it is measured."""
    texts = [
        f"{_ranges(which)} on [`{name}`](../results/{name}.json) ({studied.description(name)})"
        for name, which in _studies(rows).items()
    ]
    return f"**Rows that rest on a [study](reproduce.md):** {'; '.join(texts)}. **Ours otherwise:**" if texts else ""


def _turned() -> str:
    """Whether alignment that does turn prototypes helps; empty where that is not measured."""
    texts = [
        f"{name} {by_mode[EVALUATION]:+.1f} at a cosine of {cosine:.2f}" for name, cosine, by_mode in studied.turned()
    ]
    return (
        f" Forms of alignment and how near prototypes end to their anchors, minus V4: {'; '.join(texts)}."
        if texts
        else ""
    )


def _setting(text: str, rows: Sequence[Row]) -> str:
    text = text.replace("**Ours:**", _of_studies(rows) or "**Ours:**")
    text += _turned() if any(row.claim.startswith("V9") for row in rows) else ""
    mix = " ".join(f"{value:.2f}" for value in learned_by_client(runs_of(FAMILY, "v9")[0], 1))
    teachers = [100 * each["teacher"] for each in record(MERGENET)["cells"]]
    teacher = f"{min(teachers):.0f} to {max(teachers):.0f}"
    return wrapped(text.format(mix=mix, near=percent(NEAR), teacher=teacher, repeat=_repeat()))


def _repeat() -> str:
    """By how much the same snapshots differ when they are measured twice."""
    first, again = (pairs_of_000(f"cifar10_note_000{name}").entries for name in ("", "_repeat"))
    parts = []
    for epoch in sorted({key[-1] for key in again}):
        both = [(first[key]["accuracy"], again[key]["accuracy"]) for key in again if key in first and key[-1] == epoch]
        most = {mode: max(100 * abs(one[mode] - other[mode]) for one, other in both) for mode in BOTH}
        parts.append(f"{most['evaluation']:.1f} points (transductive {most['transductive']:.1f}) after epoch {epoch}")
    return " and ".join(parts)


def _table(rows: Sequence[Row]) -> list[str]:
    both = any(row.answer.transductive != "–" for row in rows)
    heads = [
        "no.",
        "claim",
        "the note",
        *(("ours, evaluation", "ours, transductive") if both else ("ours",)),
        "verdict",
        "why",
    ]
    lines = markdown_head(heads)
    for row in rows:
        ours = [row.answer.evaluation, *([row.answer.transductive] if both else [])]
        verdict = f"[{row.verdict}](../{row.answer.evidence})" if row.answer.evidence else row.verdict
        why = "; ".join(filter(None, [row.why, row.open]))
        lines.append(markdown_row([str(row.number), row.claim, row.note, *ours, verdict, why]))
    return lines


def _more(judged: Mapping[str, Sequence[Row]]) -> list[str]:
    """Commands that have rows left to decide."""
    lines = markdown_head(["rows", "command", "seconds on an H200"])
    for entry, by_note in left_open(judged):
        rows = "; ".join(f"{note}: {_ranges(which)}" for note, which in by_note.items())
        lines.append(markdown_row([rows, f"`{entry['command']}`", _cost(entry.get("cost", "not measured"))]))
    return lines


def _cost(cost: str | Sequence[str]) -> str:
    """Seconds that methods of source notes 000 and 003 took: a partition at all α, and a run."""
    if isinstance(cost, str):
        return cost
    if set(cost) <= set(METHODS):
        pairs = pairs_of_000()
        return ", ".join(f"{method} {pairs.seconds(method):.0f}" for method in cost) + " a partition"
    by_method = grouped(record(MERGENET)["cells"], lambda each: each["method"])
    return (
        ", ".join(f"{method} {statistics.mean(each['seconds'] for each in by_method[method]):.0f}" for method in cost)
        + " a run"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
