import dataclasses
import textwrap
from pathlib import Path
from typing import Literal

import pytest

from training import early_answers
from training.help import GROUPS, explanations, group_of, help_text, sorted_fields, with_default
from training.options import SharedOptions

RECIPES = [
    name
    for name in early_answers.programs()
    if issubclass(early_answers.options_of(early_answers.RECIPES / f"{name}.py"), SharedOptions)
]


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of a recipe of one's own."""

    wings: int = 2
    """How many wings it has."""
    hidden_dim: int = 7
    """Its width."""
    colour: Literal["red", "green"] = "red"
    """Of the wings (default: that of the day)."""
    epochs: int = 3
    """How often it flies."""


@pytest.fixture
def shown(monkeypatch):
    def shown(columns=300, **changes):
        monkeypatch.setenv("COLUMNS", str(columns))
        return help_text(Options, Options(**changes), "fly")

    return shown


def group(text, name):
    return text.split(f"\n{name}:\n")[1].split("\n\n")[0]


class TestGroups:
    def test_what_no_group_names_is_the_recipes_own_and_comes_first(self, shown):
        text = shown()
        assert "--wings N" in group(text, "this recipe")
        places = [text.index(f"\n{name}:\n") for name in ("this recipe", *GROUPS)]
        assert places == sorted(places)

    def test_within_a_group_the_recipes_own_options_come_first(self, shown):
        lines = group(shown(), "training").splitlines()
        assert lines[0].split()[0] == "--epochs"
        assert "--hidden-dim" in group(shown(), "model")

    @pytest.mark.parametrize("name", RECIPES)
    def test_every_option_of_a_recipe_has_a_group(self, name):
        kind = early_answers.options_of(early_answers.RECIPES / f"{name}.py")
        nowhere = [f.name for f in sorted_fields(kind) if group_of(kind, f.name) == "this recipe"]
        assert not nowhere

    def test_no_option_stands_in_two(self):
        names = [name for names in GROUPS.values() for name in names]
        assert len(names) == len(set(names))


class TestDefaults:
    @pytest.mark.parametrize(
        ("text", "value", "expected"),
        [
            ("Steps.", 3, "Steps (default: 3)."),
            ("Rate.", 1e-3, "Rate (default: 0.001)."),
            ("Rate (default: 3e-3).", 0.5, "Rate (default: 3e-3)."),
            ("Says little.", False, "Says little."),
            ("Anything.", None, "Anything."),
            ("Share.", 0.0, "Share (default: 0)."),
        ],
    )
    def test_said_once(self, text, value, expected):
        assert with_default(text, value) == expected

    def test_those_of_the_instance_are_shown(self, shown):
        assert "How many wings it has (default: 5)." in " ".join(shown(wings=5).split())
        assert "--colour {red,green}" in shown() and shown().count("(default: red)") == 0


def test_it_fits_the_terminal_and_at_most_100_columns(shown):
    for columns, widest in ((300, 100), (80, 80), (10, 60)):
        assert max(map(len, shown(columns).splitlines())) <= widest


def test_explanations_are_those_of_the_class_and_of_its_parents():
    found = explanations(Options)
    assert found["epochs"] == "How often it flies."
    assert found["quiet"] == "Prints warnings and the results only."


class TestOptionsOfASource:
    def write(self, folder: Path, text: str) -> Path:
        path = folder / "program.py"
        path.write_text(textwrap.dedent(text))
        return path

    def test_only_what_the_fields_name_is_imported(self, tmp_path):
        path = self.write(
            tmp_path,
            '''
            """A program."""
            import dataclasses
            import no_such_module
            from no_such_module import something
            from pathlib import Path

            LENGTH = 3
            LOADED = no_such_module.load()

            @dataclasses.dataclass
            class Options:
                """Its options."""

                path: Path = Path("x")
                """A path."""
                length: int = LENGTH
                """A length."""

                def problems(self):
                    return something(self)
            ''',
        )
        kind = early_answers.options_of(path)
        assert kind() == kind(Path("x"), 3)
        assert help_text(kind, kind(), "program").startswith(
            "usage: program [options]\n\nA program."
        )

    def test_a_class_that_takes_more_is_left_to_the_program(self, tmp_path):
        path = self.write(
            tmp_path,
            """
            def made(): return 3
            class Options:
                length: int = made()
            """,
        )
        assert early_answers.options_of(path) is None
        assert early_answers.options_of(self.write(tmp_path, "x = 1")) is None

    @pytest.mark.parametrize("name", list(early_answers.programs()))
    def test_the_fields_are_those_of_the_program(self, name):
        import importlib

        real = importlib.import_module(f"recipes.{name}").Options
        early = early_answers.options_of(early_answers.RECIPES / f"{name}.py")
        assert explanations(early) == explanations(real)
        for ours, theirs in zip(dataclasses.fields(early), dataclasses.fields(real), strict=True):
            assert (ours.name, ours.type, ours.default) == (
                theirs.name,
                theirs.type,
                theirs.default,
            )
