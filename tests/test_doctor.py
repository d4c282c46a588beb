"""What on a machine may spoil a measurement: made-up trees of sysfs, stand-ins for a Raspberry Pi's firmware,
for NVML and for environments, and the real command."""

import shutil
import subprocess
import venv
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from conftest import records_below, shell_script
from nvml_cards import UNSUPPORTED, Card

from harness import machine
from harness.analysis.warnings import Warnings
from harness.machine.doctor import LEVELS, TABLES, Finding, cpu, gpu
from harness.machine.doctor.builds import builds
from harness.machine.doctor.check import findings
from harness.records.kinds import wrong_with
from harness.stacks import compiler_faults
from harness.stacks.adopted import Interpreter
from harness.stacks.compiler_faults import WHY_NO_AMX
from harness.stacks.header import stacks
from harness.stacks.inside.features import FEATURES

CPU = "sys/devices/system/cpu"
PI = {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
IN_V2 = {"proc/self/cgroup": "0::/a.slice/b"}
IN_V1 = {"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/1\n0::/x"}


def v2(**quotas: str) -> dict[str, object]:
    """Cgroups of version 2 by their quotas: `v2(root="max")`, and a of the slice, b in it."""
    folders = {"root": "", "a": "a.slice/", "b": "a.slice/b/"}
    return IN_V2 | {f"{V2}/{folders[name]}cpu.max": f"{quota} 100000" for name, quota in quotas.items()}


def v1(quotas: dict[str, int]) -> dict[str, object]:
    made: dict[str, object] = {}
    for cgroup, quota in quotas.items():
        folder = f"{V1}/{cgroup}"
        made |= {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 100000}
    return IN_V1 | made


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """A made-up root: `tree({"sys/x": "1"})`."""

    def made(*files: dict[str, object]) -> Path:
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        for path, content in {name: text for each in files for name, text in each.items()}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{content}\n")
        return root

    return made


def firmware(bits: int) -> str:
    return f'case "$1" in get_throttled) echo throttled={bits:#x};; *) echo "frequency(0)=1500000000";; esac'


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


def checked(code: str, root: Path = Path("/none"), **host: Any) -> Finding | None:
    """The finding of one check on a host."""
    (check,) = (check for check in cpu.CHECKS if check.code == code)
    return next(findings([check], cpu.Host(root, **host)), None)


# Clocks and power


@pytest.mark.parametrize(
    ("governors", "level", "found"),
    [
        (["performance", "performance"], "ok", "performance"),
        (["performance", "schedutil"], "warn", "performance, schedutil"),
        ([], "unknown", "no cpufreq here"),
    ],
)
def test_a_governor_that_follows_the_load_is_a_fault_of_any_cpu(tree, governors, level, found):
    files = {f"{CPU}/cpu{i}/cpufreq/scaling_governor": name for i, name in enumerate(governors)}
    finding = checked("governor", tree(files))
    assert (finding.level, finding.found[: len(found)]) == (level, found)
    assert (finding.fix is not None) == (level == "warn")


@pytest.mark.parametrize(
    ("switch", "content", "level", "fix"),
    [
        ("intel_pstate/no_turbo", "0", "warn", "echo 1 | sudo tee intel_pstate/no_turbo"),
        ("intel_pstate/no_turbo", "1", "ok", None),
        ("cpufreq/boost", "1", "warn", "echo 0 | sudo tee cpufreq/boost"),
        ("cpufreq/boost", "0", "ok", None),
        ("cpufreq/policy0/boost", "1", "warn", "echo 0 | sudo tee cpufreq/policy*/boost"),
        ("cpufreq/policy0/other", "1", "unknown", None),
    ],
)
def test_turbo_is_told_by_the_switch_of_the_driver_and_turned_off_by_it(tree, switch, content, level, fix):
    finding = checked("turbo", tree({f"{CPU}/{switch}": content}))
    assert (finding.level, finding.fix) == (level, fix and fix.replace("tee ", f"tee /{CPU}/"))


def supply(name: str, **says: str) -> dict[str, object]:
    return {f"sys/class/power_supply/{name}/{key}": value for key, value in says.items()}


UNPLUGGED, PLUGGED = (supply("AC", type="Mains", online=online) for online in "01")


@pytest.mark.parametrize(
    ("supplies", "level", "found"),
    [
        ([PLUGGED], "ok", "mains (there is no battery)"),
        ([PLUGGED, supply("B", type="Battery", status="Full")], "ok", "mains"),
        ([UNPLUGGED, supply("B", type="Battery", status="Unknown")], "warn", "battery"),
        ([supply("B", type="Battery", status="Discharging")], "warn", "battery"),
        ([supply("B", type="Battery", status="Unknown")], "unknown", "there is a battery"),
        ([supply("mouse", type="Battery", scope="Device", status="Discharging")], "ok", "mains"),
        ([], "unknown", "not reported by this system"),
    ],
)
def test_a_battery_that_feeds_the_machine_is_a_fault_and_a_mouses_is_none(tree, supplies, level, found):
    finding = checked("power_source", tree(*supplies))
    assert (finding.level, finding.found[: len(found)]) == (level, found)


# Heat


def test_intels_counters_tell_of_throttling_since_boot(tree):
    of_cpu0 = {"core_throttle_count": 3, "package_throttle_count": 12}
    of_cpu1 = {"package_throttle_count": 12, "package_throttle_total_time_ms": 1500}
    counters = {f"{CPU}/cpu0/thermal_throttle/{name}": value for name, value in of_cpu0.items()}
    counters |= {f"{CPU}/cpu1/thermal_throttle/{name}": value for name, value in of_cpu1.items()}
    assert checked("intel_throttling", tree(counters)).found == "12 times since boot, 1.5 s together"
    none = Finding("ok", "CPU throttling", "none since boot")
    assert checked("intel_throttling", tree(dict.fromkeys(counters, 0))) == none
    assert checked("intel_throttling", tree(dict.fromkeys(counters, "none"))).level == "unknown"


@pytest.mark.parametrize(
    ("bits", "level", "found"),
    [
        (0x0, "ok", "none since boot"),
        (0x50005, "warn", "under-voltage, throttled now; under-voltage, throttled since boot (0x50005)"),
        (0xA0000, "warn", "ARM frequency capped, soft temperature limit since boot (0xa0000)"),
    ],
)
def test_a_raspberry_pi_tells_of_throttling_now_and_since_boot(tree, vcgencmd, bits, level, found):
    vcgencmd(firmware(bits))
    finding = checked("pi_throttling", tree(PI))
    assert (finding.level, finding.found) == (level, found)
    if level == "warn":
        assert ("supply" if bits & 0x1 else "fan") in finding.fix


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo VCHI initialization failed >&2; exit 1", "VCHI initialization failed"),
        ("echo throttled=soon", "throttled=soon"),
        ("exec sleep 60", "2 s"),
    ],
)
def test_a_vcgencmd_that_fails_is_unknown_and_says_why(tree, vcgencmd, script, why):
    vcgencmd(script)
    finding = checked("pi_throttling", tree(PI))
    assert finding.level == "unknown"
    assert why in finding.found


def test_a_raspberry_pi_without_vcgencmd_is_told_where_it_is(tree):
    assert checked("pi_throttling", tree(PI)).found.endswith("not on PATH (Debian package raspi-utils)")


def hwmon(name: str, **degrees: float) -> dict[str, object]:
    """A chip with sensors: `hwmon("coretemp", temp1_input=45)`."""
    files = {"name": name} | {key: round(value * 1000) for key, value in degrees.items()}
    return {f"sys/class/hwmon/hwmon0/{key}": value for key, value in files.items()}


def zone(kind: str, temp: object, *trips: tuple[str, int]) -> dict[str, object]:
    files = {"type": kind, "temp": temp}
    for i, (what, at) in enumerate(trips):
        files |= {f"trip_point_{i}_type": what, f"trip_point_{i}_temp": at}
    return {f"sys/class/thermal/thermal_zone0/{key}": value for key, value in files.items()}


HOTTER = {"temp2_input": 85, "temp2_crit": 100}


@pytest.mark.parametrize(
    ("level", "found", "files"),
    [
        (
            "ok",
            "55 C: coretemp 45 C of 100 C",
            hwmon("coretemp", temp1_input=45, temp1_max=50, temp1_crit=100),
        ),
        ("warn", "15 C: coretemp 85 C of 100 C", hwmon("coretemp", temp1_input=40, temp1_crit=100, **HOTTER)),
        (
            "unknown",
            "k10temp 61 C; its throttle temperature is not reported",
            hwmon("k10temp", temp1_input=61),
        ),
        ("unknown", "no temperature of the CPU", hwmon("nvme", temp1_input=45)),
        (
            "ok",
            "40 C: cpu-thermal 70 C of 110 C",
            zone("cpu-thermal", 70000, ("critical", 110000), ("active", 50000)),
        ),
        ("warn", "10 C: cpu-thermal 70 C of 80 C", zone("cpu-thermal", 70000) | PI),
        ("unknown", "no temperature of the CPU", zone("x86_pkg_temp", "none")),
    ],
)
def test_the_headroom_is_of_the_sensor_nearest_to_its_limit(tree, level, found, files):
    finding = checked("thermal_headroom", tree(files))
    assert (finding.level, finding.found[: len(found)]) == (level, found)


# Who else has the CPUs


def times(**seconds: float) -> dict[str, float]:
    nothing = dict.fromkeys(("user", "system", "idle", "iowait", "steal", "guest"), 0.0)
    return nothing | {"user": 100.0, "idle": 1000.0} | seconds


IDLE_2_S = times(idle=1002.0)
MACOS = {"user": 1.0, "idle": 1.0}


@pytest.mark.parametrize(
    ("code", "before", "after", "level", "found"),
    [
        ("cpus_in_use", times(), times(idle=1001.9, iowait=0.05, user=100.05), "ok", "2%, load average 3.0"),
        ("cpus_in_use", times(), times(idle=1001.0, user=101.0), "warn", "50%, load average 3.0"),
        ("cpus_in_use", times(), times(idle=1001.0, user=101.0, guest=1.0), "warn", "50%"),  # user's too
        ("cpus_in_use", times(), times(), "unknown", "the system's CPU time counters do not advance"),
        ("steal_time", times(), IDLE_2_S, "ok", "0.0% now"),
        ("steal_time", times(), IDLE_2_S | {"steal": 0.1}, "warn", "4.8% now, 0.1% of"),
        ("steal_time", times(steal=5.0), IDLE_2_S | {"steal": 5.0}, "warn", "0.0% now, 4.8%"),
        ("steal_time", MACOS, MACOS, "unknown", "not reported by this system"),
    ],
)
def test_other_processes_and_virtual_machines_are_seen_by_the_times_of_the_cpus(
    code, before, after, level, found
):
    finding = checked(code, before=before, after=after, load_1min=3.0)
    assert (finding.level, finding.found[: len(found)]) == (level, found)


@pytest.mark.parametrize(
    ("files", "level", "found"),
    [
        (v2(root="150000"), "warn", "1.50 CPUs"),
        (v2(root="max"), "ok", "none"),
        # A service without a quota in a slice that has one; and both, the slice's the narrower.
        (v2(a="50000", b="max"), "warn", "0.50 CPUs"),
        (v2(a="50000", b="300000"), "warn", "0.50 CPUs"),
        # The root of all has no quota, and neither has one whose CPU controller is off.
        (IN_V2 | {f"{V2}/cgroup.procs": "", f"{V2}/a.slice/cgroup.procs": ""}, "ok", "none"),
        (v1({"docker": 50000}), "warn", "0.50 CPUs"),
        # Inside a container the path of its cgroup is missing, and the root is there.
        (v1({"docker/1": -1, "docker": 120000}), "warn", "1.20 CPUs"),
        (v1({".": 50000}), "warn", "0.50 CPUs"),
        (v1({"docker/1": -1}), "ok", "none"),
        (IN_V2 | {f"{V2}/a.slice/cpu.max/is": "a folder"}, "unknown", "{root}/sys/fs/cgroup/a.slice/cpu.max"),
        ({f"{V2}/cpu.max": "max 100000"}, "unknown", "the cgroups of this process cannot be seen"),
        (IN_V1 | {f"{V2}/cgroup.controllers": ""}, "unknown", "the cgroups of this process cannot be seen"),
        ({}, "unknown", "this system has no cgroups"),
    ],
)
def test_a_quota_of_cpu_time_is_a_fault_in_any_cgroup_around_us(tree, files, level, found):
    root = tree(files)
    finding, found = checked("cpu_quota", root), found.format(root=root)
    assert (finding.level, finding.found[: len(found)]) == (level, found)
    if level == "warn":  # all of these are of less than 2 CPUs
        assert finding.found == f"{found}; by default a run uses 1 thread"


def test_smt_is_noted_and_windows_is_a_fault(tree):
    assert checked("smt", tree({f"{CPU}/smt/active": 1})).found.startswith("on")
    assert checked("smt", tree({f"{CPU}/smt/active": 0})).found == "off"
    assert checked("wsl", tree({"proc/version": "Linux version 6.1.0 (gcc)"})) is None
    wsl = checked("wsl", tree({"proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2"}))
    assert wsl.level == "warn"


# Memory


def test_swap_and_little_memory_are_faults():
    assert [checked("swap_in_use", swap_bytes=used).level for used in (0, 1 << 20)] == ["ok", "warn"]
    assert [checked("free_memory", free_bytes=free).level for free in (8 << 30, 1 << 30)] == ["ok", "warn"]


def test_a_kernel_that_cannot_bound_or_tell_of_memory_is_told_how_to(tree):
    root = tree({"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids"})  # Raspberry Pi OS as it comes
    absent, silent = checked("memory_cgroup", root), checked("psi", root)
    assert (absent.level, silent.level) == ("warn", "unknown")
    assert "cgroup_enable=memory" in absent.fix
    assert "psi=1" in silent.fix
    tree({"sys/fs/cgroup/cgroup.controllers": "cpu memory", "proc/pressure/memory": "some avg10=0.00"})
    assert (checked("memory_cgroup", root).found, checked("psi", root).level) == ("v2", "ok")
    assert checked("huge_pages", root).level == "unknown"
    tree({"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"})
    assert checked("huge_pages", root).found == "madvise"


def test_a_cgroup_v1_is_one(tree):
    assert checked("memory_cgroup", tree({"sys/fs/cgroup/memory/tasks": ""})).found == "v1"


def test_where_nothing_can_be_read_nothing_is_ok_but_what_was_looked_at(tree):
    found = {finding.what: finding for finding in findings(cpu.CHECKS, cpu.Host(tree()))}
    noted = {"swap in use", "free memory"}  # facts of the host, not read from files
    assert {what for what, finding in found.items() if finding.level != "unknown"} == noted
    assert all(len(finding.found.split()) > 2 for what, finding in found.items() if what not in noted)


def test_every_check_has_a_code_of_its_own_and_a_warning_an_effect_and_a_fix():
    checks = [check for _, table in TABLES for check in table]
    codes = [check.code for check in checks]
    assert len({*codes}) == len(codes)
    assert not {*codes} & {*Warnings.__members__}  # `harness explain` prints both
    assert [check.code for check in checks if check.bound and not (check.effect and check.fix)] == []


# GPUs


GOOD: Card = {
    "uuid": "GPU-0",
    "name": "NVIDIA GeForce RTX 4090",
    "PersistenceMode": 1,
    "EccMode": [0, 0],
    "MemoryBusWidth": 384,
    "mig": [0, 0],
    "processes": [],
    "GraphicsRunningProcesses": [],
    "memory": SimpleNamespace(used=4 << 20),
    "UtilizationRates": SimpleNamespace(gpu=0),
    "DisplayActive": 0,
    "ClockInfo": {1: 210, 2: 405},
    "MaxClockInfo": {1: 3105, 2: 10501},
    "EnforcedPowerLimit": 450000,
    "PowerManagementDefaultLimit": 450000,
    "CurrentClocksEventReasons": 0x1,
    "ViolationStatus": SimpleNamespace(violationTime=0),
    "temperature": 40,
    "TemperatureThreshold": {1: 90, 3: 84},
}


def test_a_gpu_in_good_order_leaves_only_what_nvml_cannot_tell(nvml):
    state = nvml(GOOD)
    found = gpu.findings("GPU-0")
    assert [each.what for each in found if each.level != "ok"] == ["locked clocks of GPU 0"]
    (clocks_of,) = (each for each in found if each.what == "locked clocks of GPU 0")
    assert clocks_of.found.endswith("SM 210 MHz now, 3105 MHz at most")
    assert clocks_of.fix == "sudo nvidia-smi -i 0 -lgc MHZ at a clock that it sustains, and -lmc 10501"
    assert state.opened == 0


COOL, CLOSE, WAIT = "improve the cooling", "close them", "let it cool"
TWO_PROCESSES = [SimpleNamespace(pid=7), SimpleNamespace(pid=-1)]
IN_USE = SimpleNamespace(used=3_000_000_000)
THERMAL_2_S = {"CurrentClocksEventReasons": 0x44, "ViolationStatus": SimpleNamespace(violationTime=2e9)}
OLD_DRIVER = {"CurrentClocksEventReasons": UNSUPPORTED, "CurrentClocksThrottleReasons": 0x20}
LIMIT_95 = {"TemperatureThreshold": {1: 95, 3: 0}}
SLOWDOWN = "hardware thermal slowdown now, thermal for 2.0 s since the driver was loaded"


MIG = "on: an instance has a part of the GPU's bandwidth and memory"


@pytest.mark.parametrize(
    ("what", "found", "fix", "says"),
    [
        ("MIG", MIG, None, {"mig": [1, 1]}),  # how it is set up, and no fault
        ("power limit", "300 W, below its default of 450 W", None, {"EnforcedPowerLimit": 300000}),
        ("throttling", "software power cap now", None, {"CurrentClocksEventReasons": 0x4}),
        ("persistence mode", "off", "sudo nvidia-smi -i 0 -pm 1", {"PersistenceMode": 0}),
        ("ECC", "on", "sudo nvidia-smi -i 0 -e 0, and reboot", {"EccMode": [1, 1]}),
        (
            "other processes",
            "python3 (7), a process (-1)",
            CLOSE,
            {"processes": TWO_PROCESSES},
        ),
        ("other processes", "98% busy", CLOSE, {"UtilizationRates": SimpleNamespace(gpu=98)}),
        ("other processes", "3000 MB used", CLOSE, {"memory": IN_USE}),
        ("display", "this GPU drives a screen", "sudo systemctl isolate", {"DisplayActive": 1}),
        ("throttling", SLOWDOWN, COOL, THERMAL_2_S),
        ("throttling", "software thermal slowdown now", COOL, OLD_DRIVER),
        ("thermal headroom", "14 C: 70 C of 84 C", WAIT, {"temperature": 70}),
        ("thermal headroom", "10 C: 85 C of 95 C", WAIT, {"temperature": 85} | LIMIT_95),
    ],
)
def test_a_fault_of_a_gpu_is_a_warning_with_effect_and_fix_and_its_set_up_is_none(
    nvml, what, found, fix, says
):
    nvml(GOOD | says)
    told = {each.what: each for each in gpu.findings("GPU-0")}
    finding = told[f"{what} of GPU 0"]
    assert (finding.found, finding.level) == (found, "warn" if fix else "ok")
    assert [each for each in told.values() if each.level == "warn"] == ([finding] if fix else [])
    if fix is None:
        assert finding.fix is None
    else:
        assert finding.fix.startswith(fix)
        assert finding.effect


def test_ecc_costs_nothing_where_memory_has_bits_of_its_own_for_it(nvml):
    for width, level in ((6144, "ok"), (UNSUPPORTED, "unknown")):
        nvml(GOOD | {"EccMode": [1, 1], "MemoryBusWidth": width})
        assert levels(gpu.findings("GPU-0"))["ECC of GPU 0"] == level


def test_what_a_gpu_does_not_support_is_unknown_and_never_ok(nvml):
    nvml({"uuid": "GPU-0"})
    found = gpu.findings("GPU-0")
    assert len(found) == len(gpu.CHECKS) - 1  # MIG is told of where it is on
    assert set(levels(found).values()) == {"unknown"}


def test_a_run_looks_at_its_own_gpu_the_command_at_all_and_a_run_on_the_cpu_at_none(nvml):
    nvml(GOOD, GOOD | {"uuid": "GPU-1"})
    names = {
        device: {each.what.split()[-1] for each in gpu.findings(device)}
        for device in ("GPU-1", None, "cpu", "cuda")
    }
    assert names == {"GPU-1": {"1"}, None: {"0", "1"}, "cpu": set(), "cuda": set()}
    assert levels(gpu.findings("metal")) == {"metal GPU": "unknown"}


def test_a_gpu_without_its_driver_is_unknown_and_no_gpu_is_nothing(tree, monkeypatch):
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    device = "sys/bus/pci/devices/0000:01:00"
    audio = tree({f"{device}.1/vendor": "0x10de", f"{device}.1/class": "0x040300"})
    assert gpu.findings(None, audio) == []
    display = tree({f"{device}.0/vendor": "0x10de", f"{device}.0/class": "0x030000"})
    (finding,) = gpu.findings(None, display)
    assert finding.level == "unknown"
    assert finding.found.endswith("Driver Not Loaded")


# Builds


@pytest.fixture
def environment(tmp_path: Path) -> Interpreter:
    """An environment of llama.cpp with nothing in it."""
    venv.create(tmp_path / "env", symlinks=True)
    return Interpreter(stacks()["llamacpp"].environments["cpu"], tmp_path / "env" / "bin" / "python", ())


def packages(environment: Interpreter) -> Path:
    return next((environment.python.parent.parent / "lib").glob("python*/site-packages"))


def compile_ggml(environment: Interpreter, has: set[str], *flags: str) -> None:
    """Compiles a libggml-cpu of the features alone, with an assertion in it."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    folder = packages(environment) / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    answers = [
        f"int ggml_cpu_has_{ours}(void) {{ assert(calls++ >= 0); return {int(theirs in has)}; }}"
        for ours, theirs in FEATURES.items()
    ]
    (folder / "ggml.c").write_text("#include <assert.h>\nstatic int calls;\n" + "\n".join(answers))
    command = [compiler, "-shared", "-fPIC", *flags, "-o", folder / "libggml-cpu.so", folder / "ggml.c"]
    subprocess.run(command, check=True, timeout=600)


CPUINFO = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma f16c\n\nprocessor\t: 1"}
THIS_CPU = {"avx", "avx2", "fma", "f16c"}


ARM = {"proc/cpuinfo": "Features\t: fp asimd asimddp crc32"}


@pytest.mark.parametrize(
    ("features", "cpuinfo", "emulated", "level", "found"),
    [
        (THIS_CPU, CPUINFO, None, "ok", "for this CPU, without assertions"),
        (THIS_CPU, {"proc/cpuinfo": "model name: a CPU"}, None, "unknown", ""),
        ({"asimd"}, ARM, None, "warn", "llama.cpp without asimddp, which this CPU has"),
        ({"asimd"}, CPUINFO, "its kernel is x86_64", "unknown", ""),  # the CPU around an emulator
    ],
)
def test_a_release_build_with_all_that_this_cpu_has_is_ok(
    environment, tree, monkeypatch, features, cpuinfo, emulated, level, found
):
    monkeypatch.setattr(machine, "facts", lambda: {"emulated": emulated})
    compile_ggml(environment, features, "-O2", "-DNDEBUG")
    (finding,) = builds([environment], tree(cpuinfo))
    assert (finding.level, finding.what) == (level, "build of llamacpp/cpu")
    assert found in finding.found


def test_a_debug_build_and_one_without_the_cpus_simd_are_faults_and_say_how_to_build_anew(environment, tree):
    compile_ggml(environment, {"avx", "fma"}, "-O0")
    asserts, simd = builds([environment], tree(CPUINFO))
    assert asserts.found == "llama.cpp with assertions, like a debug build"
    assert simd.found == "llama.cpp without avx2, f16c, which this CPU has"
    assert {asserts.level, simd.level} == {"warn"}
    assert f"rm -r {environment.python.parent.parent}, then harness env create llamacpp" in simd.fix


def test_a_debug_build_of_torch_is_read_from_its_own_file(environment, tree):
    version = packages(environment) / "torch" / "version.py"
    version.parent.mkdir()
    version.write_text("__version__ = '2.13.0'\ndebug = False\n")
    assert [each.level for each in builds([environment], tree())] == ["ok"]
    version.write_text("__version__ = '2.13.0'\ndebug = True\n")
    (finding,) = builds([environment], tree())
    assert (finding.level, finding.found) == ("warn", "a debug build of torch")


@pytest.mark.parametrize(
    ("script", "level", "found"),
    [
        ("echo '{\"python_debug\": true}'", "warn", "a debug build of Python"),
        ("echo cannot open shared object >&2; exit 127", "unknown", "its Python did not answer: cannot open"),
        (None, "unknown", "its Python cannot be run: No such file"),
    ],
)
def test_a_debug_python_is_a_fault_and_a_broken_one_unknown(tmp_path, tree, script, level, found):
    python = tmp_path / "python"
    if script is not None:
        shell_script(python, script)
    (finding,) = builds([Interpreter(stacks()["hf"].environments["cpu"], python, ())], tree())
    assert (finding.level, finding.found[: len(found)]) == (level, found)


def test_the_real_build_of_llamacpp_is_a_release_for_this_cpu(llamacpp_interpreter):
    (finding,) = builds([llamacpp_interpreter])
    fine = ("ok", "for this CPU, without assertions")
    assert (finding.level, finding.found) == (("warn", WHY_NO_AMX) if compiler_faults.loses_tiles() else fine)


# The command


def test_doctor_gives_findings_with_a_level_an_effect_and_a_fix(harness):
    ran = harness("doctor", "--json")
    assert ran.code == 0
    findings = ran.json["findings"]
    found = {finding["what"] for finding in findings}
    assert {"CPU governor", "swap in use", "free disk for the cache", "free memory", "C++ compiler"} <= found
    assert {"steal time", "power source", "CPU throttling", "environment llamacpp/cpu"} <= found
    for finding in findings:
        assert list(finding) == ["level", "what", "found", "effect", "fix"]
        assert finding["level"] in LEVELS
        assert (finding["effect"] is not None and finding["fix"] is not None) or finding["level"] != "warn"
        assert (finding["effect"], finding["fix"]) == (None, None) or finding["level"] != "ok"


def test_doctor_prints_warnings_first_with_the_effect_and_the_fix_below(harness, vcgencmd):
    vcgencmd(firmware(0x80008))
    ran = harness("doctor")
    assert ran.code == 0
    assert ran.out.startswith(f"CPU: {machine.facts()['cpu']}")
    assert f"memory {psutil.virtual_memory().total / 1e9:.1f} GB" in ran.out
    assert "GB/s" not in ran.out  # it measures nothing unless it is asked to
    lines = ran.out.partition("\n\n")[2].splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("warn     CPU throttling"))
    assert lines[at].endswith("soft temperature limit now; soft temperature limit since boot (0x80008)")
    assert lines[at + 1].startswith("         the firmware lowers the clock")
    assert lines[at + 2].startswith("         fix: add a fan")
    order = [LEVELS.index(line.split()[0]) for line in lines if not line.startswith(" ")]
    assert order == sorted(order)


def test_doctor_of_a_config_whose_device_is_not_here_ends_with_2_and_a_sentence(harness, config):
    assert harness("doctor", config({})).code == 0
    config({}, name="other", device="hip")
    ran = harness("doctor", "other.yaml", "--json")
    assert (ran.code, ran.err) == (2, "harness: other.yaml: no ROCm (hipconfig) on this machine\n")
    assert (ran.json["findings"][0]["level"], ran.json["findings"][0]["what"]) == ("stop", "device hip")
    assert harness("doctor", "missing.yaml").code == 2


# Runs


def findings_of(root: Path) -> list[list[dict[str, Any]]]:
    kept = records_below(root)
    assert all(wrong_with(record) is None for record in kept)
    return [record["doctor"] for record in kept]


def test_a_run_warns_before_it_measures_and_every_record_keeps_what_was_found(
    harness, config, vcgencmd, tmp_path
):
    called = vcgencmd(firmware(0x50000))
    path = config({}, repeats=2)
    assert harness("run", path, "--dry-run").code == 0
    assert not called.exists()
    ran = harness("run", path)
    told = "CPU throttling: under-voltage, throttled since boot (0x50000): the firmware lowers the clock"
    assert [line.startswith(told) for line in ran.err.splitlines()].count(True) == 1
    assert ran.err.index(told) < ran.err.index("[1/2]")
    first, second = findings_of(tmp_path / "results")
    assert first == second
    by_name = {finding["what"]: finding for finding in first}
    assert by_name["CPU throttling"]["level"] == "warn"
    assert by_name["build of fake/cpu"]["level"] == "ok"
    assert not [what for what in by_name if what.startswith(("environment", "free disk", "C++"))]
    called.unlink()
    again = harness("run", path)
    assert "CPU throttling" not in again.err
    assert not called.exists()


def test_a_run_on_a_device_that_is_not_here_is_not_examined(harness, config, tmp_path):
    assert harness("run", config({}, device="hip")).code == 1
    (record,) = records_below(tmp_path / "results")
    assert record["outcome"] == "unavailable"
    assert "doctor" not in record
