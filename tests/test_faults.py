"""check-weights finds faults that quantization hides: benchmarks/validity/weights.py, on small models."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from harness.theory.decoder import dense_like

WEIGHTS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parent.parent / "benchmarks" / "validity" / "weights.py")
)
FAULTS = {fault.name: fault for fault in WEIGHTS["faults"](WEIGHTS["SHAPE"])}
# Lost in what arithmetic explains on weights of this kind, whose biases are small: found in a file alone.
NOT_IN_KERNELS = {"biases dropped", "norm eps 100 times"}
# Not in the compared values and settings, so found by the logits alone.
NOT_IN_FILE = {"no rope", "window ignored"}


def bench(folder: Path, layers: int, seed: int = 1) -> Any:
    return WEIGHTS["Bench"](folder, dense_like(WEIGHTS["SHAPE"], layers=layers), seed)


@pytest.mark.first_tier
def test_at_four_bits_a_scrambled_layer_shows_against_the_files_own_weights_alone(
    llamacpp_interpreter, hf_interpreter, tmp_path
):
    made = bench(tmp_path, 4)
    fault = next(f for f in WEIGHTS["faults"](made.shape) if f.name == "q/k permuted, last layer")
    says = made.verdicts("q4_0", fault)
    assert (says["before"], says["kernels"], says["file"]) == (False, True, True)
    sound = made.verdicts("q4_0")
    assert (sound["before"], sound["kernels"], sound["file"]) == (False, False, False)
    assert sound["error"] < 0.06 < 0.1 < says["error"]


@pytest.mark.slow("eighteen models in a real stack")
@pytest.mark.parametrize(
    "quant",
    [
        each
        if each in ("q4_0", "nf4")
        else pytest.param(each, marks=pytest.mark.long("three to seven minutes beside other tests"))
        for each in WEIGHTS["QUANTS"]
    ],
)
def test_every_fault_of_the_audit_is_found_in_the_kernels_or_in_the_file(
    quant, llamacpp_interpreter, hf_interpreter, bnb_interpreter, gptqm_interpreter, tmp_path
):
    made = bench(tmp_path, 4)
    found = {fault.name: made.verdicts(quant, fault) for fault in WEIGHTS["faults"](made.shape)}
    assert found.keys() == FAULTS.keys()
    assert {name for name, says in found.items() if not says["kernels"]} == NOT_IN_KERNELS
    if quant != "gptq":  # whose file is not compared
        assert {name for name, says in found.items() if not says["file"]} == NOT_IN_FILE


@pytest.mark.slow("seventy models in real stacks")
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_sound_variant_of_the_demos_matrix_is_called_wrong(
    seed, llamacpp_interpreter, hf_interpreter, bnb_interpreter, tmp_path
):
    made = bench(tmp_path, 4, seed)
    for quant in WEIGHTS["DEMO"]:
        says = made.verdicts(quant)
        assert (quant, says["kernels"], says["file"]) == (quant, False, False)
