"""A pack for a machine without a network: what is in it, and what `install.sh` does with good and bad ones.
The packages are made here; the real ones are packed in test_offline."""

from __future__ import annotations

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

from harness.stacks.pack import build
from harness.stacks.pack.wheels import Have, PackError, Target, have

pytestmark = pytest.mark.xdist_group("pack")
ROOT = Path(__file__).parent.parent
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HERE = Target(PYTHON, f"manylinux_2_17_{platform.machine()}")
BACKEND = """
import os, shutil, sys
def build_wheel(folder, *_):
    if "Fill" in os.environ.get("CMAKE_ARGS", ""):
        with open(os.path.join(folder, "large"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    if "Refuse" in os.environ.get("CMAKE_ARGS", ""):
        print("a.cpp:3:10: fatal error: no.h: No such file or directory", flush=True)
        raise OSError("the compiler ended with 1")
    made = os.path.join(os.path.dirname(__file__), "compiled-1.0-py3-none-linux_x86_64.whl")
    shutil.copy(made, folder)
    return os.path.basename(made)
"""
PROJECT = '[build-system]\nrequires = ["tools"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
DEPENDENCIES = '["tiny-good[more]==1.0", "compiled==1.0", "there==2.0"]'


def wheel(
    folder: Path,
    name: str,
    needs: Sequence[str] = (),
    files: dict[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    path, info = folder / f"{name}-1.0-{tag}.whl", f"{name}-1.0.dist-info"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {f"{name}.py": f"tag = {tag!r}\n"} | (files or {})
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n"
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def source(folder: Path, name: str, files: dict[str, str | bytes]) -> Path:
    """A source distribution of these files."""
    (top := folder / f"{name}-1.0").mkdir()
    for inside, content in files.items():
        (top / inside).parent.mkdir(parents=True, exist_ok=True)
        (top / inside).write_bytes(content if isinstance(content, bytes) else content.encode())
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(top, top.name)
    shutil.rmtree(top)
    return path


def lock(runners: Path, packages: dict[str, Path]) -> None:
    """Write the lock of the tiny stack."""
    lines = [
        f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for name, path in packages.items()
    ]
    (runners / "locks" / "tiny.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packages, and the stack `tiny`, which is the fake and needs some of them; nothing else can be had."""
    root = tmp_path_factory.mktemp("index")
    (folder := root / "wheels").mkdir()
    commands = {
        "tiny_good.py": "def main():\n    print('tiny')\n",
        "tiny_good-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny_good:main\n",
    }
    scripts = {"tiny_good-1.0.data/scripts/where": "#!python\nimport sys\nprint(sys.prefix)\n"}
    old = 'older; python_version < "3"'
    wheel(folder, "tiny_good", ["deep>=1; extra == 'more'", "there>=1", old], commands | scripts)
    wheel(folder, "deep", ["there>=3"])
    wheel(folder, "tools")
    built = wheel(root, "compiled", tag="py3-none-linux_x86_64")
    packed = {"PKG-INFO": "Metadata-Version: 2.1\nName: compiled\nVersion: 1.0\nRequires-Dist: deep\n"}
    files = packed | {"pyproject.toml": PROJECT, "backend.py": BACKEND, built.name: built.read_bytes()}
    source(folder, "compiled", files)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "runners", runners := root / "runners", ignore=ignored)
    text = (
        (runners / "stacks" / "fake.py")
        .read_text()
        .replace("# dependencies = []", f"# dependencies = {DEPENDENCIES}")
    )
    text = text.replace('# device = "cpu"\n', '# device = "cpu"\n# source-builds = ["compiled"]\n', 1)
    text = text.replace("\nimport ", "\nimport compiled, deep, there, tiny_good\nimport ", 1)
    (runners / "stacks" / "tiny.py").write_text(text)
    lock(runners, {path.name.partition("-")[0]: path for path in folder.iterdir()})
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("HARNESS_RUNNERS", str(runners))
        variables.setenv("PIP_NO_INDEX", "1")
        variables.setenv("PIP_FIND_LINKS", str(folder))
        yield folder


def freeze(*more: str) -> str:
    """What this Python has, and more."""
    ours = [f"{each.name}=={each.version}" for each in importlib.metadata.distributions()]
    return "\n".join([*ours, "cmake", "ninja  # the programs", *more])


HAS = "there @ file:///croot/there-2.5-py3-none-any.whl"


@pytest.fixture(scope="module")
def made(index: Path) -> Path:
    """A pack of the tiny stack, for a Python that has `there` and all that the controller needs."""
    folder = index.parent / "pack"
    build.pack(folder, ["tiny"], HERE, have(freeze(HAS), "have.txt"), lambda line: None)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the pack, for a test to damage."""
    return Path(shutil.copytree(made, tmp_path / "copied"))


@pytest.fixture(scope="module")
def python(index: Path) -> Path:
    """The Python that is there: an environment, with `there` and the controller's packages."""
    folder = index.parent / "python"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel(index.parent, "there")) as archive:
        archive.extractall(site)
    (site / "there-1.0.dist-info").rename(info := site / "there-2.5.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: there\nVersion: 2.5\n")
    ours = Path(pytest.__file__).parent.parent
    (site / "ours.pth").write_text(f"{ours}\n")
    return folder / "bin" / "python"


@pytest.fixture
def install(tmp_path: Path, python: Path) -> Callable[..., Ran]:
    """Runs a pack's install.sh, with the Python that is there and to tmp_path/there unless told otherwise."""

    def run(folder: Path, *words: str | Path, **variables: str) -> Ran:
        given = {"--python": python, "--to": tmp_path / "there"} | dict(
            zip(words[::2], words[1::2], strict=False)
        )
        command = ["sh", folder / "install.sh", *(word for pair in given.items() for word in pair if word)]
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables, timeout=300
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


@pytest.fixture(autouse=True)
def _own_adoptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


# Installing


def test_a_pack_is_installed_compiled_and_adopted_beside_the_python_that_is_there(
    made, install, tmp_path, config
):
    ran = install(made)
    assert ran.code == 0, ran.err
    command, stack = tmp_path / "there" / "bin" / "harness", tmp_path / "there" / "stacks" / "tiny"
    listed = subprocess.run(
        [command, "env", "list", "tiny", "--device", "cpu", "--json"], capture_output=True, text=True
    )
    (line,) = json.loads(listed.stdout)
    assert line["python"] == str(stack / "bin" / "python")
    assert line["lock"] == ["compiled==1.0", "deep==1.0", "there==2.5", "tiny_good==1.0"]
    assert line["pins_not_met"] == ["there 2.5, pinned 2.0"]
    where = subprocess.run([stack / "bin" / "where"], capture_output=True, text=True)
    assert where.stdout.strip() == str(stack)  # not the temporary folder that it was made in
    assert subprocess.check_output([stack / "bin" / "tiny"], text=True) == "tiny\n"
    path = config({"stack": "tiny", "B_ms": 1.0})
    measured = subprocess.run([command, "run", path, "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert [row["status"] for row in json.loads(measured.stdout)] == ["ok"], measured.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    again = install(made)
    assert again.code == 0, again.err
    assert again.out.startswith("already in ")


@pytest.mark.slow("installs a pack twice")
def test_what_is_compiled_in_the_background_is_waited_for_by_the_next_install(made, install, tmp_path):
    ran = install(made, "--background", "")
    assert ran.code == 0, ran.err
    assert "compiling tiny in the background; install.sh again waits for it" in ran.out
    assert install(made).code == 0
    assert (tmp_path / "cache" / "adopted" / "tiny-cpu.json").exists()


def test_what_cannot_be_compiled_is_a_sentence_and_the_harness_works(made, install, tmp_path):
    ran = install(made, CMAKE_ARGS="Refuse")
    assert ran.code == 1
    log = tmp_path / "there" / "stacks" / "tiny.log"
    why = "python -I build.py ended with 1: a.cpp:3:10: fatal error: no.h: No such file or directory"
    assert ran.err == f"install.sh: tiny could not be compiled: {why}; log: {log}\n"
    assert sorted((tmp_path / "there" / "stacks").iterdir()) == [log]
    assert not (tmp_path / "cache" / "adopted").exists()
    assert subprocess.run([tmp_path / "there" / "bin" / "harness", "--version"]).returncode == 0
    assert install(made).code == 0  # the compiler was changed


def test_without_uv_a_build_names_what_there_is_instead(harness, monkeypatch):
    monkeypatch.setitem(sys.modules, "uv", None)
    ran = harness("env", "create", "fake")
    why = "no environment can be built without uv; adopt an interpreter: harness env use"
    assert (ran.code, ran.err) == (1, f"harness: {why}\n")


# A pack or a machine that is not as it must be: one sentence, and nothing is installed


def refused(ran: Ran, tmp_path: Path, why: str) -> None:
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("install.sh: ")
    assert why in ran.err
    assert [path for path in tmp_path.iterdir() if "there" in path.name] == []


def cut(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-100])
    size = path.stat().st_size
    return f"{path} is cut short: {size} of {size + 100} bytes; copy the pack again"


def change(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return f"{path} is damaged: its SHA-256 is not that of the manifest; copy the pack again"


def remove(path: Path) -> str:
    path.unlink()
    return f"{path}: No such file or directory; copy the pack again"


@pytest.mark.parametrize("damage", [cut, change, remove])
def test_a_damaged_package_is_named_and_nothing_is_installed(copied, install, tmp_path, damage):
    why = damage(max((copied / "packages").iterdir()))
    refused(install(copied), tmp_path, why)


def test_a_manifest_of_another_pack_is_refused(copied, install, tmp_path):
    change(copied / "manifest.json")
    refused(install(copied), tmp_path, "manifest.json is damaged, or of another pack than this install.sh")


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.9, 0.999])
def test_an_install_sh_cut_short_does_nothing(copied, install, tmp_path, share):
    script = copied / "install.sh"
    script.write_bytes(script.read_bytes()[: int(script.stat().st_size * share)])
    install(copied)
    assert [path for path in tmp_path.iterdir() if "there" in path.name] == []


def retarget(folder: Path, target: Target) -> None:
    """Make a pack one for another target."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["target"] |= {"python": target.python, "platform": target.platform}
    (folder / "manifest.json").write_text(text := json.dumps(manifest))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "install.sh").write_text(build.script(target, digest))


OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(platform.machine(), "x86_64")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            Target("3.99", HERE.platform),
            f"this pack is for Python 3.99, and PYTHON is {PYTHON}; name another",
        ),
        (Target(PYTHON, f"manylinux_2_17_{OTHER}"), f"this pack is for {OTHER}, and this machine is"),
        (Target(PYTHON, f"manylinux_2_99_{platform.machine()}"), "this pack is for glibc 2.99 or newer, and"),
    ],
)
def test_a_pack_for_another_machine_is_refused(copied, install, tmp_path, python, target, why):
    retarget(copied, target)
    refused(install(copied), tmp_path, why.replace("PYTHON", str(python)))


def test_a_python_without_what_the_pack_leaves_out_is_refused_by_name(made, install, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    bare = tmp_path / "bare" / "bin" / "python"
    ran = install(made, "--python", bare)
    refused(ran, tmp_path, f"{bare} lacks ")
    assert "there, " in ran.err
    assert "cmake" not in ran.err or not shutil.which("cmake")


@pytest.mark.parametrize("python", ["/bin/true", "/no/such/python", "/"])
def test_what_is_no_python_is_refused(made, install, tmp_path, python):
    refused(install(made, "--python", python), tmp_path, f"{python} is no Python that runs here")


@pytest.mark.slow("installs a pack")
def test_a_python_that_prints_when_it_starts_is_used(made, install, tmp_path, python):
    loud = tmp_path / "loud"
    loud.write_text(f'#!/bin/sh\necho "module loaded: 3.2"\nexec {python} "$@"\n')
    loud.chmod(0o755)
    assert install(made, "--python", loud).code == 0


def test_a_full_disk_is_a_sentence_and_nothing_is_left_on_it(made, install, small_disk):
    disk = small_disk("1M")
    ran = install(made, "--to", disk / "folder")
    assert (ran.code, ran.err) == (
        2,
        f"install.sh: {disk}/folder: No space left on device; nothing was installed\n",
    )
    assert list(disk.iterdir()) == []


@pytest.mark.slow("installs a pack twice")
def test_a_disk_that_is_full_while_compiling_is_a_sentence_and_the_harness_works(made, install, small_disk):
    disk = small_disk("40M")
    ran = install(made, "--to", disk / "folder", CMAKE_ARGS="Fill")
    assert ran.code == 1
    stacks = disk / "folder" / "stacks"
    assert ran.err == f"install.sh: tiny could not be compiled: {stacks}: No space left on device\n"
    assert list(stacks.iterdir()) == []
    assert install(made, "--to", disk / "folder").code == 0


def test_a_folder_of_something_else_is_left_alone(made, install, tmp_path):
    (tmp_path / "home").mkdir()
    ran = install(made, "--to", tmp_path / "home")
    assert ran.code == 2
    assert f"{tmp_path}/home exists and is not of this pack" in ran.err
    assert list((tmp_path / "home").iterdir()) == []


# What is packed


def test_the_manifest_has_the_size_and_the_hash_of_every_file_and_what_is_left_out(made):
    manifest = json.loads((made / "manifest.json").read_text())
    assert {each["name"] for each in manifest["files"]} == {
        f"packages/{path.name}" for path in (made / "packages").iterdir()
    }
    for each in manifest["files"]:
        content = (made / each["name"]).read_bytes()
        assert (each["bytes"], each["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    tiny = manifest["environments"]["tiny"]
    assert tiny["wheels"] == ["packages/deep-1.0-py3-none-any.whl", "packages/tiny_good-1.0-py3-none-any.whl"]
    assert tiny["sources"] == ["packages/compiled-1.0.tar.gz"]
    assert tiny["expects"] == {"there": "2.5"}
    assert manifest["environments"]["build"]["wheels"] == ["packages/tools-1.0-py3-none-any.whl"]
    assert {"cmake": None, "ninja": None}.items() <= manifest["environments"]["build"]["expects"].items()
    (own,) = manifest["environments"]["controller"]["wheels"]
    assert own.startswith("packages/harness-")


def test_the_wheel_of_the_project_has_its_files_its_locks_and_its_command(made):
    (path,) = (made / "packages").glob("harness-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        assert "harness = harness.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
        record = [line.partition(",")[0] for line in wheel.read(f"{info}/RECORD").decode().splitlines()]
    assert set(record) == names
    assert {"harness/data/configs/quickstart.yaml", "runners/locks/hf.txt"} <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow("packs again")
def test_packs_of_the_same_packages_are_the_same_bytes(made, tmp_path):
    build.pack(tmp_path / "again", ["tiny"], HERE, have(freeze(HAS), "have.txt"), lambda line: None)
    assert (tmp_path / "again" / "install.sh").read_bytes() == (made / "install.sh").read_bytes()


def test_the_command_says_how_large_a_pack_is_and_what_to_do_with_it(harness, index, tmp_path):
    (tmp_path / "have.txt").write_text(freeze("there==2.5"))
    words = ("env", "pack", "out", "tiny", "--platform", HERE.platform, "--have", "have.txt")
    ran = harness(*words)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0].startswith("out: 5 packages, ")
    assert "tiny: 3 packages, 0.0 MB; there already: 1" in ran.out
    assert "note: tiny: there 2.5 is there; there==2.0 is what is tested" in ran.out
    assert "copy out to the machine; there: sh out/install.sh" in ran.out
    again = harness(*words)
    assert (again.code, again.err) == (2, "harness: out exists; name a new folder\n")


def test_without_names_all_stacks_are_packed_whose_packages_can_be_had(harness, index, tmp_path):
    (tmp_path / "have.txt").write_text(freeze("there==2.0"))
    ran = harness("env", "pack", "out", "--platform", HERE.platform, "--have", "have.txt", "--json")
    assert ran.code == 0, ran.err
    (manifest,) = ran.json
    assert list(manifest["environments"]) == ["controller", "tiny", "build"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--python", "2.7"], "--python 2.7: expected a version such as 3.12, from 3.10 on"),
        (["--platform", "win_amd64"], "--platform win_amd64: expected manylinux_2_NN_x86_64 or"),
        (["--cuda", "thirteen"], "--cuda thirteen: expected a version such as 13.0"),
        (["--have", "nowhere.txt"], "--have nowhere.txt: cannot be read: No such file or directory"),
        (["--have", "bad.txt"], "bad.txt:2: '<<<<<<< HEAD' is not a line of `pip freeze`"),
        (["nosuch"], "unknown stack nosuch; there are"),
        (["autoawq"], "stack autoawq cannot be packed: autoawq is built beside torch"),
        (["fake"], "stack fake has nothing to pack for cpu"),
        (["gptqm", "--python", "3.10"], "stack gptqm needs Python >=3.11, not 3.10"),
        (["tiny"], "there==2.0 cannot be fetched for Python"),
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
    assert ran.err.splitlines()[-1].startswith("harness: ")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_package_that_is_not_the_one_of_the_lock_is_not_packed(harness, index, tmp_path, monkeypatch):
    runners = Path(shutil.copytree(index.parent / "runners", tmp_path / "runners"))
    monkeypatch.setenv("HARNESS_RUNNERS", str(runners))
    lock(runners, {"deep": index / "tools-1.0-py3-none-any.whl"})
    (tmp_path / "have.txt").write_text(freeze("there==2.5"))
    ran = harness("env", "pack", "out", "tiny", "--platform", HERE.platform, "--have", "have.txt")
    assert ran.code == 2
    assert "deep==1.0 cannot be fetched" in ran.err
    assert not (tmp_path / "out").exists()


# What the target has


def test_what_pip_freeze_prints_is_understood():
    text = (
        "# comment\nNumPy==2.1.0\ntorch==2.11.0+cu130\ncmake\n"
        "scipy @ file:///croot/scipy_1/work/dist/scipy-1.15.2-cp312-cp312-linux_x86_64.whl#sha256=9\n"
        "pandas @ file:///croot/pandas/work\n-e git+https://host/a.git@0f#egg=My_Tool\n\n"
    )
    there = have(text, "x")
    assert there.versions == {
        "numpy": "2.1.0",
        "torch": "2.11.0+cu130",
        "cmake": None,
        "scipy": "1.15.2",
        "pandas": None,
        "my-tool": None,
    }
    assert there.cuda() == "13.0"
    assert Have({"torch": "2.13.0"}).cuda() is None


def test_a_version_that_is_too_old_for_a_packed_package_is_packed_anew(index, tmp_path):
    text = freeze(HAS.replace("2.5", "3.5"), "deep==0.5")
    manifest, notes = build.pack(tmp_path / "out", ["tiny"], HERE, have(text, "x"), lambda line: None)
    assert manifest["environments"]["tiny"]["expects"] == {"there": "3.5"}  # deep needs there>=3
    assert "packages/deep-1.0-py3-none-any.whl" in manifest["environments"]["tiny"]["wheels"]
    assert notes == ["tiny: there 3.5 is there; there==2.0 is what is tested"]


# What is left out of packages


@pytest.mark.parametrize(
    ("device", "cuda", "kept"),
    [
        ("cpu", None, ["cpu"]),
        ("cuda", "13.0", ["cpu", "cuda130"]),
        ("cuda", None, ["cpu", "cuda126", "cuda130"]),
    ],
)
def test_bitsandbytes_keeps_the_libraries_of_the_device_and_lists_no_others(tmp_path, device, cuda, kept):
    names = ["cpu", "cuda126", "cuda130", "rocm64", "xpu2026"]
    files = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in names}
    (tmp_path / "out").mkdir()
    path = build.trimmed(
        wheel(tmp_path, "bitsandbytes", files=files),
        tmp_path / "out",
        Target(PYTHON, HERE.platform, device, cuda),
    )
    with zipfile.ZipFile(path) as archive:
        found = archive.namelist()
        record = archive.read("bitsandbytes-1.0.dist-info/RECORD").decode().splitlines()
    assert [name for name in found if name.endswith(".so")] == [
        f"bitsandbytes/libbitsandbytes_{name}.so" for name in kept
    ]
    assert sorted(line.partition(",")[0] for line in record) == sorted(found)


def test_a_cuda_version_that_bitsandbytes_lacks_is_a_sentence(tmp_path):
    made = wheel(tmp_path, "bitsandbytes", files={"bitsandbytes/libbitsandbytes_cuda130.so": ""})
    with pytest.raises(PackError, match=r"has no library for CUDA 14\.1; it has 13\.0"):
        build.trimmed(made, tmp_path, Target(PYTHON, HERE.platform, "cuda", "14.1"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_source_of_llama_cpp_has_no_models_docs_tests_and_other_backends(tmp_path, device):
    inside = "vendor/llama.cpp"
    kept = [
        "CMakeLists.txt",
        "llama_cpp/llama.py",
        f"{inside}/.git",
        f"{inside}/common/a.cpp",
        f"{inside}/ggml/src/ggml.c",
    ]
    kept += [f"{inside}/ggml/src/ggml-{each}/a.c" for each in dict.fromkeys(["cpu", device])]
    folders = ("models", "docs", "tests", "tools", "media", ".github", "ggml/src/ggml-vulkan", "gguf-py")
    files = [*kept, "docs/a.md", "tests/a.py", *(f"{inside}/{each}/a" for each in folders)]
    (tmp_path / "out").mkdir()
    path = source(tmp_path, "llama_cpp_python", dict.fromkeys(files, ""))
    build.trimmed(path, tmp_path / "out", Target(PYTHON, HERE.platform, device))
    with tarfile.open(tmp_path / "out" / path.name) as archive:
        assert sorted(archive.getnames()) == sorted(f"llama_cpp_python-1.0/{each}" for each in kept)
