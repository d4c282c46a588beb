"""The config of `harness run MODEL...`: files, folders, repositories and names as a short campaign."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from harness.analysis import server_speed
from harness.base import data
from harness.base.files import is_local, write_whole
from harness.base.nvml import Gpu, visible_gpus
from harness.base.text import list_named, plural, server_address, shortened
from harness.cli import Mistake, say
from harness.cli.options import unknown
from harness.config import Experiment
from harness.config.experiment import REPO, Plain, Weights
from harness.config.load import load, load_document
from harness.config.variants import model_row, repository, safe_name
from harness.config.yaml_text import Document, parse, suggestion
from harness.models import gguf_files, hub, served, weights
from harness.models.gguf_files import StoredModel
from harness.models.weights import FULL_TYPES, WeightsError
from harness.stacks import build
from harness.stacks.header import Header, stacks
from harness.theory import names
from harness.theory.known_models import Known
from harness.theory.names import NotUnderstood
from runners.answers import api_key

TOKENS, REPEATS = 128, 3
WINDOWS = 8  # a warm-up as long as the measurement, on a machine that never settles
TOLERANCE = 0.05  # on a small or busy machine windows of 16 tokens seldom agree to 2%
STUDY_TOKENS = 9975  # of the published study
BF16_SINCE = 8.0  # compute capability; older GPUs emulate it
SERVER_STACK = "http"
DEFAULT_STACK = "llamacpp"  # of what is no GGUF, which only some stacks load


@dataclass(frozen=True)
class _Model:
    """A model of the command line. `source`: its shape or weights, as a row of a config has them. `types`: of
    its GGUF files; empty: it is no GGUF, and can be had in any type."""

    name: str
    source: Plain
    types: Sequence[str] = ()


HELP = (
    "GGUF files, folders, repositories of the Hugging Face hub (owner/repo), known names, or the address of a"
    " server (http://127.0.0.1:8080), for a short run;"
    " or one config: a YAML file, or the name of a shipped one such as quickstart"
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add which variants of a MODEL."""
    parser.add_argument(
        "--stacks", type=_words, metavar="STACK,...", help="stacks to run a MODEL in (default: llamacpp)"
    )
    parser.add_argument(
        "--quant",
        type=_words,
        metavar="TYPE,...",
        help="types to run a MODEL in, q8_0,q4_k_m (default: that of a GGUF, else a few of each stack)",
    )


def add_served_model(parser: argparse.ArgumentParser) -> None:
    """Add which model a server has."""
    parser.add_argument(
        "--model",
        dest="served_model",
        metavar="NAME_OR_FILE",
        help="which model a server has, where it does not report it: a known name, qwen3-8b:q4_k_m, or a file"
        " or folder here",
    )


def add_length(parser: argparse.ArgumentParser) -> None:
    """Add how many tokens are decoded."""
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="N", help=f"tokens to decode (default: {TOKENS})")
    length.add_argument(
        "--full",
        dest="tokens",
        action="store_const",
        const=str(STUDY_TOKENS),
        help=f"decode {STUDY_TOKENS:,} tokens, as the published study does",
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def config_path(given: Sequence[str]) -> Path | None:
    """The config that the command line names; null: it names models. Raises Mistake."""
    are_models = [is_model(text) for text in given]
    if all(are_models):
        return None
    if len(given) > 1:
        config = given[are_models.index(False)]
        raise Mistake(f"{shortened(config)}: is no model, and a config is measured alone")
    (text,) = given
    path = data.config(text)
    if path != (here := Path(text)) and here.is_dir():
        say(f"{text}: the config {path}; for the folder of that name here: ./{text}")
    if not path.exists() and data.is_name(path) and not path.suffix:
        hint = suggestion(text, data.config_names())
        if "did you mean" not in hint and (why := _not_understood(text)):
            hint = f"; {why.hint}"
        raise Mistake(f"{shortened(text)}: no such file, shipped config or known model{hint}")
    return path


def is_model(text: str) -> bool:
    """Whether an argument is a model rather than a config. Raises Mistake if it may be two, or is a server's
    address without http://."""
    if served.is_address(text):
        return True
    path = Path(text).expanduser()
    if re.fullmatch(r"(localhost|[\w-]+(\.[\w-]+)+):[0-9]{2,5}([/#].*)?", text) and not path.exists():
        raise Mistake(f"{shortened(text)}: for a server add http://: http://{shortened(text)}")
    if text.lower().endswith((".yaml", ".yml", ".json")):
        return False
    if data.config(text) != Path(text):  # the name of a config, here or shipped
        return False
    known = "/" not in text and _is_known(text)
    if known and path.exists():
        raise Mistake(f"{text}: is a known model and a file here: write ./{text} for the file")
    if known or path.is_dir() or text.lower().endswith(".gguf"):
        return True
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            return file.read(4) == b"GGUF"
        return False
    return is_local(text) or re.match(REPO, repository(text)[0]) is not None


def _is_known(name: str) -> bool:
    """Raises Mistake for an ambiguous name."""
    why = None if name in data.weights_names() else _not_understood(name)
    if why and why.ambiguous:
        raise Mistake(why.sentence("model", shortened(name)))
    return why is None


def _not_understood(name: str) -> NotUnderstood | None:
    try:
        names.named(name, Known())
    except NotUnderstood as why:
        return why
    return None


def document(
    given: Sequence[str],
    chosen: Sequence[str] | None,
    quants: Sequence[str] | None,
    served_model: str | None = None,
) -> Document:
    """The config of these models as plain data. `chosen`: stacks; null: the usual. `served_model`: which
    model a server has. Raises Mistake."""
    gpus = visible_gpus()
    for stack in chosen or ():
        if stack not in stacks():
            raise Mistake(unknown("stack", stack, stacks()))
    if any(served.is_address(text) for text in given):
        return _served_document(given, chosen, quants, served_model)
    if served_model:
        raise Mistake("--model says which model a server has: give the server's address")
    models = _models(given)
    rows = [_variants(model, chosen or [DEFAULT_STACK], quants, gpus) for model in models]
    if all(each == rows[0] for each in rows):
        variants = rows[0]
    else:
        variants = [
            {**row, "models": [model.name]} for model, of in zip(models, rows, strict=True) for row in of
        ]
    return _document(given, models, variants, "cuda" if gpus else "cpu")


def _document(
    given: Sequence[str], models: Sequence[_Model], variants: Sequence[Plain], device: str
) -> Document:
    content: Plain = {
        "device": device,
        "protocol": {
            "new_tokens": TOKENS,
            "repeats": REPEATS,
            "warmup": {"tolerance": TOLERANCE, "max_windows": WINDOWS},
        },
        "models": [{**model.source, "name": model.name} for model in models],
        "variants": variants,
    }
    return Document(content, {(): f"harness run {shortened(' '.join(given), 60)}"})


def _served_document(
    given: Sequence[str],
    chosen: Sequence[str] | None,
    quants: Sequence[str] | None,
    served_model: str | None,
) -> Document:
    """The config of one server. Raises Mistake."""
    if len(given) > 1:
        raise Mistake("the address of a server is measured alone; several servers go into a config")
    if chosen or quants:
        raise Mistake("--stacks and --quant are for models; a server has its own")
    address, _, wanted = given[0].partition("#")
    try:
        address = server_address(address)
        found = served.serving(address, api_key("HARNESS_API_KEY"))
    except ValueError as why:
        raise Mistake(str(why)) from why
    if not wanted and len(found.models) > 1:
        held = list_named(found.models, 6)
        raise Mistake(f"{address} serves {held}: name one, as in {address}#{found.models[0]}")
    model = wanted or found.models[0]
    if model not in found.models:
        raise Mistake(f"{address} has no model {shortened(model)}{suggestion(model, found.models)}")
    file = found.files[model]
    name = file.stem if file and file.is_file() else served.name_of(model)
    source: Plain = {"weights": str(file) if file else "served"}
    if served_model:
        name, source = _which_model(served_model)
    row: Plain = {"stack": SERVER_STACK, "name": "as-served", "url": address}
    row |= {"model": model} if len(found.models) > 1 else {}
    return _document(given, [_Model(safe_name(name) or "model", source)], [row], "cpu")


def _which_model(text: str) -> tuple[str, Plain]:
    """The name and the weights of a server's model: a file or folder here, a repository in the hub's cache,
    or a known name. Raises Mistake."""
    path = Path(text).expanduser()
    if is_local(text) or path.exists():
        if not path.exists():
            raise Mistake(f"--model {shortened(text)}: no such file or folder")
        return path.stem if path.is_file() else path.name, {"weights": str(path.absolute())}
    repo, quant = repository(text)
    if re.match(REPO, repo):
        source = Weights(kind="hub", repo=repo, file=f"*{quant}.gguf" if quant else None)
        with contextlib.suppress(WeightsError):
            if ready := hub.in_hub_cache(source):
                return repo.partition("/")[2], {"weights": str(ready.path)}
    if not server_speed.is_known(text):
        raise Mistake(f"--model {shortened(text)}: no such file, cached repository or known model")
    return text.rpartition("/")[2], {"weights": "served"}


def _models(given: Sequence[str]) -> list[_Model]:
    """The models of the command line, files of one model together; names are unique."""
    files: list[Path] = []
    found: list[_Model] = []
    try:
        for text in given:
            path = Path(text).expanduser()
            if path.is_dir() and (held := gguf_files.in_folder(path)):
                files += _of_one_model(path, held)
            elif path.is_dir():
                weights.local(path)
                found.append(_Model(safe_name(path.resolve().name), {"weights": str(path.absolute())}))
            elif is_local(text):
                files.append(path)
            else:
                repo, quant = repository(text)
                name = safe_name(repo.rpartition("/")[2])
                found.append(_Model(name, model_row(text, Path()), [quant.lower()] if quant else []))
        found += [_of_files(each) for each in gguf_files.stored_models(files)]
    except WeightsError as wrong:
        raise Mistake(str(wrong)) from wrong
    counts = Counter(model.name for model in found)
    numbers = {name: itertools.count(1) for name in counts}
    return [
        replace(model, name=f"{model.name}-{next(numbers[model.name])}") if counts[model.name] > 1 else model
        for model in found
    ]


def _of_one_model(folder: Path, files: Sequence[Path]) -> Sequence[Path]:
    """The files of a folder. Raises Mistake where they are several models, WeightsError."""
    models = gguf_files.stored_models(files)
    if len(models) > 1:
        held = list_named([model.name for model in models], 4)
        raise Mistake(f"{folder}: has {len(models)} models ({held}): name the files to run")
    return files


def _of_files(stored: StoredModel) -> _Model:
    paths = {quant: str(path) for quant, path in stored.files.items()}
    source = next(iter(paths.values())) if len(paths) == 1 else paths
    return _Model(safe_name(stored.name) or "model", {"weights": source}, [*paths])


def _variants(
    model: _Model, chosen: Sequence[str], quants: Sequence[str] | None, gpus: Sequence[Gpu]
) -> list[dict[str, Any]]:
    """The rows of a model's variants. Raises Mistake."""
    found = []
    for stack in chosen:
        header = stacks()[stack]
        if model.types and header.formats and "gguf" not in header.formats:
            able = [name for name, each in stacks().items() if "gguf" in each.formats]
            able.sort(key=lambda name: not stacks()[name].reference)
            raise Mistake(f"{model.name} is a GGUF, which {stack} does not load; try {' or '.join(able)}")
        option = header.options.get("quant")
        types = _requested(model, quants) if quants else model.types
        if option is None or not types:
            found.append(_first_row(header, gpus))
            continue
        known = [each for each in types if not option.choices or each in option.choices]
        if quants and (strange := [each for each in types if each not in known]):
            raise Mistake(unknown(f"quant of {stack}", strange[0], map(str, option.choices)))
        found += [{"stack": stack, "quant": known}] if known else []
        # A file of a type that the stack has no name for, such as a mix of several, runs as it is.
        found += [{"stack": stack, "name": each} for each in types if each not in known]
    return found


def dtype_of(gpu: Gpu) -> str:
    """The 16-bit type that a GPU computes in."""
    return "bf16" if float(gpu["compute_capability"] or 0) >= BF16_SINCE else "fp16"


def _first_row(header: Header, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """The variants of a stack in a first config for these GPUs, or for the CPU, as a row."""
    if header.first is None:
        return {"stack": header.stack}
    line = header.first.line("cuda" if gpus else "cpu").removeprefix("# ")
    text = line.replace("{dtype}", dtype_of(gpus[0])) if gpus else line
    (row,), _ = parse(text, lambda line: header.stack)
    found: dict[str, Any] = {**row, "stack": header.stack}  # a copied header may name another
    return found


def _requested(model: _Model, quants: Sequence[str]) -> Sequence[str]:
    """The types to run. Raises Mistake for one that the model's files cannot become."""
    others = [quant for quant in quants if quant not in model.types]
    if others and model.types and (len(model.types) > 1 or model.types[0] not in FULL_TYPES):
        stored = " and ".join(model.types)
        raise Mistake(
            f"{model.name} is stored as {stored}, which cannot become {others[0]}: leave out --quant,"
            " or name its 16-bit file"
        )
    return quants


def experiment(
    given: Sequence[str],
    arguments: argparse.Namespace,
    settings: Sequence[str],
    with_length: bool = False,
) -> tuple[Path, Experiment]:
    """What a command line names: the experiment of a config, or one made of models, and its config's path.
    `with_length`: whether the protocol's tokens and repeats are what the command measures. Raises Mistake,
    ConfigError."""
    if path := config_path(given):
        if arguments.stacks or arguments.quant or getattr(arguments, "served_model", None):
            raise Mistake(
                "--stacks, --quant and --model are for models; a config has its variants: use --set or --only"
            )
        return path, load(path, settings)
    made = document(given, arguments.stacks, arguments.quant, getattr(arguments, "served_model", None))
    names = [row["name"] for row in made.data["models"]]
    root = arguments.out or Path("results")
    path = root / "configs" / f"{safe_name('-'.join(names))}.yaml"
    found = load_document(made, path, settings)
    say(in_words(found, with_length))
    if not arguments.dry_run:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = _kept(made, path)
        except OSError as refusal:
            raise Mistake(
                f"{path}: cannot be written: {refusal.strerror}; choose another: --out DIR"
            ) from refusal
        found = load_document(made, path)
        say(f"config: {path}")
        _say_what_is_built(found)
    return path, found


def _kept(made: Document, path: Path) -> Path:
    """Where the document is kept: there already, else in a new file, never over another. Raises OSError."""
    places = (path if n == 1 else path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
    contents = ((place, config_text(made, place).encode()) for place in places)
    place, content = next(
        (place, content) for place, content in contents if not place.exists() or place.read_bytes() == content
    )
    if not place.exists():
        write_whole(place, content)
    return place


def config_text(made: Document, path: Path) -> str:
    """The document as the content of a file at this path."""
    rows = yaml.safe_dump(made.data, sort_keys=False, default_flow_style=None, width=100)
    return f"# yaml-language-server: $schema={data.schema()}\n# harness run {path}\n{rows}"


def in_words(experiment: Experiment, with_length: bool) -> str:
    """What is measured, in one line."""
    protocol = experiment.protocol
    models = list_named([model.name for model in experiment.models], 3)
    variants = dict.fromkeys(f"{variant.stack} {variant.name}" for variant in experiment.variants)
    length = f", {plural(protocol.new_tokens, 'token')} x {protocol.repeats}" if with_length else ""
    urls = {
        str(variant.options.get("url")) for variant in experiment.variants if variant.stack == SERVER_STACK
    }
    is_served = all(variant.stack == SERVER_STACK for variant in experiment.variants)
    where = f"at {list_named(sorted(urls), 2)}" if is_served else f"on {experiment.device}"
    return f"{models}: {list_named([*variants], 4)} {where}{length}"


def _say_what_is_built(experiment: Experiment) -> None:
    """Say which environments are missing, so that they are built first."""
    family = experiment.device.partition(":")[0]
    used = {variant.stack for _, variant, _ in experiment.combinations()}
    wanted = {stack: stacks()[stack].environment_for(family) for stack in sorted(used)}
    missing = [stack for stack, environment in wanted.items() if environment and not build.find(environment)]
    if missing:
        say(f"{list_named(missing, 4)}: not built here yet: built first, once")
