"""`kind: checked`: one variant's logits against the 16-bit reference of its model."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.common import Common, Own
from harness.records.parts import StackFacts
from harness.records.values import Above0, Count, From0, Pairs, Positive, Text


class ReferenceAsked(TypedDict):
    """The one available; `lock`: the hash of its versions."""

    stack: Text
    variant: Text
    lock: NotRequired[Any]
    weights: NotRequired[Any]


class CheckAsked(TypedDict):
    """A check with the same `asked` and `content_key` is not repeated unless it failed: then by
    `run --check-weights`, and by a run with `--retry-failed`."""

    windows: Pairs
    """positions from 0, [first, end): the last 25 of the prompt, and 25 up to n = 300, 2,100, twice that
    and so on, and the workload's last"""
    seconds: Above0
    """its time limit"""
    reference: ReferenceAsked | None
    """null without one"""
    own: NotRequired[Any]
    """what identifies the comparison with the variant's own weights; null for one not quantized; missing in
    older records"""


class Reference(TypedDict):
    """A reference that has run."""

    name: Text
    why: Text
    """this precision, or not transformers"""
    stack: NotRequired[Any]
    options: NotRequired[Any]
    weights: NotRequired[Any]
    unpacked: NotRequired[Any]
    """whether it has the variant's own weights, unpacked or dequantized"""
    environment: NotRequired[Any]
    versions: NotRequired[Any]
    seconds: NotRequired[Any]
    file: NotRequired[Any]
    """that it was read from: name, and hash of its description"""


class Depth(TypedDict):
    """A window; errors are null where logits are not finite."""

    n: Positive
    """its last position, from 1"""
    positions: Positive
    not_finite: Count
    """positions with logits that are not finite"""
    reference_not_finite: Count
    """the same of the reference, or all 0"""
    relative_error: From0 | None
    """length of the difference over the reference's, mean over positions"""
    relative_error_max: From0 | None
    scale: NotRequired[From0 | None]
    """norm of the logits over the reference's, mean over positions; missing in older records"""
    top1_agreement: From0 | None
    kl_nats: From0 | None
    near_ties: Count | None
    """positions where another token comes first and the reference's first two are within 0.001 of its
    spread"""


class Experts(TypedDict):
    """For a mixture: the reference's routers chose the variant's experts."""

    experts: Positive
    """in a layer"""
    used: Positive
    """by a token, as the reference has it"""
    chosen: Positive
    """the same, of the variant: if it differs, the reference chose its own"""
    choices: Count
    """compared, one for each token and layer"""
    others: Count
    """of these: other experts than the reference's own choice"""
    gap: From0
    """root mean square over the choices: by how much the reference's highest score of an expert that was left
    exceeds its lowest of one chosen (0 where they are its own choice), over sqrt(2) and the scores' spread"""


class OwnWeights(TypedDict):
    """A quantized variant against its own weights, dequantized and run in float32."""

    settings: list[Text]
    """settings of the file that differ from those of the 16-bit weights, a sentence each"""
    values: NotRequired[Any]
    """the file against the 16-bit weights: the worst `matrices`, by their worst row, and `vectors`, with
    their relative errors, and names that are `missing`; null without 16-bit weights"""
    reference: Reference
    depths: list[Depth]
    experts: NotRequired[Experts]
    """of a mixture"""


class Check(TypedDict):
    asked: CheckAsked
    speaks_for: list[Text]
    """content keys of the cells of this model and variant, of all workloads"""
    unchecked: NotRequired[Text]
    """why there is no reference; else missing. If the reference failed, see `outcome` and `reason`"""
    reference: NotRequired[Reference]
    left_out: NotRequired[Pairs]
    """windows skipped for the time limit"""
    depths: NotRequired[list[Depth]]
    experts: NotRequired[Experts]
    """of a mixture; missing where its stack cannot tell them, and in older records"""
    ran: NotRequired[StackFacts | None]
    """facts of the variant's job that the verdict reads: kernels, options"""
    own: NotRequired[OwnWeights]
    """of a quantized variant"""
    own_failure: NotRequired[Text]
    """why that comparison failed; the verdict is from the 16-bit reference alone"""
    versions: NotRequired[Any]
    """of the variant's job"""
    seconds: NotRequired[Any]


class OnlyChecked(TypedDict):
    """Keys that no other kind has."""

    check: Check


class Checked(Common, Own, OnlyChecked):
    """A check of weights: no series, and the keys of a measured record up to `conditions`."""


def checked_error(record: Checked) -> str | None:
    """A completed check's missing part, as a clause: each depth needs an error or non-finite values."""
    if record["outcome"] != "ok":
        return None
    check = record["check"]
    if not check.get("depths") or "reference" not in check:
        return "check.depths and check.reference must be there where the outcome is ok"
    for index, depth in enumerate(check["depths"]):
        if depth["relative_error"] is None and not depth["not_finite"] + depth["reference_not_finite"]:
            return f"check.depths[{index}].relative_error is missing"
    return None
