"""Parts from plug-ins: by module and name, refused in one line when they cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oneround.config.load import load, parse, parse_federated, read_yaml
from oneround.config.parts import Part, Slot, slot
from oneround.errors import RecipeError

PLUGIN = '''
from oneround.fusion import EnsembleRule, rules
from oneround.models.inference import plus

@rules.register("loudest")
class Loudest(EnsembleRule):
    """The largest logit wins."""
    gain: float = 2.0
    def add(self, totals, output):
        return {"top": output.logits if totals is None else totals["top"].maximum(output.logits)}
    def scores(self, totals):
        return self.gain * totals["top"]
'''


def test_a_part_from_outside_by_module_and_name(here: Path) -> None:
    (here / "my_rules.py").write_text(PLUGIN)
    recipe = load("fafi", [("fusion", ["my_rules:Loudest", "iffi"])])
    assert [part.kind for part in recipe.fusion] == ["loudest", "iffi"]
    assert recipe.local.plugins == ["my_rules"]
    again = parse(read_yaml(recipe.to_yaml(), "again"))
    assert again == recipe
    assert "my_rules" not in str(recipe.plain())
    del slot("fusion").kinds["loudest"]
    del sys.modules["my_rules"]


def test_a_plugin_that_is_not_there_is_named(here: Path) -> None:
    with pytest.raises(RecipeError, match="no_such_module"):
        load("fafi", [("local.plugins", ["no_such_module"])])
    with pytest.raises(RecipeError, match="no registered part named Nothing"):
        load("fafi", [("fusion", ["oneround.errors:Nothing"])])


def test_a_part_from_outside_does_not_hide_a_mistake_in_the_list_of_plugins(here: Path) -> None:
    (here / "my_other_rules.py").write_text(PLUGIN.replace("loudest", "loud"))
    with pytest.raises(RecipeError, match=r"local\.plugins\.0 = 3: must be text"):
        load("fafi", [("fusion", ["my_other_rules:Loudest"]), ("local.plugins", [3])])
    del slot("fusion").kinds["loud"]
    del sys.modules["my_other_rules"]


def test_a_class_with_a_colon_in_its_name_is_no_plugin() -> None:
    classes = ["lung:left", "lung:right"]
    assert load("fafi", [("data", {"kind": "sites", "classes": classes})]).plain()["data"]["classes"] == classes


BROKEN_PLUGINS = {
    "syntax": ("\ndef (:\n", "2: SyntaxError: "),
    "raises": ("x = 1\n\nprint(x / 0)\n", "3: ZeroDivisionError: division by zero"),
    "needs": ("import no_such_library\n", "1: ModuleNotFoundError: No module named 'no_such_library'"),
    "older": (
        "from oneround.learning.weights import Weight, weights\n",
        "1: ModuleNotFoundError: No module named 'oneround.learning'; terms are in oneround.training, weights, schedules, guards and "
        "anchors in oneround.training.alignment",
    ),
    "clash": (
        "from oneround.fusion import EnsembleRule, rules\n@rules.register('iffi')\nclass Iffi(EnsembleRule): ...\n",
        "2: ValueError: fusion kind 'iffi' is already registered",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PLUGINS)
def test_a_plugin_that_fails_is_one_line_with_its_place(case: str, here: Path) -> None:
    text, words = BROKEN_PLUGINS[case]
    (here / f"broken_{case}.py").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load("fafi", [("local.plugins", [f"broken_{case}"])])
    assert f"'broken_{case}' cannot be imported: {here}/broken_{case}.py:{words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broadcast_imports_nothing(here: Path) -> None:
    (here / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    raw = load("fafi").plain()
    raw["fusion"] = [{"kind": "evil:Rule"}]
    with pytest.raises(RecipeError, match="unknown fusion 'evil:Rule'"):
        parse_federated(raw)
    assert not (here / "ran").exists()


@pytest.mark.parametrize("name", ["needs_sums", "needs_counts", "reveals", "continues", "between_rounds"])
def test_a_plugin_that_declares_what_is_not_read_any_more_is_refused(name: str) -> None:
    slot: Slot[Part] = Slot("test of old declarations", Part)
    old = type("Old", (Part,), {name: property(lambda self: True), "__module__": __name__})
    with pytest.raises(TypeError, match=rf"Old\.{name}: parts no longer declare that; "):
        slot.register("old")(old)
