"""What a server, and not the engine in it, may have made of a measurement over HTTP. Pure."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from harness.analysis import speculation
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of, served_elsewhere
from harness.records.measured import Counters, Surface
from harness.records.parts import Served, StackFacts
from harness.theory.decoder import dense, parameters

CLIENT_SHARE = 0.5  # of the time of an answer; a client that works for longer is what limits the speed
LATE_SHARE = 0.05  # of the events of a stream
ALIKE = 0.02  # of parameters and vocabulary: a GGUF may leave out or add padding
IN_PIECES = 0.05  # of a rate: by how much the arrival of pieces may change it
HALVES = 0.02  # of the tokens: some texts end in half a letter, which waits for the next token
FEWEST = 32  # tokens of an answer that its model ended: noise of 5% a token is 1% of their rate
LOAD_MS = 100.0  # Ollama's load_duration of a loaded model is 5 to 60; to start its runner takes 250 and more
ON_GPU = 0.995  # of the memory of a model: Ollama's own list rounds to a percent


def faults(record: Record) -> list[Flag]:
    """Reasons why a request's answer is not that of one decode, token by token; empty without a server."""
    if not loaded_of(record).get("served"):
        return []
    counters, raised, tokens = done_of(record)["counters"], [], record["tokens"]
    if not_streamed(record):
        raised.append(Warnings.not_streamed.flag(tokens=tokens))
    drafted = counters.get("drafted_tokens") or 0
    if drafted and not speculation.requested(record):
        accepted = counters.get("accepted_tokens") or 0
        raised.append(Warnings.speculated.flag(drafted=drafted, accepted=accepted))
    if drafted and record["workload"]["kind"] == "depth":
        raised.append(Warnings.guessed_at_depth.flag(drafted=drafted))
    if others := max(0, counters.get("others_tokens") or 0):
        raised.append(Warnings.other_requests.flag(others=others))
    if _each_is_timed(record) and (numbers := _in_pieces(record)):
        raised.append(Warnings.tokens_at_once.flag(**numbers))
    load_ms = counters.get("load_ms") or 0.0
    if load_ms > LOAD_MS and tables.name_of(record) in ("turns", "users"):
        raised.append(Warnings.model_loaded_meanwhile.flag(load=load_ms))
    if late := read_late(record):
        raised.append(Warnings.read_late.flag(late=late, pieces=counters["pieces"]))
    elapsed, delay = counters.get("elapsed_ms"), client_ms_per_token(record)
    if elapsed and delay is not None and (share := delay * tokens / elapsed) > CLIENT_SHARE:
        raised.append(Warnings.client_too_slow.flag(share=share, delay=delay))
    return raised


def other_length(record: Record) -> list[Flag]:
    """The fault of an answer of another length than requested; empty where the model ended it late enough."""
    tokens, requested = record["tokens"], record["workload"]["new_tokens"]
    ended, numbers = done_of(record)["counters"].get("ended_by"), _length(record)
    if tokens > requested:
        return [Warnings.more_than_requested.flag(**numbers)]
    if ended == "length":
        return [Warnings.server_limit.flag(**numbers)]
    if ended != "stop":
        reason = f" (reason: {ended})" if ended else ""
        return [Warnings.server_stopped.flag(**numbers, reason=reason)]
    return [Warnings.answer_too_short.flag(**numbers, least=FEWEST)] if tokens < FEWEST else []


def _length(record: Record) -> dict[str, Any]:
    return {"tokens": plural(record["tokens"], "token"), "requested": record["workload"]["new_tokens"]}


def other_model(record: Record) -> list[Flag]:
    """Whether the server has another model than the config names, as far as both are known."""
    differences = [
        f"{what} {_shown(served)}, not {_shown(named)}"
        for what, served, named, off in _known_of_both(record)
        if (served != named if isinstance(named, str) else abs(served - named) > off * named)
    ]
    if not differences:
        return []
    return [Warnings.other_model.flag(**_names(record), differences=", ".join(differences))]


def _known_of_both(record: Record) -> list[tuple[str, Any, Any, float]]:
    """What is known of the server's model and of that in the config, and by how much numbers may differ: of
    their files the names, where nothing else is known."""
    loaded, weights, shape = loaded_of(record), record["model"]["weights"], record["model"].get("shape")
    header, quants = weights.get("header"), (loaded.get("quant"), weights.get("quant"))
    count = header["parameters"] if header else parameters(dense(**shape)) if shape else None
    vocabulary = shape["vocab_size"] if shape else None
    off = 0.0 if weights.get("format") == "gguf" else ALIKE
    facts: list[tuple[str, Any, Any, float]] = [
        ("type", *quants, 0.0),
        ("parameters", loaded.get("parameters"), count, off),
        ("vocabulary", loaded.get("vocab_size"), vocabulary, ALIKE),
    ]
    if header and weights.get("format") == "gguf" and quants[0] in (None, quants[1]):
        facts.append(("bytes", loaded.get("model_bytes"), header["model_bytes"], 0.0))
    known = [fact for fact in facts if None not in fact]
    served = loaded.get("served")
    files = [served and served.get("file"), weights.get("file") if weights.get("format") else None]
    if known or None in files or not PurePath(str(files[0])).is_absolute():
        return known
    theirs, ours = (PurePath(str(file)).name for file in files)
    return [("file", theirs, ours, 0.0)]


def _shown(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _names(record: Record) -> dict[str, str]:
    """The server's model and that of the config, by their names."""
    served, file = loaded_of(record).get("served"), record["model"]["weights"].get("file")
    assert served
    return {"served": served["model"], "named": PurePath(file).name if file else record["model"]["name"]}


def _each_is_timed(record: Record) -> bool:
    """Whether its figures are of single tokens, and not of the averages of an answer."""
    if tables.name_of(record):
        return record["workload"]["kind"] == "depth"
    return speculation.row(record) is None and rate_error(record) is None


def rate_error(record: Record) -> float | None:
    """The share by which tok/s may be off where tokens of a decode came together, so that averages hold and
    times of single tokens do not; None where they came one by one, or too many at once.

    The first came alone. Any event may be late by less than the tokens of the largest piece take: what waits
    for longer is in the next one.
    """
    served, counters = loaded_of(record).get("served"), done_of(record).get("counters") or Counters()
    if not served or tables.name_of(record) or speculation.row(record) or "largest_piece" not in counters:
        return None
    if not _in_pieces(record) or speculation.first_burst_tokens(record) > 1:
        return None
    largest = max(counters["largest_piece"], 1 + _without_piece(record))
    error = largest / max(1, record["tokens"] - 1)
    return error if error <= IN_PIECES else None


def _without_piece(record: Record) -> int:
    """Tokens of a decode that were counted and did not come: their times are not known, nor is their place
    among the others. Any one piece may have been all of them."""
    counters = done_of(record).get("counters") or Counters()
    return record["tokens"] - min(record["tokens"], counters.get("piece_tokens", record["tokens"]))


def _in_pieces(record: Record) -> dict[str, Any]:
    """The numbers of a warning that tokens came together; empty: they came one by one.

    In a decode, where each token has a time, few may come together (`HALVES`), two at a time, and none
    without a piece.
    """
    counters = done_of(record).get("counters") or Counters()  # none of a run that failed
    tokens = counters.get("answer_tokens", record["tokens"])
    few = HALVES * tokens
    if not tables.name_of(record) and (_without_piece(record) or counters.get("largest_piece", 1) > 2):
        few = 0
    if tokens - (pieces := counters.get("pieces", tokens)) <= few:
        return {}
    by = ""
    if _without_piece(record):
        by = f" by the server's {'count' if counters.get('counted_tokens') == tokens else 'reason to end'}"
    largest = counters.get("largest_piece", 1)
    most = f", up to {largest} at once" if largest > 1 else ""
    return {"tokens": tokens, "by": by, "pieces": plural(pieces, "piece"), "most": most}


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
    """The harness's own delay: the time in which its client did not wait for the server; None without one."""
    counters = done_of(record)["counters"]
    elapsed, waited = counters.get("elapsed_ms"), counters.get("waited_ms")
    if elapsed is None or waited is None or not record["tokens"]:
        return None
    return max(0.0, elapsed - waited) / record["tokens"]


def notes(record: Record) -> list[Flag]:
    """Another prompt than the one that was sent, tokens that came together, and the server's time per token
    beside the client's."""
    done = done_of(record)
    if not loaded_of(record).get("served") or not done:
        return []
    served = (loaded_of(record) | done.get("facts_changed", StackFacts())).get("served")
    assert served
    counters, raised = done["counters"], _reuse(record)
    if (load_ms := counters.get("load_ms") or 0.0) > LOAD_MS and tables.name_of(record) is None:
        raised.append(Warnings.model_loaded.flag(load=load_ms))
    if (on_gpu := served.get("gpu_share")) is not None and on_gpu < ON_GPU:
        raised.append(Warnings.on_cpu.flag(on_cpu=1 - on_gpu, on_gpu=on_gpu, context=_at_context(served)))
    if forms := served.get("other_forms"):
        raised.append(Warnings.other_form.flag(forms=" and ".join(forms)))
    requested, counted = record["workload"]["prompt_tokens"], counters.get("prompt_tokens")
    tokens = counters.get("answer_tokens", record["tokens"])
    proxy, sent = counters.get("proxy"), plural(requested, "token")
    if proxy:
        raised.append(Warnings.counted_by_proxy.flag(proxy=proxy, requested=sent))
    elif counted is None and tables.name_of(record) in (None, "users"):  # others do not go on without it
        raised.append(Warnings.prompt_not_counted.flag(requested=sent))
    if not proxy and (answer := counters.get("counted_tokens", tokens)) != tokens:
        came = plural(counters.get("piece_tokens", tokens), "token" if served["sends_ids"] else "piece")
        raised.append(Warnings.usage_unusable.flag(counted=answer, came=came))
    ended_early = not tables.name_of(record) and tokens < record["workload"]["new_tokens"]
    if ended_early and served_elsewhere(record) and not other_length(record):
        raised.append(Warnings.answer_ended.flag(**_length(record)))
    if counted is not None and counted != requested:
        why = ": its chat template adds to them" if served["template"] else ""
        raised.append(Warnings.other_prompt.flag(counted=counted, requested=requested, why=why))
    names_one = record["model"]["weights"].get("kind") != "served" or record["model"].get("shape")
    if served_elsewhere(record) and names_one and not _known_of_both(record):
        raised.append(Warnings.model_unchecked.flag(**_names(record)))
    if not _each_is_timed(record) and (numbers := _in_pieces(record)):
        error = rate_error(record)
        accuracy = "" if error is None else f"; tok/s is right to {error:.1%}"
        raised.append(Warnings.tokens_in_pieces.flag(**numbers, accuracy=accuracy))
    if (client := client_ms_per_token(record)) is not None and record["tokens"] > 1:
        raised.append(_times(record, served, client))
    return raised


def _reuse(record: Record) -> list[Flag]:
    """What the server says that it reused of a conversation; empty for other workloads."""
    workload = record["workload"]
    if workload.get("turns", 0) < 2 or True not in workload.get("prefix_cache", []):
        return []
    counted = (done_of(record).get("surface") or Surface()).get("counted", [])
    later = [turn for turn in counted if turn["reuse"] and turn.get("depth")]
    if not later:
        return [Warnings.reuse_unknown.flag()]
    tokens_held = sum(turn["depth"] for turn in later)
    reused = tokens_held + sum(turn["fed"] - turn["evaluated"] for turn in later)
    return [Warnings.turns_reused.flag(reused=reused, held=tokens_held)]


def _at_context(served: Served) -> str:
    """The length that was requested: with a longer one less of a model may be on GPUs."""
    return f" at num_ctx {num_ctx}" if (num_ctx := served.get("num_ctx")) else ""


def _times(record: Record, served: Served, client: float) -> Flag:
    steps, timing = record["tokens"] - 1, record["timing"]
    here = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 / steps
    theirs = done_of(record)["counters"].get("stack_decode_ms")
    own = "" if theirs is None else f", {theirs / steps:.3f} by its own clock"
    is_on_gpu = (served.get("gpu_share") or 0.0) >= ON_GPU
    place = f"; all of the model is on GPUs{_at_context(served)}" if is_on_gpu else ""
    return Warnings.served_by.flag(server=served["api"], here=here, own=own, client=client, place=place)
