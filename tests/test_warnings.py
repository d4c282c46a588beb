"""Every warning is raised somewhere, with the numbers that its sentence takes."""

import ast
import string
from pathlib import Path

from harness.analysis.warnings import DISTURBANCES, Warnings
from harness.machine.doctor import TABLES

HARNESS = Path(__file__).parent.parent / "harness"


def test_every_warning_is_raised_with_the_numbers_that_its_sentence_takes():
    named, numbers = set(), {}
    for text in (path.read_text() for path in HARNESS.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "Warnings." in text else ():
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


def test_a_code_is_explained_and_one_that_is_unknown_is_not(harness):
    ran = harness("explain", "page_faults", "late_second_token")
    assert ran.out.splitlines()[:3] == [
        "page_faults: {faults} while timing",
        "  effect: measured again: memory was short and pages were read from disk",
        "  next step: close programs that use memory",
    ]
    assert "late_second_token: the gap before the second token took {gap} ms" in ran.out
    assert "\n  effect: note\n" in ran.out
    ran = harness("explain", "page_fault")
    assert (ran.code, ran.out) == (2, "")
    assert "unknown code page_fault; did you mean page_faults?" in ran.err
    codes = [line.partition(":")[0] for line in harness("explain").out.splitlines() if line[0] != " "]
    assert codes == [*Warnings.__members__, *(check.code for _, table in TABLES for check in table)]
    assert harness("explain", "swap_in_use").out.splitlines()[1:] == [
        "  read from: the operating system",
        "  warning if: any",
        "  effect: pages may be read back from disk in the middle of a token",
        "  next step: close other programs, then run sudo swapoff -a",
    ]


def test_every_warning_has_a_next_step_and_a_disturbance_that_of_its_kind():
    for each in Warnings:
        assert each.next_step, each
        assert each.disturbance is None or each.next_step == DISTURBANCES[each.disturbance][1]
