"""`kind: checked`: one variant's logits against the 16-bit reference of its model."""

from typing import Any

from pydantic import with_config
from typing_extensions import NotRequired, TypedDict

from harness.results.kinds.common import Common, Own
from harness.results.kinds.parts import DESCRIBED, StackFacts
from harness.results.kinds.values import Above0, Count, From0, Pairs, Positive, Text


@with_config(DESCRIBED)
class ReferenceAsked(TypedDict):
    """The one available, with the hash of its `lock` and its `weights`."""

    stack: Text
    variant: Text


@with_config(DESCRIBED)
class CheckAsked(TypedDict):
    """A check with the same `asked` and `content_key` is not repeated unless it failed: then by
    `check-weights`, and by a run with `--retry-failed`."""

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


@with_config(DESCRIBED)
class Reference(TypedDict):
    """Also its `options`, `weights`, `environment`, `versions`, `seconds`."""

    name: Text
    why: Text
    """this precision, or not transformers"""
    unpacked: NotRequired[Any]
    """whether it has the variant's own weights, unpacked or dequantized"""


@with_config(DESCRIBED)
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


@with_config(DESCRIBED)
class Experts(TypedDict):
    """Of a mixture: the reference's routers chose the experts that the variant had chosen."""

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


@with_config(DESCRIBED)
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


@with_config(DESCRIBED)
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
    unfused: NotRequired[Any]
    """depths of fused layers against the unfused"""
    unfused_failure: NotRequired[Any]
    versions: NotRequired[Any]
    """of the variant's job"""
    seconds: NotRequired[Any]


@with_config(DESCRIBED)
class OnlyChecked(TypedDict):
    """Keys that no other kind has."""

    check: Check


@with_config(DESCRIBED)
class Checked(Common, Own, OnlyChecked):
    """A check of weights. It has no series, and the keys of a measured record up to `conditions`."""


def error(record: Checked) -> str | None:
    """What a check that came to its end lacks, as a clause: a depth has an error, or what is no number."""
    if record["outcome"] != "ok":
        return None
    check = record["check"]
    if not check.get("depths") or "reference" not in check:
        return "check.depths and check.reference must be there where the outcome is ok"
    for index, depth in enumerate(check["depths"]):
        if depth["relative_error"] is None and not depth["not_finite"] + depth["reference_not_finite"]:
            return f"check.depths[{index}].relative_error is missing"
    return None
