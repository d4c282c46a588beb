"""Names of finetunes and variants, as the hub and Ollama have them: the shape of the base, or a refusal."""

import re

import pytest
from csv_tables import of_each, rows

from harness.theory import decoder
from harness.theory.base_shapes import understood
from harness.theory.known_models import Known
from harness.theory.names import NotUnderstood

KNOWN = Known()
NAMES = rows("hub_names")  # a name, and the known one of its shape; empty: none is known
SIZE = re.compile(r"(?<![\d.aex])(\d+(?:\.\d+)?)b(?!\w|-\d+e)")  # of all, not of an expert or those active


def stated(name: str) -> float | None:
    """The largest size that a name states, in parameters."""
    return max((float(size) * 1e9 for size in SIZE.findall(name.lower())), default=None)


@of_each(("typed", "shape"), [row for row in NAMES if row[1]])
def test_a_name_of_the_hub_or_ollama_stands_for_its_shape(typed, shape):
    found = understood(typed, KNOWN)
    assert found.name in (shape, f"{shape}-instruct", f"{shape}-base")
    parameters = decoder.parameters(found.made)
    assert parameters == decoder.parameters(KNOWN[shape])
    if (size := stated(typed)) and size != stated(shape):
        assert abs(size / parameters - 1) < 0.12


@of_each("typed", [typed for typed, shape in NAMES if not shape])
def test_a_name_of_another_shape_is_a_sentence(typed):
    with pytest.raises(NotUnderstood) as refused:
        understood(typed, KNOWN, "give its config.json or --from")
    assert len(refused.value.sentence("model", typed)) < 300


@of_each("name", [name for name in KNOWN if not name.startswith("tiny-")])
def test_words_of_a_finetune_never_lead_to_another_size(name):
    for typed in (f"someone/my-{name}-Abliterated-GGUF:Q4_K_M", f"{name}-uncensored-awq"):
        try:
            found = understood(typed, KNOWN)
        except NotUnderstood:
            continue
        assert decoder.parameters(found.made) == decoder.parameters(KNOWN[name])


@of_each("name", [name for name in KNOWN if stated(name)])
def test_another_size_of_a_known_family_is_never_taken_for_one_that_is_known(name):
    size = SIZE.search(name)
    other = f"{float(size[1]) * 1.37:.3g}b"
    with pytest.raises(NotUnderstood):
        understood(f"{name[: size.start()]}{other}{name[size.end() :]}-instruct", KNOWN)


def test_the_note_says_which_shape_was_taken_and_why():
    note = understood("hf.co/unsloth/Qwen2.5-VL-7B-Instruct-GGUF:Q4_K_M", KNOWN).note
    assert note.startswith("hf.co/unsloth/Qwen2.5-VL-7B-Instruct-GGUF:Q4_K_M: taken for qwen2.5-7b-instruct ")
    assert "7.62B parameters, 32,768 tokens of context" in note
    assert "a finetune has the shape of its base, but may have another context or vocabulary" in note
    assert "vl: the text model alone" in note
    assert "gguf q4_k_m says how weights are stored, which --quant q4_k_m sets" in note
    assert "its version is not said" in understood("OpenHermes-2.5-Mistral-7B", KNOWN).note
    assert understood("llama3.1:8b", KNOWN).note == ""


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("Qwen2.5-Coder-9B", "none of its family is known with 9b parameters; nearest: qwen2.5-7b, "),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "with 11b parameters; nearest: llama-3.2-3b"),
        ("Qwen/Qwen3-Embedding-8B", 'by its name ("embedding") it is no decoder'),
        ("google-bert/bert-base-uncased", 'by its name ("bert") it is no decoder'),
        ("someone/completely-unknown-7b", "see harness theory --list-models, or give its config.json"),
        ("qwen2.5", "did you mean qwen2.5-0.5b, "),
        ("./qwen2.5-coder-7b", "see harness theory --list-models"),
        ("x" * 10_000, "see harness theory --list-models"),
    ],
)
def test_a_refusal_names_what_is_near(typed, sentence):
    with pytest.raises(NotUnderstood) as refused:
        understood(typed, KNOWN, "give its config.json")
    assert sentence in refused.value.hint


def test_theory_and_recommend_take_a_finetunes_name_and_say_so(harness):
    typed = "unsloth/Qwen3-VL-30B-A3B-Instruct-GGUF"
    ran = harness("theory", typed, "--machine", "4090", "--quant", "q4_k_m", "--json")
    assert [row["model"] for row in ran.json] == ["qwen3-30b-a3b"]
    assert ran.err.startswith(f"harness: {typed}: taken for qwen3-30b-a3b (30.5B parameters, 40,960 ")
    ran = harness("theory", "no/such-model-7b", "--machine", "4090")
    assert (ran.code, ran.out) == (2, "")
    assert "unknown model (and no file) no/such-model-7b; see harness theory --list-models" in ran.err
    ran = harness("recommend", "deepseek-r1:14b", "--machine", "4090", "--most", "1")
    assert ran.code == 0
    assert "deepseek-r1:14b: taken for qwen2.5-14b-instruct (14.8B parameters" in ran.err
