"""The config of models that are only named: files, folders, repositories and names as a short campaign."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from harness.analysis import server_speed
from harness.api import prompt_speed, wheels
from harness.api.inputs import check_stacks
from harness.base import data
from harness.base.files import Mistake, is_local, write_whole
from harness.base.nvml import Gpu, visible_gpus
from harness.base.text import list_named, plural, say, server_address, shortened, sized, unknown
from harness.config import Experiment
from harness.config.base import Plain
from harness.config.experiment import REPO, Weights
from harness.config.load import load, load_document
from harness.config.mistakes import suggestion
from harness.config.model_rows import model_row, repository, safe_name
from harness.config.variants import quant_of, weights_of
from harness.config.yaml_text import Document, parse
from harness.models import find, gguf_files, hub, locate, served
from harness.models.config_json import CONFIG
from harness.models.gguf_files import StoredModel
from harness.models.locate import WeightsError
from harness.models.make import FULL_TYPES
from harness.models.model_folders import Stored
from harness.stacks import build
from harness.stacks.header import Header, stacks
from harness.theory import downloads, names
from harness.theory.known_models import Known
from harness.theory.names import NotUnderstood
from runners.answers import api_key

TOKENS, REPEATS = 128, 3
WINDOWS = 8  # a warm-up as long as the measurement, on a machine that never settles
TOLERANCE = 0.05  # on a small or busy machine windows of 16 tokens seldom agree to 2%
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


@dataclass(frozen=True)
class Choice:
    """How named models are measured. `stacks`: None for the usual one. `quants`: None for the types a
    model has. `synthetic`: random weights in the shapes of known models. `users`, `depths`: also so many
    users at once, and behind so many tokens. `served_model`: which model a server has. `prefers_server`:
    what a local Ollama serves is measured through it."""

    stacks: Sequence[str] | None = None
    quants: Sequence[str] | None = None
    synthetic: bool = False
    users: Sequence[str] = ()
    depths: Sequence[str] = ()
    served_model: str | None = None
    prefers_server: bool = False

    def check_is_empty(self) -> None:
        """Raises Mistake: a config says these itself."""
        if self.stacks or self.quants or self.served_model:
            raise Mistake(
                "--stacks, --quant and --model are for models; a config has its variants: use --set or --only"
            )
        if self.synthetic:
            raise Mistake("--synthetic is for the names of models; a config has its weights")
        if self.users or self.depths:
            raise Mistake(
                "--users and --depth are for models; a config has workloads of kind batch and depth"
            )

    def workloads(self) -> Plain:
        """The key of a config for users and depths; empty without them."""
        rows: list[Plain] = []
        if self.users:
            # One round: the repeats are rounds in processes of their own.
            rows.append(
                {"kind": "batch", "concurrency": _whole(self.users), "new_tokens": TOKENS, "rounds": 1}
            )
        if self.depths:
            rows.append({"kind": "depth", "depths": _whole(self.depths)})
        return {"workloads": [{"kind": "decode"}, *rows]} if rows else {}


def _whole(words: Sequence[str]) -> list[int | str]:
    """Numbers as such; what is none stays for the config's reader to name."""
    return [int(word) if word.isdecimal() else word for word in words]


def config_path(given: Sequence[str]) -> Path | None:
    """The config that the command line names; None: it names models. Raises Mistake."""
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
    return path


def is_model(text: str) -> bool:
    """Whether an argument is a model rather than a config. Raises Mistake if it is a server's address without
    http://."""
    if served.is_address(text):
        return True
    path = Path(text).expanduser()
    if re.fullmatch(r"(localhost|[\w-]+(\.[\w-]+)+):[0-9]{2,5}([/#].*)?", text) and not path.exists():
        raise Mistake(f"{shortened(text)}: for a server add http://: http://{shortened(text)}")
    if text.lower().endswith((".yaml", ".yml", ".json")):
        return False
    if data.config(text) != Path(text):  # the name of a config, here or shipped
        return False
    if path.is_file() and not text.lower().endswith(".gguf"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            return file.read(4) == b"GGUF"
        return False
    return True


def document(models: Sequence[str], choice: Choice) -> Document:
    """The config of these models as plain data. Raises Mistake."""
    gpus, chosen = visible_gpus(), choice.stacks or [DEFAULT_STACK]
    check_stacks(chosen)
    if any(served.is_address(text) for text in models):
        if choice.synthetic:
            raise Mistake("--synthetic is for the names of known models; a server has its own weights")
        return _served_document(models, choice)
    if choice.served_model:
        raise Mistake("--model says which model a server has: give the server's address")
    if choice.synthetic:
        known = [_random(text) for text in models]
    elif not (choice.stacks or choice.quants) and (
        addresses := _served_by_ollama(models, choice.prefers_server)
    ):
        return _served_document(addresses, Choice())
    else:
        known = _models(models, chosen)
    rows = [_variants(model, chosen, choice.quants, gpus) for model in known]
    if all(of_model == rows[0] for of_model in rows):
        variants = rows[0]
    else:
        variants = [
            {**row, "models": [model.name]}
            for model, of_model in zip(known, rows, strict=True)
            for row in of_model
        ]
    return _document(models, known, variants, "cuda" if gpus else "cpu")


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


def _served_document(given: Sequence[str], choice: Choice) -> Document:
    """The config of models of one server. Raises Mistake."""
    if len({text.partition("#")[0] for text in given}) > 1:
        raise Mistake("the address of a server is measured alone; several servers go into a config")
    if choice.stacks or choice.quants:
        raise Mistake("--stacks and --quant are for models; a server has its own")
    address = given[0].partition("#")[0]
    try:
        address = server_address(address)
        files = served.serving(address, api_key("HARNESS_API_KEY"))
    except ValueError as why:
        raise Mistake(str(why)) from why
    if choice.served_model and len(given) > 1:
        raise Mistake("--model is for one model of a server")
    models, rows = [], []
    for text in given:
        wanted = text.partition("#")[2]
        if not wanted and len(files) > 1:
            held = list_named([*files], 6)
            raise Mistake(f"{address} serves {held}: name one, as in {address}#{next(iter(files))}")
        model = wanted or next(iter(files))
        if model not in files:
            raise Mistake(f"{address} has no model {shortened(model)}{suggestion(model, files)}")
        file = files[model]
        name = safe_name(file.stem if file and file.is_file() else served.name_of(model)) or "model"
        source: Plain = {"weights": str(file) if file else "served"}
        if choice.served_model:
            name, source = _which_model(choice.served_model)
        models.append(_Model(name, source))
        row: Plain = {"stack": SERVER_STACK, "name": "as-served", "url": address}
        row |= {"model": model} if len(files) > 1 else {}
        rows.append(row | ({"models": [name]} if len(given) > 1 else {}))
    return _document(given, models, rows, "cpu")


def _which_model(text: str) -> tuple[str, Plain]:
    """The name and the weights of a server's model: a file or folder here, a repository in the hub's cache,
    or a known name. Raises Mistake."""
    path = Path(text).expanduser()
    if is_local(text) or path.exists():
        if not path.exists():
            raise Mistake(f"--model {shortened(text)}: no such file or folder")
        return safe_name(path.stem if path.is_file() else path.name), {"weights": str(path.absolute())}
    repo, quant = repository(text)
    if re.match(REPO, repo):
        source = Weights(kind="hub", repo=repo, file=f"*{quant}.gguf" if quant else None)
        with contextlib.suppress(WeightsError):
            if ready := hub.in_hub_cache(source):
                return safe_name(repo.partition("/")[2]), {"weights": str(ready.path)}
    if not server_speed.is_known(text):
        raise Mistake(f"--model {shortened(text)}: no such file, cached repository or known model")
    return safe_name(text.rpartition("/")[2]), {"weights": "served"}


def _served_by_ollama(given: Sequence[str], is_preferred: bool) -> list[str]:
    """The addresses of the models with Ollama's name of each, where it serves all of them; empty: their files
    are measured, or it does not serve them. Raises Mistake."""
    if any(_is_here(text) or text in data.weights_names() for text in given):
        return []
    files = [_found(text, served=False) for text in given]
    if not is_preferred and all(files):
        return []
    models = [model for text in given if (model := _found(text, served=True)) and model.address]
    if len(models) < len(given):
        return []
    for text, model, file in zip(given, models, files, strict=True):
        also = f"; --stacks {DEFAULT_STACK} measures its file without the server" if file else ""
        say(f"{shortened(text)}: measured through {_in_words(text, model)}{also}")
    return [f"{model.address}#{model.name}" for model in models]


def _found(text: str, served: bool, checkpoint: bool = False) -> Stored | None:
    """The model of this name on this machine. Raises Mistake."""
    try:
        return find.find(text, served, checkpoint)
    except find.Several as several:
        raise Mistake(f"{shortened(text)}: {several}") from several


def _in_words(text: str, model: Stored) -> str:
    return model.place + (f" as {model.name}" if model.name.lower() != text.lower() else "")


def _is_here(text: str) -> bool:
    return Path(text).expanduser().is_dir() or is_local(text)


def _models(given: Sequence[str], chosen: Sequence[str]) -> list[_Model]:
    """The models of the command line, files of one model together; names are unique. Raises Mistake."""
    checkpoint = any(
        formats and "gguf" not in formats for formats in (stacks()[each].formats for each in chosen)
    )
    files: list[Path] = []
    found: list[_Model] = []
    try:
        for text in given:
            path = Path(text).expanduser()
            if path.is_dir():
                ggufs, folders = _in_folder(path)
                files += ggufs
                found += [
                    _Model(safe_name(each.resolve().name), {"weights": str(each.absolute())})
                    for each in folders
                ]
            elif is_local(text):
                files.append(path)
            elif text in data.weights_names():
                found.append(_Model(text, {"weights": text}))
            elif stored := (checkpoint and _found(text, False, True)) or _found(text, False):
                say(f"{shortened(text)}: found in {_in_words(text, stored)}")
                found += _stored(text, stored)
            else:
                found.append(_on_the_hub(text))
        found += [_of_files(each) for each in gguf_files.stored_models(files)]
    except WeightsError as wrong:
        raise Mistake(str(wrong)) from wrong
    counts = Counter(model.name for model in found)
    numbers = {name: itertools.count(1) for name in counts}
    return [
        replace(model, name=f"{model.name}-{next(numbers[model.name])}") if counts[model.name] > 1 else model
        for model in found
    ]


def _in_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The GGUF files of a folder, else its checkpoint, else those of the folders in it. Raises
    WeightsError."""
    if files := gguf_files.below(folder, depth=0):
        return files, []
    if not (folder / CONFIG).exists():
        files = gguf_files.below(folder)
        folders = [each.parent for each in sorted(folder.glob(f"*/{CONFIG}"))]
        if files or folders:
            return files, folders
    locate.local(folder)
    return [], [folder]


def _stored(text: str, stored: Stored) -> list[_Model]:
    """The models of a name that is on this machine. Raises WeightsError."""
    name = safe_name(stored.name.rpartition("/")[2]) or "model"
    in_hub: Plain = {"repo": stored.name} if stored.revision else {}
    in_hub |= {"revision": stored.revision} if stored.revision not in ("", "main") else {}
    if not stored.files:
        return [_Model(name, {"weights": in_hub or str(stored.folder)})]
    quant = repository(text)[1]
    if in_hub and quant and any(each.stem.lower().endswith(quant.lower()) for each in stored.files):
        return [_Model(name, {"weights": {**in_hub, "file": f"*{quant}.gguf"}}, [quant.lower()])]
    models = gguf_files.stored_models(stored.files)
    if in_hub:
        return [
            _of_files(each, lambda path: {**in_hub, "file": path.relative_to(stored.folder).as_posix()})
            for each in models
        ]
    if stored.files[0].suffix.lower() == ".gguf":
        return [_of_files(each) for each in models]
    return [replace(_of_files(each), name=name) for each in models]  # a blob is named by its digest


def _on_the_hub(text: str) -> _Model:
    """The model of a repository of the hub. Raises Mistake for another name, which leads nowhere."""
    repo, quant = repository(text)
    if not re.match(REPO, repo):
        raise Mistake(_nowhere(text))
    types = [quant.lower()] if quant else []
    return _Model(safe_name(repo.rpartition("/")[2]), model_row(text, Path()), types)


def _nowhere(text: str) -> str:
    """What to do about a name of which there are no weights here."""
    name = shortened(text)
    base = gguf_files.without_type(text)
    if (other := _found(text, served=True)) and other.address:
        return f"{name}: {other.place} serves it, but its file cannot be read: leave out --stacks and --quant"
    if base != text and (other := _found(base, served=True)):
        return f"{name}: {other.place} has {other.name}, which is of another type"
    why = _not_understood(base)
    if why is None:
        get = " or ".join(f"`{each}`" for each in downloads.fetches(base, gguf_files.type_in(text)))
        get = f"get them with {get}" if get else "name a file, or a repository of the hub (owner/repo:Q4_K_M)"
        return (
            f"{name}: no weights of it in {find.searched()}: {get}, or measure random ones of its shape with"
            " --synthetic"
        )
    if why.ambiguous:
        return why.sentence("model", name)
    if ":" in text:
        return (
            f"{name}: no model of this name in {find.searched()}; of Ollama's library: `ollama pull {name}`"
        )
    hint = suggestion(text, data.config_names())
    hint = hint if "did you mean" in hint else f"; {why.hint}"
    return f"{name}: no such file, shipped config or known model{hint}"


def _not_understood(name: str) -> NotUnderstood | None:
    """Why a name is not that of a known model; None: it is."""
    try:
        names.named(name, Known())
    except NotUnderstood as why:
        return why
    return None


def _random(text: str) -> _Model:
    """Random weights in the shape of a known model. Raises Mistake."""
    quant = gguf_files.type_in(text)
    try:
        name = names.named(gguf_files.without_type(text), Known()).name
    except NotUnderstood as why:
        hint = "--synthetic is for the names of known models; " if _is_here(text) else ""
        raise Mistake(hint + why.sentence("model", shortened(text))) from why
    return _Model(safe_name(name), {"shape": name}, [quant] if quant else [])


def _of_files(stored: StoredModel, row: Callable[[Path], Any] = str) -> _Model:
    """`row`: a file as a config has it."""
    rows = {quant: row(path) for quant, path in stored.files.items()}
    source = next(iter(rows.values())) if len(rows) == 1 else rows
    return _Model(safe_name(stored.name) or "model", {"weights": source}, [*rows])


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


@dataclass(frozen=True)
class Keeping:
    """What becomes of the config of named models. `folder`: of results, in which it is kept. `plans`: only
    forecast it: nothing is written, installed or downloaded. `with_length`: the protocol's tokens and repeats
    are what is measured. `is_local`: it is measured on this machine."""

    folder: Path
    plans: bool = False
    with_length: bool = False
    is_local: bool = True


def experiment(
    given: Sequence[str], choice: Choice, settings: Sequence[str], keeping: Keeping
) -> tuple[Path, Experiment]:
    """The experiment of a config, or one made of models, and its config's path. Raises Mistake,
    ConfigError."""
    if path := config_path(given):
        choice.check_is_empty()
        return path, load(path, settings)
    made = document(given, choice)
    made.data.update(choice.workloads())
    name = safe_name("-".join(row["name"] for row in made.data["models"]))
    path = keeping.folder / "configs" / f"{name}.yaml"
    loaded = load_document(made, path, settings)
    if choice.synthetic:
        say(what_is_random([loaded]) or "these stacks load no weights: --synthetic has no effect")
    if keeping.with_length and keeping.is_local:
        load_made, is_kept = partial(load_document, path=path), partial(_is_kept, path=path)
        with_prompt = partial(_with_prompt, load_made=load_made, settings=settings)
        if not choice.stacks:
            made = wheels.instead(
                made,
                load=load_made,
                is_kept=lambda instead: is_kept(with_prompt(instead)),
                keeps_device=any(setting.startswith("device=") for setting in settings),
                install=not keeping.plans,
            )
        made = with_prompt(made)
        loaded = load_made(made)
    say(in_words(loaded, keeping.with_length))
    if not keeping.plans:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = _kept(made, path)
        except OSError as refusal:
            raise Mistake(
                f"{path}: cannot be written: {refusal.strerror}; choose another: --out DIR"
            ) from refusal
        loaded = load_document(made, path)
        say(f"config: {path}")
        _ask_to_download(loaded)
        _say_what_is_built(loaded)
    return path, loaded


def _with_prompt(
    made: Document, load_made: Callable[[Document], Experiment], settings: Sequence[str]
) -> Document:
    """The document with a prompt to read, unless its stack is a server's, or the settings have workloads."""
    is_set = any(setting.startswith("workloads") for setting in settings)
    return made if is_set or _is_served(load_made(made)) else prompt_speed.added(made, load_made)


def _place(made: Document, path: Path) -> tuple[Path, bytes]:
    """The file of a document, there already or new, never another's; and its content. Raises OSError."""
    places = (path if n == 1 else path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
    contents = ((place, config_text(made, place).encode()) for place in places)
    return next(
        (place, content) for place, content in contents if not place.exists() or place.read_bytes() == content
    )


def _is_kept(made: Document, path: Path) -> bool:
    try:
        return _place(made, path)[0].exists()
    except OSError:  # reported where it is written
        return False


def _kept(made: Document, path: Path) -> Path:
    """Keep the document. Raises OSError."""
    place, content = _place(made, path)
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
    where = f"at {list_named(sorted(urls), 2)}" if _is_served(experiment) else f"on {experiment.device}"
    return f"{models}: {list_named([*variants], 4)} {where}{length}"


def _is_served(experiment: Experiment) -> bool:
    """Whether all of it runs on servers of the user."""
    return all(variant.stack == SERVER_STACK for variant in experiment.variants)


def what_is_random(experiments: Sequence[Experiment]) -> str | None:
    """Which models of configs are random weights, in one sentence; None if no stack loads such."""
    rows = [row for experiment in experiments for row in experiment.combinations()]
    loaded = [(m.name, weights_of(m, variant)) for m, variant, _ in rows if stacks()[variant.stack].formats]
    models = dict.fromkeys(name for name, source in loaded if source and source.kind == "synthetic")
    if not models:
        return None
    return (
        f"random weights in the shape of {list_named([*models], 3)}: sizes are exact, latencies almost exact,"
        " text is meaningless"
    )


def _ask_to_download(experiment: Experiment) -> None:
    """Say what is downloaded, and its size where the hub says it; on a terminal ask first. Raises Mistake."""
    pairs = [(m, v) for m, v, _ in experiment.combinations() if stacks()[v.stack].formats]
    sources = [
        source.filled(quant_of(each), None) for model, each in pairs if (source := weights_of(model, each))
    ]
    for source in dict.fromkeys(each for each in sources if each.kind == "hub"):
        with contextlib.suppress(WeightsError):  # which the campaign reports
            if hub.in_hub_cache(source):
                continue
        if (size := hub.download_bytes(source)) is None:
            continue
        what = f"{sized(size)} of {source.repo}" + (f" ({source.file})" if source.file else "")
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            say(f"downloads {what}")
            continue
        print(
            f"harness: download {what} to {hub.cache_of_hub()}? [Y/n] ", end="", file=sys.stderr, flush=True
        )
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise Mistake(f"{source.repo}: not downloaded, so nothing is measured")


def _say_what_is_built(experiment: Experiment) -> None:
    """Say which environments are missing, so that they are built first."""
    family = experiment.device.partition(":")[0]
    used = {variant.stack for _, variant, _ in experiment.combinations()}
    wanted = {stack: stacks()[stack].environment_for(family) for stack in sorted(used)}
    missing = [stack for stack, environment in wanted.items() if environment and not build.find(environment)]
    if missing:
        say(f"{list_named(missing, 4)}: not built here yet: built first, once")
