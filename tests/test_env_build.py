"""Environments whose kernels are compiled: built by the real uv, of tiny packages made here; what does not
load is told."""

import hashlib
import json
import platform
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import shell_script

from harness import machine
from harness.stacks import build, compiler_faults
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Environment, parse, stacks

ROOT = Path(__file__).parent.parent
MODULES = ["tiny_good", "tiny_bad", "tiny_dies", "tiny_absent"]
GOOD = {"tiny_good": None}
BOTH = ("cpu", "cuda")
# A private build backend needs nothing from an index.
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
NOT_HERE = "raise OSError('CUDA_HOME environment variable is not set. Please set it.')"
RUNNER = """# /// script
# requires-python = ">=3.10"
# [tool.harness]
# summary = "x"
# weights = "none"
{tables}
# ///
import tiny_good

DOES_NOT_FIT = ()


def probe(request, say):
    return {{"kernels": {{"fast": None, "marlin": "needs compute capability 8.0; this GPU has 7.5"}}}}
"""


def wheel(folder: Path, name: str, files: dict[str, str], version: str = "1.0", needs: str = "") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def source(folder: Path, name: str, before: str) -> Path:
    """A package whose build runs `before` and then makes a wheel of one module, of the package's name."""
    made = folder / name
    made.mkdir()
    (made / "pyproject.toml").write_text(PROJECT)
    ready = wheel(made, name, {f"{name}.py": ""})
    copy = f"    import shutil\n    shutil.copy({str(ready)!r}, directory)\n    return {ready.name!r}\n"
    (made / "backend.py").write_text(f"def build_wheel(directory, *_):\n    {before}\n{copy}")
    return made


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Environment]]:
    """Environments for cpu and cuda of three packages made here, in a cache of the test's own:
    `environment(isolated=True, optional="raise OSError('no')")`. The runner is left in tmp_path."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    modules = {
        "tiny_good.py": "",
        "tiny_bad.so": "this is no machine code",
        "tiny_dies.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    }
    kernels = wheel(tmp_path, "tiny_kernels", modules)
    # As autoawq does: its build imports what is installed before it.
    beside = source(tmp_path, "built_beside", "import tiny_good")

    def make(isolated: bool = False, optional: str = NOT_HERE) -> dict[str, Environment]:
        extra = source(tmp_path, "nice_to_have", optional)
        keys = [
            f'dependencies = ["built_beside @ {beside.as_uri()}", "tiny-kernels @ {kernels.as_uri()}"]',
            f'optional = ["nice-to-have @ {extra.as_uri()}"]',
            f"imports = {json.dumps(MODULES)}",
            *([] if isolated else ['no-build-isolation = ["built-beside"]']),
        ]
        tables = [[f"[tool.harness.env.{of}]", f'device = "{of}"', *keys] for of in ("cpu", "cuda")]
        lines = "\n".join(f"# {line}" for table in tables for line in table)
        runner = RUNNER.format(tables=lines)
        (tmp_path / "tiny.py").write_text(runner)
        return parse("tiny", runner).environments

    return make


def test_what_does_not_load_is_told_and_kept_and_the_rest_works(environment):
    said: list[str] = []
    made = build.create(environment()["cpu"], said.append)
    assert list(made.imports) == MODULES
    assert made.imports | GOOD == made.imports
    assert made.imports["tiny_bad"].startswith("tiny_bad.so: ")  # not where it lies on this machine
    assert made.imports["tiny_dies"] == "its import is killed by SIGSEGV"
    assert made.imports["tiny_absent"] == "No module named 'tiny_absent'"
    told = "kernel module tiny_absent of tiny/cpu does not load: No module named 'tiny_absent'"
    assert told in made.gaps()
    assert set(made.gaps()) < set(said)
    assert not any("tiny_good" in gap for gap in made.gaps())
    assert build.find(made.environment) == made
    assert not subprocess.run([made.python, "-I", "-c", "import tiny_good, built_beside"]).returncode


def test_a_package_whose_build_needs_the_others_finds_them_only_out_of_isolation(environment):
    why = r"tiny/cpu could not be built: .*No module named 'tiny_good'"
    with pytest.raises(EnvironmentFailed, match=why):
        build.create(environment(isolated=True)["cpu"], lambda line: None)


def test_a_package_compiled_here_is_not_the_one_compiled_for_another_device(tmp_path, monkeypatch):
    """uv caches builds by name and version alone, not by the variables of the build."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        wheel(tmp_path / device, "compiled", {"compiled.py": f"device = {device!r}\n"})
    name = "compiled-1.0-py3-none-any.whl"
    copy = f"import os, shutil; shutil.copy(os.environ['BUILD'] + '/{name}', directory); return {name!r}"
    made = source(tmp_path, "compiled", copy).rename(tmp_path / "compiled-1.0")
    (made / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: compiled\nVersion: 1.0\n")
    with tarfile.open(tmp_path / "compiled-1.0.tar.gz", "w:gz") as archive:
        archive.add(made, made.name)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_OFFLINE", "1")
    lines = [
        f"# [tool.harness.env.{device}]\n# device = {device!r}\n# dependencies = ['compiled==1.0']\n"
        f"# source-builds = ['compiled']\n# variables = {{ BUILD = {str(tmp_path / device)!r} }}"
        for device in ("cpu", "cuda")
    ]
    for device, each in parse("tiny", RUNNER.format(tables="\n".join(lines))).environments.items():
        python = build.create(each, lambda line: None).python
        shows = [python, "-c", "import compiled; print(compiled.device)"]
        assert subprocess.run(shows, capture_output=True, text=True).stdout == f"{device}\n"


@pytest.mark.parametrize(
    ("build_says", "reason"),
    [
        (NOT_HERE, "OSError: CUDA_HOME environment variable is not set. Please set it."),
        # flash-attn without a network: the failed download is not the reason of the failed build.
        ("raise RuntimeError('13 is not 12') from OSError('offline')", "RuntimeError: 13 is not 12"),
        (f"print('k.cu(3): error: no such type'); {NOT_HERE}", "k.cu(3): error: no such type"),
        # The line of code that raises it, in the traceback, is not what was said.
        ("raise OSError(f'error: {40 + 2}')", "OSError: error: 42"),
    ],
)
def test_a_package_it_can_do_without_is_lacking_for_the_reason_its_build_gave(
    environment, build_says, reason
):
    made = build.create(environment(optional=build_says)["cpu"], lambda line: None)
    ((package, why),) = made.lacking.items()
    assert package == "nice-to-have"
    assert why.startswith(f"uv pip install ended with 1: {reason}")
    assert "; log: " in why
    assert f"tiny/cpu lacks nice-to-have: {why}" in made.gaps()
    assert [line.partition(" @ ")[0] for line in made.lock] == ["built-beside", "tiny-kernels"]


def test_a_package_it_can_do_without_is_installed_where_that_can_be(environment):
    made = build.create(environment(optional="pass")["cpu"], lambda line: None)
    assert made.lacking == {}
    names = [line.partition(" @ ")[0] for line in made.lock]
    assert names == ["built-beside", "nice-to-have", "tiny-kernels"]


def test_a_package_that_takes_too_long_to_build_is_given_up(environment, monkeypatch):
    monkeypatch.setattr(build, "OPTIONAL_LIMIT_S", 3.0)
    made = build.create(environment(optional="import time; time.sleep(600)")["cpu"], lambda line: None)
    assert made.lacking["nice-to-have"].startswith("uv pip install took longer than 0.05 min; log: ")
    assert made.imports["tiny_good"] is None


def nvcc(folder: Path, version: str) -> Path:
    """A compiler of CUDA that only reports its version."""
    words = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"
    return shell_script(folder / "nvcc", f'[ "$1" = --version ] && echo "{words}"')


def test_a_build_for_cuda_is_for_the_cards_and_the_toolkit_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(nvcc(tmp_path / "12", "12.8.93").parent))
    monkeypatch.delenv("CUDACXX", raising=False)
    compiled, plain = stacks()["llamacpp"].environments, stacks()["hf"].environments["cuda"]
    header = compiled["cuda"].variables["CMAKE_ARGS"]

    def here(*capabilities: str) -> Environment:
        monkeypatch.setattr(build, "compute_capabilities", lambda: [*capabilities])
        made = build.for_this_machine(compiled["cuda"])
        assert build.for_this_machine(made) == made
        return made

    both = here("8.9", "12.0")
    assert both.variables["CMAKE_ARGS"] == f"{header} -DCMAKE_CUDA_ARCHITECTURES=89;120"
    assert both.toolkit == "12.8.93"
    assert here().variables == compiled["cuda"].variables  # its build then decides
    swapped = here("9.0")
    nvcc(tmp_path / "13" / "bin", "13.0.48")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "13"))
    assert here("9.0") == swapped  # as CMake does: PATH first
    monkeypatch.setenv("CUDACXX", f"{tmp_path}/13/bin/nvcc -ccbin g++-13")
    newer = here("9.0")
    assert newer.toolkit == "13.0.48"
    monkeypatch.setenv("CUDACXX", str(tmp_path / "gone"))
    assert here("9.0").toolkit == ""
    assert len({build.key_of(each) for each in (compiled["cuda"], both, swapped, newer)}) == 4
    for other in (compiled["cpu"], compiled["hip"], plain):
        assert build.for_this_machine(other) == other


def test_the_build_of_a_cuda_environment_gets_the_architectures_and_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{nvcc(tmp_path / 'bin', '13.0.48').parent}:/usr/bin:/bin")
    monkeypatch.setattr(build, "compute_capabilities", lambda: ["9.0"])
    look = "import os; assert os.environ['CMAKE_ARGS'] == '-DX=1 -DCMAKE_CUDA_ARCHITECTURES=90'"
    made = source(tmp_path, "compiled", look)
    lines = (
        "# [tool.harness.env.cuda]\n# device = 'cuda'\n# variables = { CMAKE_ARGS = '-DX=1' }\n"
        f"# dependencies = ['compiled @ {made.as_uri()}']\n# source-builds = ['compiled']"
    )
    environment = parse("tiny", RUNNER.format(tables=lines)).environments["cuda"]
    built = build.create(environment, lambda line: None)
    assert built.environment.toolkit == "13.0.48"
    assert build.find(environment) == built
    monkeypatch.setattr(build, "compute_capabilities", lambda: ["12.0"])  # another card
    assert build.find(environment) is None


@pytest.mark.parametrize(
    ("build_of", "driver", "why"),
    [
        ("cpu", "470.57.02", "driver 470.57.02 runs no build of torch 2.0 for CUDA; install a newer driver"),
        ("cpu", None, "uv found no NVIDIA driver and installed torch 2.0 for cpu; install the driver, or "),
        ("xpu", None, "uv found no NVIDIA driver and installed torch 2.0 for xpu; install the driver, or "),
        ("cu126", "535.54", None),
    ],
)
def test_a_cuda_environment_that_uv_gave_a_torch_without_cuda_is_one_sentence(
    tmp_path, monkeypatch, build_of, driver, why
):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setattr(build, "nvidia_gpus", lambda: [{"driver": None}, {"driver": driver}])
    wheel(tmp_path, "torch", {"torch.py": ""}, f"2.0+{build_of}")
    tables = [f"# [tool.harness.env.{of}]\n# device = '{of}'\n# dependencies = ['torch==2.0']" for of in BOTH]
    on_cpu, on_gpu = parse("tiny", RUNNER.format(tables="\n".join(tables))).environments.values()
    assert build.create(on_cpu, lambda line: None).lock == (f"torch==2.0+{build_of}",)
    if why is None:
        assert build.create(on_gpu, lambda line: None) == build.find(on_gpu)
        return
    with pytest.raises(EnvironmentFailed) as failed:
        build.create(on_gpu, lambda line: None)
    assert str(failed.value).startswith(f"environment tiny/cuda could not be built: {why}")
    assert build.find(on_gpu) is None


def test_a_python_that_is_not_here_is_named(environment, tmp_path):
    environment()
    header = (tmp_path / "tiny.py").read_text().replace(">=3.10", ">=3.6,<3.7")
    ours = platform.python_version()
    expected = rf"environment tiny/cpu needs Python >=3.6,<3.7; uv found none here \(.* on {ours}\): "
    with pytest.raises(EnvironmentFailed, match=expected):
        build.create(parse("tiny", header).environments["cpu"], lambda line: None)


def test_an_environment_of_plain_packages_keeps_its_key():
    """Another key is a rebuild, which takes minutes."""
    for header in stacks().values():
        for each in header.environments.values():
            if each.unisolated or each.optional or each.imports or each.source_builds or each.without:
                continue
            asked = [each.dependencies, [], sorted(each.variables.items()), each.requires_python]
            asked += [platform.python_version(), platform.machine(), ""]
            if locks := [hashlib.sha256(lock.read_bytes()).hexdigest() for lock in each.locks()]:
                asked.append(["locks", locks])
            assert build.key_of(each) == hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def test_a_package_that_another_requires_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    needy = wheel(tmp_path, "tiny_needy", {"tiny_needy.py": ""}, needs="Requires-Dist: tiny-absent\n")
    keys = ['device = "cpu"', f'dependencies = ["tiny-needy @ {needy.as_uri()}"]']
    environments = [
        parse("tiny", RUNNER.format(tables="\n".join(f"# {line}" for line in table))).environments["cpu"]
        for table in (
            ["[tool.harness.env.cpu]", *keys],
            ["[tool.harness.env.cpu]", *keys, 'without = ["tiny-absent"]'],
        )
    ]
    with pytest.raises(EnvironmentFailed, match="tiny-absent"):
        build.create(environments[0], lambda line: None)
    made = build.create(environments[1], lambda line: None)
    assert [each.split("=")[0].split(" ")[0] for each in made.lock] == ["tiny-needy"]


def test_each_thing_asked_for_is_in_the_key(environment):
    asked = environment()["cpu"]
    without = [asked.model_copy(update={name: ()}) for name in ("unisolated", "optional", "imports")]
    assert len({build.key_of(each) for each in (asked, *without)}) == 4


def test_an_environment_that_an_earlier_version_built_is_found(environment):
    made = build.create(environment()["cpu"], lambda line: None)
    (made.python.parent.parent / "complete.json").write_text(json.dumps(made.lock))
    found = build.find(made.environment)
    assert (found.lock, found.imports, found.lacking) == (made.lock, {}, {})


@pytest.mark.slow("builds environments")
def test_env_says_which_kernels_load_and_why_others_do_not(environment, command, tmp_path):
    if machine.facts()["gpus"]:
        pytest.skip("a machine with an NVIDIA GPU")
    environment()
    ours = tmp_path / "ours"  # the project, and a stack that is not in it
    for package in ("harness", "runners"):
        shutil.copytree(ROOT / package, ours / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tmp_path / "tiny.py", ours / "runners" / "stacks" / "tiny.py")
    variables = {"PYTHONPATH": str(ours)}

    for device in ("cpu", "cuda"):
        created = command("env", "create", "tiny", "--device", device, **variables)
        assert created.code == 0
        assert f"kernel module tiny_absent of tiny/{device} does not load: No module" in created.out
        assert f"tiny/{device} lacks nice-to-have: " in created.out

    listed, _ = command("env", "list", "tiny", "--json", **variables).json
    assert listed["imports"] | GOOD == listed["imports"]
    assert listed["imports"]["tiny_absent"] == "No module named 'tiny_absent'"
    assert list(listed["lacking"]) == ["nice-to-have"]
    assert listed["kernels"] is None

    checked = command("env", "check", "tiny", "--json", **variables)
    assert checked.code == 0  # a missing package is no failure of the others
    cpu, cuda = checked.json
    assert (cpu["state"], cpu["unavailable"]) == ("works", None)
    assert cpu["kernels"] == {"fast": None, "marlin": "needs compute capability 8.0; this GPU has 7.5"}
    assert cuda["unavailable"] == "no NVIDIA GPU or driver on this machine"
    assert (cuda["kernels"], cuda["imports"]) == (None, cpu["imports"])

    lines = command("env", "check", "tiny", **variables).out.splitlines()
    of_cpu, of_cuda = (lines[: len(lines) // 2 + 1], lines[len(lines) // 2 + 1 :])
    assert "    kernel fast: works" in of_cpu
    assert "    kernel marlin: needs compute capability 8.0; this GPU has 7.5" in of_cpu
    assert "    kernel module tiny_good: loads" in of_cpu
    idle = "loads; cannot run: no NVIDIA GPU or driver on this machine"
    assert f"    kernel module tiny_good: {idle}" in of_cuda
    assert "    kernel module tiny_absent: does not load: No module named 'tiny_absent'" in of_cuda


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "sudo apt install g++"),
        ("dnf", "sudo dnf install gcc-c++"),
        (None, "install g++ or clang++"),
    ],
)
def test_without_a_compiler_the_sentence_names_the_package(monkeypatch, tmp_path, manager, command):
    (tmp_path / "bin").mkdir()
    if manager:
        shell_script(tmp_path / "bin" / manager, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentFailed) as refusal:
        build.create(stacks()["llamacpp"].environments["cpu"], lambda line: None)
    assert str(refusal.value) == (
        f"llamacpp/cpu is compiled here, and there is no C++ compiler: {command}; --stacks"
        " llamaserver needs none, and measures speed alone"
    )


# Compilers that are known to be at fault

AMX = "flags : fpu amx_bf16 amx_int8"
GCC_12 = 'void f(void) { __asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*((const void **)__config))); }'
GCC_14 = "void f(void) { __builtin_ia32_ldtilecfg (__config); }"


@pytest.mark.parametrize(
    ("cpu", "header", "loses"),
    [(AMX, GCC_12, True), (AMX, GCC_14, False), ("flags : fpu avx2", GCC_12, False), (AMX, None, False)],
)
def test_a_compiler_that_loses_amx_tiles_is_told_by_its_own_header(tmp_path, cpu, header, loses):
    (tmp_path / "cpuinfo").write_text(cpu)
    if header:
        (tmp_path / "tiles.h").write_text(header)
    cxx = shell_script(tmp_path / "c++", f"echo {tmp_path}/tiles.h")
    assert compiler_faults.loses_tiles(tmp_path / "cpuinfo", str(cxx)) == loses
    assert not compiler_faults.loses_tiles(tmp_path / "cpuinfo", str(tmp_path / "no-such-compiler"))


def test_only_what_is_built_from_source_there_is_built_without_amx(monkeypatch):
    from_source = stacks()["llamacpp"].environments["cpu"]
    wheels = stacks()["hf"].environments["cpu"]
    monkeypatch.setattr(compiler_faults, "loses_tiles", lambda: True)
    monkeypatch.setenv("CXXFLAGS", "-O3")
    made = compiler_faults.with_workarounds(from_source)
    assert made.variables["CXXFLAGS"] == "-O3 -U__AMX_INT8__"
    assert made.variables["CMAKE_ARGS"] == from_source.variables["CMAKE_ARGS"]
    assert compiler_faults.with_workarounds(made) == made
    assert compiler_faults.with_workarounds(wheels) == wheels
    assert build.key_of(made) != build.key_of(from_source)
