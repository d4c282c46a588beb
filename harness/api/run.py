"""Measure what a config or names say, as `harness run` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.api.inputs import chosen
from harness.api.named_models import Choice, Keeping, experiment
from harness.api.progress import Progress
from harness.base import data
from harness.campaign import run as campaign_run
from harness.campaign.opening import RunOptions
from harness.config import plan
from harness.config.experiment import Scalar
from harness.dataset import sql
from harness.dataset.study import Study, load_study, with_series

Names = str | Path | Sequence[str | Path]


def run(
    models: Names,
    *,
    stacks: str | Sequence[str] = (),
    quants: str | Sequence[str] = (),
    tokens: int | None = None,
    synthetic: bool = False,
    only: str | Sequence[str] = (),
    settings: Mapping[str, Scalar] | None = None,
    results: str | Path = data.RESULTS,
    fresh: bool = False,
    trust_remote_code: bool = False,
) -> Study:
    """Measure models, or the cells of a config that are not measured yet. Progress and messages go to
    standard error; each repeat runs in a process of its own and is a record of the results folder.

    Args:
        models: GGUF files, folders, names of models that are here, repositories of the hub, a server's
            address; or one config, by its path or the name of a shipped one.
        stacks, quants: stacks and types to run models in; a config has its own.
        tokens: tokens to decode; by default 128, or those of the config.
        synthetic: random weights in the shapes of known models.
        only: only cells whose id matches one of these globs.
        settings: keys of the config with their values, as `{"repeats": 1}`.
        results: the folder of records.
        fresh: measure every cell again, also those already measured.
        trust_remote_code: run the Python files of checkpoints, where the config has that too.

    Returns the Study of the records that count, kept ones included. A cell that fails is a row of it with
    its `status` and `reasons`, not an exception.

    Raises Mistake and ConfigError for what cannot be run, ResultsError for a folder that cannot be used,
    NotFinished where the run had to stop, as when another campaign uses the device.
    """
    named, globs = _words(models), _words(only)
    choice = Choice(
        stacks=_words(stacks) or None,
        quants=_words(quants) or None,
        synthetic=synthetic,
        prefers_server=True,
    )
    root = Path(results)
    changes = {**(settings or {}), **({} if tokens is None else {"new_tokens": tokens})}
    texts = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    config, loaded = experiment(named, choice, texts, Keeping(root, with_length=True))
    cells = chosen(plan.cells(loaded), globs, trust_remote_code)
    command = ["harness", "run", *named, *(word for text in texts for word in ("--set", text))]
    for option, words in (("--stacks", choice.stacks), ("--quant", choice.quants), ("--only", globs)):
        command += [option, *words] if words else []
    switches = {"--synthetic": synthetic, "--fresh": fresh, "--trust-remote-code": trust_remote_code}
    command += [switch for switch, is_on in switches.items() if is_on]
    options = RunOptions(root.absolute(), config, command, fresh=fresh)
    progress = Progress()
    stored = campaign_run.run(loaded, cells, options, progress)
    progress.clear()
    return replace(with_series(load_study(stored), loaded.name), tables=partial(sql.frame, [root]))


def _words(given: Names) -> list[str]:
    return [str(given)] if isinstance(given, str | Path) else [str(word) for word in given]
