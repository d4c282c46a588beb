"""What a server, and not the engine in it, may have made of a measurement over HTTP. Pure."""

from __future__ import annotations

from harness.analysis import speculation
from harness.analysis.warnings import Flag, Warnings
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.measured import Counters, Surface
from harness.records.parts import Served

CLIENT_SHARE = 0.5  # of the time of an answer; a client that works for longer is what limits the speed
LATE_SHARE = 0.05  # of the events of a stream
HALVES = 0.02  # of the tokens: some texts end in half a letter, which waits for the next token


def faults(record: Record) -> list[Flag]:
    """Reasons why a request's answer is not that of one decode, token by token; empty without a server."""
    if not loaded_of(record).get("served"):
        return []
    counters, found, tokens = done_of(record)["counters"], [], record["tokens"]
    if not_streamed(record):
        found.append(Warnings.not_streamed.flag(tokens=tokens))
    drafted = counters.get("drafted_tokens") or 0
    if drafted and not speculation.requested(record):
        accepted = counters.get("accepted_tokens") or 0
        found.append(Warnings.speculated.flag(drafted=drafted, accepted=accepted))
    if drafted and record["workload"]["kind"] == "depth":
        found.append(Warnings.guessed_at_depth.flag(drafted=drafted))
    if others := max(0, counters.get("others_tokens") or 0):
        found.append(Warnings.other_requests.flag(others=others))
    if _each_is_timed(record) and (numbers := _in_pieces(record)):
        found.append(Warnings.tokens_at_once.flag(**numbers))
    if late := read_late(record):
        found.append(Warnings.read_late.flag(late=late, pieces=counters["pieces"]))
    elapsed, delay = counters.get("elapsed_ms"), client_ms_per_token(record)
    if elapsed and delay is not None and (share := delay * tokens / elapsed) > CLIENT_SHARE:
        found.append(Warnings.client_too_slow.flag(share=share, delay=delay))
    return found


def _each_is_timed(record: Record) -> bool:
    """Whether its figures are of single tokens, and not of the averages of an answer."""
    if tables.name_of(record):
        return record["workload"]["kind"] == "depth"
    return speculation.row(record) is None


def _in_pieces(record: Record) -> dict[str, int]:
    """The numbers of a warning that tokens came together; empty: they came one by one."""
    counters = done_of(record)["counters"]
    tokens = counters.get("answer_tokens", record["tokens"])
    if tokens - (pieces := counters.get("pieces", tokens)) <= HALVES * tokens:
        return {}
    return {"tokens": tokens, "pieces": pieces, "largest": max(counters.get("largest_piece", 1), 2)}


def not_streamed(record: Record) -> bool:
    return record["tokens"] > 1 and done_of(record).get("counters", Counters()).get("pieces", 2) <= 1


def times_are_unknown(record: Record) -> bool:
    """Whether the times of its tokens are not those at which the server made them."""
    return not_streamed(record) or read_late(record) > 0


def read_late(record: Record) -> int:
    """Events of the server that had arrived before they were read, so that their times are not the server's;
    0 for few. Guesses that were right come together with the token before them."""
    counters = done_of(record).get("counters", Counters())
    pieces = counters.get("pieces", 0) - counters.get("accepted_tokens", 0)
    late = pieces - counters.get("awaited_pieces", pieces)
    return late if late > LATE_SHARE * pieces else 0


def client_ms_per_token(record: Record) -> float | None:
    """The harness's own delay: the time in which its client did not wait for the server; null without one."""
    counters = done_of(record)["counters"]
    elapsed, waited = counters.get("elapsed_ms"), counters.get("waited_ms")
    if elapsed is None or waited is None or not record["tokens"]:
        return None
    return max(0.0, elapsed - waited) / record["tokens"]


def notes(record: Record) -> list[Flag]:
    """Another prompt than the one that was sent, tokens that came together, and the server's time per token
    beside the client's."""
    if not (served := loaded_of(record).get("served")) or not done_of(record):
        return []
    counters, found = done_of(record)["counters"], _reuse(record)
    requested, counted = record["workload"]["prompt_tokens"], counters.get("prompt_tokens")
    if counted is None and tables.name_of(record) in (None, "users"):  # others do not go on without it
        found.append(Warnings.prompt_not_counted.flag())
    if counted is not None and counted != requested:
        why = ": its chat template adds to them" if served["template"] else ""
        found.append(Warnings.other_prompt.flag(counted=counted, requested=requested, why=why))
    if not _each_is_timed(record) and (numbers := _in_pieces(record)):
        found.append(Warnings.tokens_in_pieces.flag(**numbers))
    if (client := client_ms_per_token(record)) is not None and record["tokens"] > 1:
        found.append(_times(record, served, client))
    return found


def _reuse(record: Record) -> list[Flag]:
    """What the server says that it reused of a conversation; empty for other workloads."""
    workload = record["workload"]
    if workload.get("turns", 0) < 2 or True not in workload.get("prefix_cache", []):
        return []
    counted = (done_of(record).get("surface") or Surface()).get("counted", [])
    later = [each for each in counted if each["reuse"] and each.get("depth")]
    if not later:
        return [Warnings.reuse_unknown.flag()]
    held = sum(each["depth"] for each in later)
    reused = held + sum(each["fed"] - each["evaluated"] for each in later)
    return [Warnings.turns_reused.flag(reused=reused, held=held)]


def _times(record: Record, served: Served, client: float) -> Flag:
    steps, timing = record["tokens"] - 1, record["timing"]
    here = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 / steps
    theirs = done_of(record)["counters"].get("stack_decode_ms")
    own = "" if theirs is None else f", {theirs / steps:.3f} by its own clock"
    return Warnings.served_by.flag(server=served["api"], here=here, own=own, client=client)
