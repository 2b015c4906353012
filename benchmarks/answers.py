"""What the records in results/ answer to the claims of the source notes: a function for each kind of answer that claims.yaml names."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mergenet
import studied
from bank_pairs import CONTRASTS, EPOCHS, KINDS, METHODS, Pairs, noted
from oneround.analysis.comparison import compare
from oneround.analysis.statistics import PAIRS, REFUTED, REPRODUCED, Summary, paired
from oneround.analysis.terminal import format_difference
from oneround.config.load import load, presets, read_yaml
from oneround.config.sections import Evaluation
from oneround.data import Dataset, Images, partitions
from oneround.errors import RecipeError
from oneround.evaluate import transductive_name
from oneround.formatting import plural
from oneround.runs.archive import find_runs
from oneround.runs.record import RunRecord, keys_of
from oneround.runs.result import mean_over_clients
from oneround.studies.outcome import MODES
from oneround.training.alignment.aligner import label_entropy
from oneround.training.alignment.schedules import schedules
from oneround.training.alignment.weights import weights

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("claims.yaml")
NEAR = 0.3  # of the note's λ
ORTHOGONAL = 0.1  # cosines below this in absolute value are nearly 0

FAMILY, LABEL_SKEW = "cifar10_anchor_family", "digits_label_skew"
ALPHAS = (0.5, 0.3, 0.1, 0.05)
OLDER_000, STUDY_000 = "cifar10_note_000", "note-000"


def record_of_000(results: Path) -> str:
    """The study's record, once it has a pair at every α of the note."""
    file = results / f"{STUDY_000}.json"
    return STUDY_000 if file.is_file() and Pairs(file).alphas("dirichlet-overlap") == [*ALPHAS] else OLDER_000


NOTE_000 = record_of_000(ROOT / "results")
EXPLOSION, MERGENET, STUDENTS = "digits_explosion_eight_seeds", "cifar10_mergenet", "digits_students"
TRANSDUCTIVE = transductive_name("iffi", Evaluation().batch_size)
EXPLOSION_STUDY, GUARDED = "explosion", "V12 with γ/σ² (V13)"
STUDY_002, AS_HERE, ALL_HABITS = "note-002", "as here", "all three"
LEARNED = "etf-uncertainty-unclipped"  # the form of V10 that the older record has
VARIANTS = {
    "v4": "V4", "v5": "V5", "bank": "V5", "two-stage share=0.2": "V6", "v7": "V7", "v9": "V9", LEARNED: "V10", "v12": "V12",
}  # fmt: skip
"""Method of the older record → variant of the family's studies."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Test:
    """What decides a claim."""

    difference: Summary
    """Positive: as claimed. Of a figure: ours minus the note's."""
    of_figure: bool = False


@dataclass(frozen=True)
class Answer:
    """What records say of a claim."""

    evaluation: str = "–"
    """Our figure with batch norm on running statistics."""
    transductive: str = "–"
    """The same with batch norm on the statistics of test batches."""
    evidence: str = ""
    """File that has it, from the root of the repository."""
    tests: tuple[Test, ...] = ()
    verdict: str = ""
    """Where no test decides."""
    note: str = ""
    """The note's figure, where it is not in the list."""
    why: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """For the template in the list."""


ANSWERS: dict[str, Callable[..., Answer]] = {}


def answers(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make a function one that the list can name."""
    ANSWERS[function.__name__] = function
    return function


# --- the list --------------------------------------------------------------------------------------------------------------


@lru_cache
def listed() -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_yaml(LIST.read_text(encoding="utf-8"), LIST.name)
    return content


def notes() -> dict[str, Any]:
    """Number of the note → its title, setting and claims."""
    return {number: note for number, note in listed().items() if number != "more"}


# --- records ---------------------------------------------------------------------------------------------------------------


def file_of(name: str) -> str:
    return f"results/{name}.json"


@lru_cache
def record(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((ROOT / file_of(name)).read_text(encoding="utf-8"))
    return content


@lru_cache
def runs(name: str) -> tuple[RunRecord, ...]:
    """Those of a preset as it is; where a study varies presets, the variants are left out."""
    found = find_runs([ROOT / file_of(name)])
    return tuple(run for run in found if name != FAMILY or is_preset(run))


def is_preset(run: RunRecord) -> bool:
    """Whether alignment and terms of the objective are the preset's own."""
    own = keys_of(load(run.method).plain())
    keys = (key for key in run.keys.keys() & own.keys() if key.startswith(("alignment.", "objective.terms.")))
    return all(run.keys[key] == own[key] for key in keys)


def runs_of(name: str, method: str) -> list[RunRecord]:
    """The runs of a method, by partition."""
    preset = next((preset for preset, raw in presets().items() if raw.get("about", {}).get("alias") == method), method)
    return sorted((run for run in runs(name) if run.method == preset), key=lambda run: run.partition_seed)


def contrasts(name: str, method: str, baseline: str, rule: str | None = None) -> Iterator[tuple[str, Summary]]:
    """By setting, the paired difference of a method to another; where only some runs have a transductive score, that of these."""
    having = [run for run in runs(name) if rule != TRANSDUCTIVE or rule in run.accuracy]
    for group in compare(having, baseline, rule, common=True, only=[method, baseline]) if having else ():
        (other,) = [entry for entry in group.entries if entry is not group.baseline]
        yield group.setting, group.comparisons[other.name].difference


def contrast(name: str, method: str, baseline: str, rule: str | None = None) -> Summary:
    """The paired difference in a record of one setting."""
    ((_, difference),) = contrasts(name, method, baseline, rule)
    return difference


def family(*methods: str, epoch: int | None = None) -> tuple[str, list[list[RunRecord]]]:
    """Runs of methods of the anchor family on the same partitions, and their record: the studies', once that has as many of them.

    `epoch`: and once λ is traced so long.
    """
    older = [runs_of(FAMILY, method) for method in methods]
    variants = [studied.of_family(VARIANTS[method]) for method in methods]
    newer, (first, *_) = studied.shared(*variants), variants
    if (
        first is None
        or len(newer[0]) < min(PAIRS, *map(len, older))
        or not traced([run for each in newer for run in each], epoch)
    ):
        return FAMILY, older
    return first.study, newer


def traced(measured: Sequence[RunRecord], epoch: int | None) -> bool:
    """Whether λ of all runs is known after this epoch."""
    return epoch is None or all(epoch in trace for run in measured for trace in run.trace("lambda_raw").values())


def family_contrast(method: str, baseline: str, rule: str | None = None) -> Summary:
    """The paired difference of two methods of the family, from the record that `family` takes."""
    evidence, (ours, theirs) = family(method, baseline)
    if evidence == FAMILY:
        return contrast(FAMILY, method, baseline, rule)
    return paired(*([100 * run.accuracy[rule or run.main_rule] for run in each] for each in (ours, theirs)))


def form_of(evidence: str) -> str:
    """The form of V10 that a record has."""
    return "σ clipped apart" if evidence == FAMILY else "the note's form of V10, not its partition"


def signed(difference: Summary) -> str:
    """`+1.5 ± 0.8 (n = 3)`"""
    return f"{format_difference(difference)} {count(difference)}"


def count(summary: Summary) -> str:
    return f"(n = {len(summary.values)})"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def opposite(summary: Summary) -> Summary:
    return Summary(tuple(-value for value in summary.values))


def last(run: RunRecord, quantity: str) -> float:
    """Mean over clients after their last epoch."""
    return statistics.mean(trace[max(trace)] for trace in run.trace(quantity).values())


# --- answers: any note -----------------------------------------------------------------------------------------------------


@answers
def by_definition(evidence: str) -> Answer:
    return Answer(evidence=evidence, verdict=REPRODUCED)


@answers
def contrasted(record: str, method: str, baseline: str, expected: str = "", also: str = "") -> Answer:
    """A method against another; without what is expected it is something like what was claimed, and decides nothing."""
    if record == FAMILY and method in VARIANTS:
        evidence, _ = family(method, baseline)
        if evidence != FAMILY:
            return of_family(evidence, method, baseline, expected, also)
    found = list(contrasts(record, method, baseline))
    tests = [Test(difference if expected == "better" else opposite(difference)) for _, difference in found]
    facts = {"also": signed(contrast(record, method, also))} if also else {}
    verdict = "" if expected else NOT_MEASURED
    return Answer(
        by_setting(found),
        transductive(record, method, baseline),
        evidence=file_of(record),
        tests=tuple(tests if expected else ()),
        verdict=verdict,
        facts=facts,
    )


def of_family(evidence: str, method: str, baseline: str, expected: str, also: str) -> Answer:
    """A method of the anchor family against another, from the studies; the difference in evaluation mode decides."""
    by_mode = [family_contrast(method, baseline, rule) for rule in (None, TRANSDUCTIVE)]
    return Answer(
        *map(signed, by_mode),
        evidence=file_of(evidence),
        tests=(Test(by_mode[0] if expected == "better" else opposite(by_mode[0])),),
        facts={"also": signed(family_contrast(method, also))} if also else {},
    )


def in_study(name: str, variant: str, baseline: str, expected: str, **chosen: Any) -> Answer | None:
    """A variant of a named study against another, in every setting that has both; None where nothing of it is measured."""
    found = studied.differences(name, variant, baseline, **chosen)
    shown = [
        by_setting([(setting if len(found) > 1 else "", by[mode]) for setting, by in found.items() if mode in by])
        for mode in MODES
    ]
    tests = [by[MODES[0]] for by in found.values()]
    tests = tests if expected == "better" else list(map(opposite, tests))
    return (
        Answer(*(text or "–" for text in shown), evidence=file_of(name), tests=tuple(map(Test, tests)))
        if found
        else None
    )


def transductive(name: str, method: str, baseline: str) -> str:
    """The difference in the notes' own mode, where both methods have been scored in it."""
    try:
        return by_setting(list(contrasts(name, method, baseline, TRANSDUCTIVE))) or "–"
    except RecipeError:
        return "–"


def by_setting(found: Sequence[tuple[str, Summary]]) -> str:
    named = [(setting.replace("alpha=", "α = "), signed(difference)) for setting, difference in found]
    return "; ".join(f"{setting}: {difference}" if setting else difference for setting, difference in named)


# --- answers: source note 000 ----------------------------------------------------------------------------------------------


@lru_cache
def pairs_of_000(name: str = NOTE_000) -> Pairs:
    return Pairs(ROOT / file_of(name))


@answers
def cell(alpha: float, epoch: int, printed: float | None = None) -> Answer:
    """Accuracies of V4 and V5 and their difference, ours in both modes."""
    v4, v5 = noted(alpha, epoch)
    figure = f"{v4:.2f}, {v5:.2f}, {v5 - v4:+.2f}" + (f" (it says {printed:+.2f})" if printed else "")
    pairs, shown, kind = pairs_of_000(), {}, "dirichlet-overlap"
    for mode in MODES:
        difference = pairs.difference(kind, alpha, epoch, mode)
        if difference is None:
            return Answer(note=figure, verdict=NOT_MEASURED, why="no pair")
        means = [statistics.mean(pairs.accuracies(kind, alpha, epoch, mode, method)) for method in METHODS]
        shown[mode] = f"{means[0]:.1f}, {means[1]:.1f}, {signed(difference)}"
    apart = Summary(tuple(value - (v5 - v4) for value in difference.values))
    if apart.margin is None:
        why = "one pair has no interval"
    else:
        why = f"the note's difference lies {'outside' if apart.distinguishable else 'inside'} the interval"
    return Answer(*shown.values(), file_of(NOTE_000), (Test(apart, of_figure=True),), note=figure, why=why)


@answers
def everywhere() -> Answer:
    """Whether V5 is below V4 at every α, and by how much at the last epoch."""
    pairs, kind, epoch = pairs_of_000(), "dirichlet-overlap", EPOCHS[-1]
    shown, below, tests = {}, {}, []
    for mode in MODES:
        by_alpha = {alpha: pairs.difference(kind, alpha, epoch, mode) for alpha in pairs.alphas(kind)}
        found = {alpha: difference for alpha, difference in by_alpha.items() if difference is not None}
        shown[mode] = "; ".join(f"α = {alpha:g}: {signed(difference)}" for alpha, difference in found.items())
        below |= {f"{each} {mode}".replace("-", "_").replace(" ", "_"): pairs.below(each, mode) for each in KINDS}
        tests = [Test(opposite(difference)) for difference in found.values()]
    return Answer(*shown.values(), file_of(NOTE_000), tuple(tests), facts=below)


def cosines_of_000(alpha: float) -> dict[int, list[float]]:
    """By epoch, cosines of V5 at all clients that share samples."""
    found: dict[int, list[float]] = {}
    for (kind, at, _, method, epoch), entry in pairs_of_000().entries.items():
        if (kind, at, method) == ("dirichlet-overlap", alpha, "V5") and entry["cosine"]:
            found.setdefault(epoch, []).extend(entry["cosine"])
    return found


@answers
def gradients(claimed: str) -> Answer:
    """Cosines of the gradients of cross-entropy and of the contrast with the bank, by partition."""
    values: list[list[float]] = []
    evidence, (measured,) = family("bank")
    for run in measured:
        by_client = run.cosines()[CONTRASTS["V5"], "features"]
        values.append([value for trace in by_client.values() for value in trace.values()])
    cosines = Summary(tuple(map(statistics.mean, values)))
    towards = [ORTHOGONAL - abs(value) if claimed == "orthogonal" else -value for value in cosines.values]
    every, shared = [value for each in values for value in each], cosines_of_000(0.05)
    facts = {
        "negative": str(sum(value < 0 for value in every)),
        "traced": str(len(every)),
        "lowest": f"{min(every):+.2f}",
        "threshold": f"{ORTHOGONAL:g}",
        "shared": " and ".join(f"{statistics.mean(each):+.2f} after epoch {epoch}" for epoch, each in shared.items()),
        "shared_lowest": f"{min(value for each in shared.values() for value in each):+.2f}",
    }
    text = f"mean cosine {cosines:+.2f} {count(cosines)}"
    return Answer(text, evidence=file_of(evidence), tests=(Test(Summary(tuple(towards))),), facts=facts)


@answers
def catching_up(alpha: float, printed: float) -> Answer:
    """The note's own last cell against its words; ours beside it."""
    kind, (first, *_, epoch) = "dirichlet-overlap", EPOCHS
    v4, v5 = noted(alpha, epoch)
    pairs = pairs_of_000()
    gaps = {mode: [pairs.difference(kind, alpha, at, mode) for at in (first, epoch)] for mode in MODES}
    early, late = gaps["transductive"]
    assert early is not None and late is not None
    facts = {
        "own": f"{v5 - v4:+.2f}",
        "printed": f"{printed:+.2f}",
        "first": f"{early:+.1f}",
        "last": f"{late:+.1f}",
        "cosine": f"{statistics.mean(cosines_of_000(alpha)[epoch]):+.2f}",
    }
    shown = [signed(both[-1]) for both in gaps.values() if both[-1] is not None]
    verdict = REPRODUCED if v5 >= v4 else REFUTED
    return Answer(*shown, file_of(NOTE_000), verdict=verdict, facts=facts)


# --- answers: source note 001 ----------------------------------------------------------------------------------------------


@answers
def student() -> Answer:
    """Distillation and feature alignment, each alone."""
    measured = record(STUDENTS)["measured"]
    ours, teachers = ([100 * one[name]["accuracy"] for one in measured] for name in ("public images", "teacher"))
    apart = by_setting(list(contrasts(LABEL_SKEW, "fafi+aligned", "fafi")))
    return Answer(f"student: {signed(paired(ours, teachers))}; aligned: {apart}", verdict=NOT_MEASURED)


@answers
def personalised(record: str, rule: str, baseline: str) -> Answer:
    """Two rules on the same uploads, each on every client's own mix of classes: mean over clients, paired over partitions."""
    found: list[tuple[str, Summary]] = []
    by_alpha = itertools.groupby(sorted(runs(record), key=alpha_of), key=alpha_of)
    for alpha, members in by_alpha:
        means = [mean_over_clients(run.personalised) for run in members]
        found.append((f"α = {alpha:g}", paired(*([100 * each[name] for each in means] for name in (rule, baseline)))))
    return Answer(by_setting(found), evidence=file_of(record), tests=tuple(Test(difference) for _, difference in found))


def alpha_of(run: RunRecord) -> float:
    return float(run.keys["partition.alpha"])


# --- answers: source note 002 ----------------------------------------------------------------------------------------------


@lru_cache
def entropies() -> list[float]:
    """Normalised label entropy of every client in the partition of the note: CIFAR-10's label counts, α = 0.05, seed 1."""
    labels = torch.arange(10).repeat_interleave(5000)
    images = Images(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels)
    data = Dataset("labels", images, images, tuple(map(str, range(10))))
    counts = partitions.parse({"kind": "dirichlet", "clients": 5, "alpha": 0.05}).split(data, 1).counts
    return [label_entropy(torch.from_numpy(np.asarray(row))) for row in counts]


@answers
def entropy(client: int, values: Sequence[float]) -> Answer:
    """V9's λ = λ_min + H·(λ_max − λ_min)."""
    normalised, weight = entropies()[client], weights.parse("entropy")
    ours = [normalised * math.log2(10), normalised, weight.least + normalised * (weight.most - weight.least)]
    shown, figure = (" / ".join(f"{value:.4f}" for value in each) for each in (ours, values))
    test = "tests/training/alignment/test_weights.py"
    why = "computed from the partition of seed 1, to every digit (the same in `test_the_entropies_and_weights_of_source_note_002`)"
    return Answer(shown, evidence=test, verdict=REPRODUCED if shown == figure else REFUTED, note=figure, why=why)


def learned_by_client(run: RunRecord, epoch: int) -> list[float]:
    return [trace[epoch] for trace in run.trace("lambda_raw").values()]


@answers
def learned(round: int, values: Sequence[float]) -> Answer:
    """V10's λ of every client after a round, ours on partition 1; of the note's own form where that is measured."""
    form = studied.last_rows(STUDY_002, "V10").get(AS_HERE)
    evidence, ([*measured],) = family(LEARNED, epoch=round + 1)
    measured, own = measured[:1], f"one run; {form_of(evidence)}"
    if form is not None and traced(form.runs, round + 1):
        measured, evidence, own = [*form.runs], STUDY_002, plural(len(form.runs), "training seed")
    by_run = [learned_by_client(run, round + 1) for run in measured]
    ours = [statistics.mean(each) for each in zip(*by_run, strict=True)]
    most = max(abs(one - other) / other for one, other in zip(ours, values, strict=True))
    figure, shown = " ".join(f"{value:.4f}" for value in values), " ".join(f"{value:.2f}" for value in ours)
    apart = REFUTED if evidence == STUDY_002 else NOT_MEASURED
    why = f"the largest of the five differences is {percent(most)}; {own}"
    return Answer(
        shown, evidence=file_of(evidence), verdict=REPRODUCED if most <= NEAR else apart, note=figure, why=why
    )


@answers
def scored(method: str) -> Answer:
    """Accuracy of a method, and its difference to V7; on the note's partition and with its code's habits where that is measured."""
    variant = {LEARNED: "V10"}.get(method, method.upper())
    if (row := studied.last_rows(STUDY_002, variant).get(ALL_HABITS)) is not None:
        by_seed = [Summary(tuple(row.accuracies[mode].values())) for mode in MODES]
        from_noted = row.from_noted
        assert from_noted is not None, "the note has a figure for it"
        return Answer(
            *(f"{accuracies:.1f} {count(accuracies)}" for accuracies in by_seed),
            evidence=file_of(STUDY_002),
            tests=(Test(from_noted.difference, of_figure=True),),
            why="on its partition, in its mode and with its code's habits; n counts training seeds",
        )
    evidence, (mine,) = family(method)
    by_mode = [
        Summary(tuple(100 * run.accuracy[rule] for run in mine if rule in run.accuracy))
        for rule in ("iffi", TRANSDUCTIVE)
    ]
    against = "" if method == "v7" else signed(family_contrast(method, "v7"))
    apart = (
        "not in the note's form, mode nor partition"
        if method == LEARNED
        else "not in the note's mode nor on its partition"
    )
    apart = apart if evidence == FAMILY else "not on the note's partition"
    return Answer(
        *(f"{accuracies:.1f} {count(accuracies)}" if accuracies.values else "–" for accuracies in by_mode),
        evidence=file_of(evidence),
        verdict=NOT_MEASURED,
        facts={"against": against, "apart": apart},
    )


def table_of_learned() -> dict[int, Sequence[float]]:
    """The note's table: round → λ of every client."""
    rows = (claim.get("answer", {}) for claim in notes()["002"]["claims"].values())
    return {answer["round"]: answer["values"] for answer in rows if answer.get("kind") == "learned"}


@answers
def mean_learned() -> Answer:
    """Mean λ in the first and last row of the note's table; ours by partition."""
    table = table_of_learned()
    evidence, (mine,) = family(LEARNED, epoch=max(table) + 1)
    first, end = (statistics.mean(table[at]) for at in (min(table), max(table)))
    ours = [
        Summary(tuple(statistics.mean(learned_by_client(run, at + 1)) for run in mine))
        for at in (min(table), max(table))
    ]
    facts = {"first": f"{first:.2f}", "last": f"{end:.2f}", "form": form_of(evidence)}
    return Answer(
        f"{ours[0]:.1f}, then {ours[1]:.2f} {count(ours[1])}",
        evidence=file_of(evidence),
        verdict=REPRODUCED if first > 14 and round(end, 2) == 8.25 else REFUTED,
        facts=facts,
    )


@answers
def steady(settled: int, within: float) -> Answer:
    """Whether λ keeps its value from some round on, in the note's own table."""
    rows = [values for at, values in table_of_learned().items() if at >= settled]
    own = max(statistics.pstdev(each) / statistics.mean(each) for each in zip(*rows, strict=True))
    evidence, ((run, *_),) = family(LEARNED, epoch=max(table_of_learned()) + 1)
    traces = [[value for at, value in trace.items() if at >= 10] for trace in run.trace("lambda_raw").values()]
    ours = max(statistics.pstdev(each) / statistics.mean(each) for each in traces)
    verdict = REFUTED if own <= within else REPRODUCED
    return Answer(
        f"{percent(ours, 1)} (n = 1)", evidence=file_of(evidence), verdict=verdict, facts={"own": percent(own, 1)}
    )


@answers
def over_aligned() -> Answer:
    """Loss of alignment at the end, V10 against V7: lower is more aligned."""
    evidence, measured = family(LEARNED, "v7")
    v10, v7 = (Summary(tuple(last(run, "align") for run in each)) for each in measured)
    difference = paired(v10.values, v7.values)
    return Answer(
        f"{difference:+.3f} {count(difference)}",
        evidence=file_of(evidence),
        tests=(Test(opposite(difference)),),
        facts={"against": signed(family_contrast(LEARNED, "v7"))},
    )


@answers
def at_rest(within: float) -> Answer:
    """λ over L_base/L_align after the last epoch."""
    ratios = []
    evidence, (measured,) = family(LEARNED)
    for run in measured:
        weight, align, base = (run.trace(quantity) for quantity in ("lambda_raw", "align", "base"))
        end = max(next(iter(weight.values())))
        ratios.append([weight[client][end] * align[client][end] / base[client][end] for client in weight])
    every = [value for each in ratios for value in each]
    mean = Summary(tuple(map(statistics.mean, ratios)))
    verdict = REFUTED if all(abs(value - 1) <= within for value in every) else "undecidable"
    text = f"{mean:.3f} {count(mean)}, {min(every):.2f} to {max(every):.2f} over {len(every)} clients"
    return Answer(text, evidence=file_of(evidence), verdict=verdict)


# --- answers: source note 003 ----------------------------------------------------------------------------------------------


@answers
def merged(one: str, other: str) -> Answer:
    """Differences α by α; that with the most pairs decides."""
    cells = record(MERGENET)["cells"]
    differences = {}
    for alpha in sorted({each["alpha"] for each in cells}):
        both = mergenet.pairs_of(cells, one, other, alpha)
        if both:
            differences[alpha] = paired(
                *([100 * each["accuracy"] for each in side] for side in zip(*both, strict=True))
            )
    text = "; ".join(f"α = {alpha:g}: {signed(difference)}" for alpha, difference in differences.items())
    most = max(differences.values(), key=lambda difference: len(difference.values))
    return Answer(text, evidence=file_of(MERGENET), tests=(Test(most),))


@answers
def seconds() -> Answer:
    cells = [each for each in record(MERGENET)["cells"] if each["alpha"] == 0.5]
    means = {
        name: statistics.mean(each["seconds"] for each in cells if each["method"] == name)
        for name in ("fused", "single")
    }
    return Answer(
        f"{means['fused']:.0f} s, on one machine {means['single']:.0f} s",
        evidence=file_of(MERGENET),
        verdict=NOT_MEASURED,
    )


# --- answers: source note 004 ----------------------------------------------------------------------------------------------


@answers
def attenuated(round: int, values: Sequence[float]) -> Answer:
    """A row of the note's table: its arithmetic, and V12 on CIFAR-10 after as many epochs."""
    raw, s, effective, accuracy = values
    evidence, texts = (
        EXPLOSION_STUDY,
        [
            at_client_3(setting, run, round + 1)
            for setting, row in studied.last_rows(EXPLOSION_STUDY, "V12").items()
            for run in row.runs[:1]
        ],
    )
    if not any(texts):
        evidence, ((run, *_),) = family("v12")
        texts = [at_client_3("CIFAR-10", run, round + 1)]
    text = "; ".join(filter(None, texts))
    exact = abs(raw * s - effective) < 0.01 and math.isclose(schedules.parse("linear").factor((round + 1) / 50, 1.0), s)
    why = f"no run on SVHN; its arithmetic {'holds' if exact else 'does not hold'}"
    return Answer(
        text,
        evidence=file_of(evidence),
        verdict=NOT_MEASURED,
        why=why,
        note=f"{raw:,.2f} × {s:.3f} = {effective:,.2f}, {100 * accuracy:.1f} %",
    )


def at_client_3(data: str, run: RunRecord, epoch: int) -> str:
    """Raw λ → raw·s of client 3 and the accuracy after an epoch; empty where that is not traced."""
    clients = list(run.trace("lambda_raw"))
    shown = (
        [run.trace(quantity)[clients[3]].get(epoch) for quantity in ("lambda_raw", "lambda_effective")]
        if clients[3:]
        else []
    )
    if not shown or None in shown:
        return ""
    text = f"{data}: {shown[0]:.2f} → {shown[1]:.2f}"
    snapshot = run.curves["iffi"].get(epoch)
    return text if snapshot is None else f"{text}, {100 * snapshot:.1f} %"


def fallen(run: RunRecord) -> float:
    """Points from the best snapshot to the last."""
    curve = run.curves["iffi"]
    return 100 * (max(curve.values()) - curve[max(curve)])


def grown(run: RunRecord, quantity: str) -> list[float]:
    """Of every client, the logarithm of the last value over the first."""
    return [math.log(trace[max(trace)] / trace[min(trace)]) for trace in run.trace(quantity).values()]


@answers
def skewed(record: str, most: float, least: float) -> Answer:
    """V12 on clients of much and of no skew: how far λ grows, and how far accuracy falls."""

    def by_seed(alpha: float) -> list[RunRecord]:
        return sorted((run for run in runs(record) if alpha_of(run) == alpha), key=lambda run: run.partition_seed)

    def largest(run: RunRecord) -> float:
        return math.log10(max(trace[max(trace)] for trace in run.trace("lambda_raw").values()))

    both = [by_seed(alpha) for alpha in (most, least)]
    grew, fell = (paired(*([figure(run) for run in each] for each in both)) for figure in (largest, fallen))
    without = {
        "grown": f"{10 ** statistics.mean(map(largest, both[1])):,.0f}",
        "free": f"{statistics.mean(map(fallen, both[1])):.0f}",
    }
    facts = {"fell": signed(fell), **without}
    return Answer(f"log₁₀ λ: {signed(grew)}", evidence=file_of(record), tests=(Test(grew),), facts=facts)


@answers
def exploded(figure: str) -> Answer:
    """V12 against the same with the guard of V13: in its code's form on CIFAR-10, once three partitions are measured, and on digits."""
    rows = [studied.last_rows(EXPLOSION_STUDY, name).get("CIFAR-10") for name in ("V12", GUARDED)]
    both = studied.shared(*(row and studied.Variant(EXPLOSION_STUDY, row) for row in rows))
    digits = _exploded(figure, EXPLOSION, runs_of(EXPLOSION, "v12"), runs_of(EXPLOSION, "v13"))
    facts = {"on": "on digits", "where": "on digits, in a setting chosen to show it", "digits": ""}
    if len(both[0]) < PAIRS:
        return replace(digits, facts={**digits.facts, **facts})
    facts |= {"on": "on CIFAR-10", "where": "on CIFAR-10, in the form and at the pace of the note's code"}
    facts["digits"] = f"; on digits, in a setting chosen to show it: {digits.evaluation}"
    answer = _exploded(figure, EXPLOSION_STUDY, *both)
    return replace(answer, facts={**answer.facts, **facts})


def _exploded(figure: str, evidence: str, v12: Sequence[RunRecord], v13: Sequence[RunRecord]) -> Answer:
    tests, facts = list[Summary](), dict[str, str]()
    if figure == "drop":
        difference = paired([fallen(run) for run in v12], [fallen(run) for run in v13])
        tests, text = [difference], signed(difference)
        facts["slow"] = f"{fallen(family('v12')[1][0][0]):.1f} points"
    elif figure == "variances":
        base, align = ([grown(run, quantity) for run in v12] for quantity in ("sigma_base", "sigma_align"))
        grew, shrank = (Summary(tuple(map(statistics.mean, by_run))) for by_run in (base, align))
        tests, text = [grew, opposite(shrank)], f"σ_l² {signed(grew)}, σ_a² {signed(shrank)}"
        clients = [growth for run in base for growth in run], [growth for run in align for growth in run]
        facts = {
            "grew": f"{sum(growth > 0 for growth in clients[0])} of {len(clients[0])}",
            "shrank": f"{sum(growth < 0 for growth in clients[1])} of {len(clients[1])}",
            "share": percent(shrank.mean / (shrank.mean - grew.mean)),
        }
    elif figure == "clients":
        difference = paired(
            *([100 * statistics.mean(run.local_accuracy.values()) for run in each] for each in (v12, v13))
        )
        tests, text = [opposite(difference)], signed(difference)
        most = 0.0
        for run in v12:
            weight, align_, base_ = (run.trace(quantity) for quantity in ("lambda_effective", "align", "base"))
            most = max(
                most,
                *(
                    weight[client][at] * align_[client][at] / base_[client][at]
                    for client in weight
                    for at in weight[client]
                ),
            )
        facts["most"] = f"{most:.1f} times"
    else:
        difference = paired(*([100 * run.accuracy["iffi"] for run in each] for each in (v13, v12)))
        tests, text = [difference], signed(difference)
        highest = [
            max(trace[max(trace)] for run in each for trace in run.trace("lambda_raw").values()) for each in (v13, v12)
        ]
        facts |= {"guarded": f"{highest[0]:.0f}", "free": f"{highest[1]:.2g}"}
    return Answer(text, evidence=file_of(evidence), tests=tuple(map(Test, tests)), facts=facts)
