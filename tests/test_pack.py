"""A pack for a machine without a network: what is in it, and what `install.sh` does with good and bad ones.
The packages are made here; the real ones are packed in test_offline."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Ran

from harness.stacks.build import uv_binary
from harness.stacks.pack import PackError, Target, have, pack

pytestmark = pytest.mark.xdist_group("pack")
ROOT = Path(__file__).parent.parent
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HERE = Target(PYTHON, f"manylinux_2_28_{platform.machine()}", "cpu")
BACKEND = """
import os, shutil
def build_wheel(folder, *_):
    if "Refuse" in os.environ.get("CMAKE_ARGS", ""):
        raise OSError("the compiler ended with 1")
    (made,) = [name for name in os.listdir(os.path.dirname(__file__)) if name.endswith(".whl")]
    shutil.copy(os.path.join(os.path.dirname(__file__), made), folder)
    return made
"""
PROJECT = '[build-system]\nrequires = ["tools"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
UV = importlib.metadata.version("uv")


def wheel(
    folder: Path,
    name: str,
    needs: Sequence[str] = (),
    files: dict[str, bytes] | None = None,
    tag: str = "py3-none-any",
    version: str = "1.0",
) -> Path:
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    texts = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    names = [*texts, *(files or {}), f"{info}/RECORD"]
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in names)
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in {**texts, **(files or {})}.items():
            archive.writestr(inside, content)
    return path


def source(folder: Path, name: str, tag: str) -> Path:
    """A source distribution whose build gives a wheel with this tag."""
    (top := folder / f"{name}-1.0").mkdir()
    wheel(top, name, tag=tag)
    (top / "PKG-INFO").write_text(f"Metadata-Version: 2.2\nName: {name}\nVersion: 1.0\n")
    (top / "pyproject.toml").write_text(PROJECT)
    (top / "backend.py").write_text(BACKEND)
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(top, top.name)
    shutil.rmtree(top)
    return path


def stack(runners: Path, name: str, dependencies: str, more: str = "") -> None:
    """The fake under another name, which imports these packages."""
    text = (runners / "stacks" / "fake.py").read_text()
    text = text.replace("# dependencies = []", f"# dependencies = {dependencies}")
    text = text.replace('# device = "cpu"\n', f'# device = "cpu"\n{more}', 1)
    (runners / "stacks" / f"{name}.py").write_text(text)


def lock(runners: Path, name: str, packages: dict[str, Path]) -> None:
    digests = {each: hashlib.sha256(path.read_bytes()).hexdigest() for each, path in packages.items()}
    lines = [f"{each}==1.0 \\\n    --hash=sha256:{digest}\n" for each, digest in digests.items()]
    (runners / "locks" / f"{name}.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packages, and two stacks that need some of them: `tiny` wheels, `native` what is compiled."""
    root = tmp_path_factory.mktemp("index")
    (folder := root / "wheels").mkdir()
    modules = [file for file in importlib.metadata.files("uv") or () if file.match("uv/*.py")]
    files = {str(module): Path(module.locate()).read_bytes() for module in modules}
    files[f"uv-{UV}.data/scripts/uv"] = Path(uv_binary()).read_bytes()
    uv = wheel(folder, "uv", files=files, version=UV)
    tools = wheel(folder, "tools")
    good = wheel(folder, "tiny_good", ["there>=1", "pure", 'older; python_version < "3"'])
    pure, native = source(folder, "pure", "py3-none-any"), source(folder, "compiled", "py3-none-linux_x86_64")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "runners", runners := root / "runners", ignore=ignored)
    stack(runners, "tiny", '["tiny-good==1.0", "there==2.0"]')
    stack(runners, "native", '["compiled==1.0"]', '# source-builds = ["compiled"]\n')
    lock(runners, "tiny", {"tiny-good": good, "pure": pure})
    lock(runners, "native", {"compiled": native})
    lock(runners, "build", {"tools": tools})
    for name in ("harness", "pyproject.toml", "README.md", "LICENSE"):
        (root / name).symlink_to(ROOT / name)
    (root / "requirements").mkdir()
    digest = hashlib.sha256(uv.read_bytes()).hexdigest()
    (root / "requirements" / "dev.txt").write_text(f"uv=={UV} --hash=sha256:{digest}\n")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("HARNESS_RUNNERS", str(runners))
        for name in ("PIP_NO_INDEX", "UV_OFFLINE"):
            variables.setenv(name, "1")
        variables.setenv("UV_CACHE_DIR", str(root / "cache"))  # the user's may know of other packages
        variables.setenv("PIP_FIND_LINKS", str(folder))
        variables.setenv("UV_FIND_LINKS", str(folder))
        yield folder


def freeze(*more: str) -> str:
    """What this Python has, and more."""
    ours = [
        f"{distribution.name}=={distribution.version}" for distribution in importlib.metadata.distributions()
    ]
    return "\n".join([*(our for our in ours if not our.startswith("harness==")), "", *more])


@pytest.fixture(scope="module")
def made(index: Path) -> Path:
    """A pack of both stacks, for a Python that has `there` and all that the controller needs."""
    folder = index.parent / "pack"
    pack(folder, ["native", "tiny"], HERE, have(freeze("there==2.5  # conda's")), lambda line: None)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the pack, for a test to damage."""
    return Path(shutil.copytree(made, tmp_path / "copied", symlinks=True))


@pytest.fixture(scope="module")
def python(index: Path) -> Path:
    """The Python that is there: an environment, with `there` and the controller's packages."""
    folder = index.parent / "python"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel(index.parent, "there", version="2.5")) as archive:
        archive.extractall(site)
    ours = Path(pytest.__file__).parent.parent
    (site / "ours.pth").write_text(f"{ours}\n")
    return folder / "bin" / "python"


@pytest.fixture
def install(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a pack's install.sh, with the Python that is there and to tmp_path/there unless told otherwise."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):  # the pack has all that is needed
        monkeypatch.delenv(name)

    def run(folder: Path, *words: str | Path, **variables: str) -> Ran:
        given = ["--python", python, "--to", tmp_path / "there", *words]
        ran = subprocess.run(
            ["sh", folder / "install.sh", *given],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | variables,
            timeout=300,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


def refused(ran: Ran, tmp_path: Path, why: str) -> None:
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("install.sh: ")
    assert why in ran.err
    assert not (tmp_path / "there").exists()


# Installing


@pytest.mark.slow("installs a pack twice")
def test_a_pack_is_installed_beside_the_python_that_is_there_and_what_is_compiled_is_built(
    made, install, tmp_path
):
    ran = install(made)
    assert ran.code == 0, ran.err
    command = tmp_path / "there" / "bin" / "harness"
    listed = subprocess.run(
        [command, "env", "list", "tiny", "native", "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    tiny, native = json.loads(listed.stdout)
    assert tiny["python"] == str(tmp_path / "there" / "stacks" / "tiny" / "bin" / "python")
    assert tiny["lock"] == ["pure==1.0", "there==2.5", "tiny_good==1.0"]
    assert tiny["pins_not_met"] == ["there 2.5, pinned 2.0"]
    assert (native["state"], native["lock"]) == ("built", ["compiled==1.0"])
    again = install(made)
    assert again.code == 0, again.err


@pytest.mark.slow("installs a pack twice")
def test_a_stack_that_cannot_be_compiled_is_named_and_the_rest_works(made, install, tmp_path):
    ran = install(made, CMAKE_ARGS="Refuse")
    assert ran.code == 1
    assert "native/cpu could not be built" in ran.err
    assert "the compiler ended with 1" in ran.err
    assert (tmp_path / "cache" / "adopted" / "tiny-cpu.json").exists()
    assert subprocess.run([tmp_path / "there" / "bin" / "harness", "--version"]).returncode == 0
    assert install(made).code == 0  # the compiler was changed


# A pack or a machine that is not as it must be: nothing is installed


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_package_is_named_and_nothing_is_installed(copied, install, tmp_path, damage):
    damage(package := max((copied / "packages").iterdir()))
    ran = install(copied)
    refused(ran, tmp_path, "the pack is damaged; copy it again")
    assert package.name in ran.out + ran.err


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_an_install_sh_cut_short_does_nothing(copied, install, tmp_path, share):
    script = copied / "install.sh"
    script.write_bytes(script.read_bytes()[: int(script.stat().st_size * share)])
    install(copied)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("other", ["/bin/true", "/no/such/python"])
def test_what_is_no_python_is_refused(made, install, tmp_path, other):
    refused(install(made, "--python", other), tmp_path, f"and {other} is no Python that runs")


def test_another_version_of_python_is_refused(copied, install, tmp_path, python):
    script = copied / "install.sh"
    script.write_text(script.read_text().replace(f'= "{PYTHON}"', '= "3.99"'))
    refused(install(copied), tmp_path, f"and {python} is {PYTHON}")


def test_a_python_without_what_the_pack_leaves_out_is_refused(made, install, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    bare = tmp_path / "bare" / "bin" / "python"
    refused(install(made, "--python", bare), tmp_path, f"{bare} lacks ")


def test_a_full_disk_leaves_nothing_on_it(made, install, small_disk):
    disk = small_disk("1M")
    ran = install(made, "--to", disk / "folder")
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert ran.err.endswith("install.sh: nothing was installed\n")
    assert list(disk.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(made, install, tmp_path):
    (tmp_path / "home").mkdir()
    ran = install(made, "--to", tmp_path / "home")
    assert ran.code == 2
    assert f"{tmp_path}/home exists and is not of this pack" in ran.err
    assert list((tmp_path / "home").iterdir()) == []


# What is packed


def test_every_file_has_its_hash_and_what_is_there_is_left_out(made):
    sums = dict(reversed(line.split()) for line in (made / "SHA256SUMS").read_text().splitlines())
    files = {str(path.relative_to(made)): path for path in made.rglob("*") if path.is_file()}
    del files["SHA256SUMS"]
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    own, _, *others = sorted(path.name for path in (made / "packages").iterdir())
    assert own.startswith("batch1_harness-")
    assert others == [
        "pure-1.0-py3-none-any.whl",
        "tiny_good-1.0-py3-none-any.whl",
        "tools-1.0-py3-none-any.whl",
        f"uv-{UV}-py3-none-any.whl",
    ]
    assert (made / "packages" / "compiled-1.0.tar.gz").exists()
    assert (made / "tiny.txt").read_text() == "pure==1.0\ntiny-good==1.0"
    assert (made / "controller.txt").read_text() == f"uv=={UV}"


def test_the_wheel_of_the_project_has_its_files_its_locks_and_its_command(made):
    (path,) = (made / "packages").glob("batch1_harness-*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        assert "harness = harness.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    inside = {
        "harness/data/configs/quickstart.yaml",
        "harness/stacks/inside/install.sh",
        "runners/locks/hf.txt",
    }
    assert inside <= names


def test_the_command_says_how_large_a_pack_is_and_what_to_do_with_it(harness, index, tmp_path):
    (tmp_path / "have.txt").write_text(freeze("there==2.5"))
    words = ("env", "pack", "out", "tiny", "--platform", HERE.platform, "--have", "have.txt")
    ran = harness(*words)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0].startswith("out: 4 packages, ")
    assert "copy out to the machine; there: sh out/install.sh" in ran.out
    again = harness(*words)
    assert (again.code, again.err) == (2, "harness: out exists; name a new folder\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--python", "2.7"], "unknown Python 2.7; there are 3.10, "),
        (["--platform", "win_amd64"], "unknown platform win_amd64; there are manylinux_2_17_x86_64, "),
        (["--have", "nowhere.txt"], "--have nowhere.txt: cannot be read: No such file or directory"),
        (["--have", "bad.txt"], "--have: no line of `pip freeze`: "),
        (["nosuch"], "unknown stack nosuch; there are"),
        (["autoawq"], "stack autoawq cannot be packed: autoawq is built beside torch"),
        (["fake"], "stack fake has nothing to pack for cpu"),
        (["gptqm", "--python", "3.10"], "stack gptqm needs Python >=3.11,<3.14, not 3.10"),
        (["tiny"], "there==2.0"),
    ],
)
def test_what_cannot_be_packed_is_a_sentence_and_leaves_no_folder(harness, index, tmp_path, words, why):
    (tmp_path / "bad.txt").write_text("numpy==2.0\n<<<<<<< HEAD\n")
    (tmp_path / "have.txt").write_text(freeze())
    stacks = ["tiny"] if words[0].startswith("--") else []
    options = [] if "--have" in words else ["--have", "have.txt"]
    ran = harness("env", "pack", "out", *stacks, *words, *options)
    assert ran.code == 2
    assert why in ran.err
    assert ran.err.splitlines()[-1].startswith("harness")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_package_that_is_not_the_one_of_the_lock_is_not_packed(index, tmp_path, monkeypatch):
    root = Path(shutil.copytree(index.parent, tmp_path / "root", symlinks=True))
    monkeypatch.setenv("HARNESS_RUNNERS", str(runners := root / "runners"))
    lock(runners, "tiny", {"tiny-good": index / "tools-1.0-py3-none-any.whl"})
    with pytest.raises(PackError, match="DO NOT MATCH THE HASHES"):
        pack(tmp_path / "out", ["tiny"], HERE, have(freeze("there==2.5")), lambda line: None)


def test_what_pip_freeze_prints_is_understood():
    text = (
        "# comment\nNumPy==2.1.0\ntorch==2.11.0+cu130\ncmake\n"
        "scipy @ file:///croot/scipy-1.15.2-cp312-cp312-linux_x86_64.whl#sha256=9\n"
        "-e git+https://host/a.git@0f#egg=My_Tool\n\n"
    )
    assert have(text) == {"numpy": "2.1.0", "torch": "2.11.0+cu130", "cmake": None, "scipy": None}


# Without uv


def test_without_uv_a_build_names_what_there_is_instead(harness, monkeypatch, tmp_path):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "uv", None)
    ran = harness("env", "create", "fake")
    why = "no environment can be built without uv; adopt an interpreter: harness env use"
    assert (ran.code, ran.err) == (1, f"harness: {why}\n")
