"""Every warning is raised somewhere, with the numbers that its sentence takes."""

import ast
import string
from pathlib import Path

from harness.analysis.warnings import DISTURBANCES, Warnings

HARNESS = Path(__file__).parent.parent / "harness"


def test_every_warning_is_raised_with_the_numbers_that_its_sentence_takes():
    named, numbers = set(), {}
    for path in HARNESS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Name("Warnings"), name):
                    named.add(name)
                case ast.Call(ast.Attribute(ast.Attribute(ast.Name("Warnings"), name), "flag"), [], given):
                    if None not in (names := {each.arg for each in given}):
                        numbers[name] = names
    assert named >= {each.name for each in Warnings}
    for name, given in numbers.items():
        fields = {field for _, field, *_ in string.Formatter().parse(Warnings[name].cause) if field}
        assert given == fields, name


def test_every_warning_has_a_next_step_and_a_disturbance_that_of_its_kind():
    for each in Warnings:
        assert each.next_step, each
        assert each.disturbance is None or each.next_step == DISTURBANCES[each.disturbance][1]
