"""A Ray cluster that a test can harm: a process that takes commands as lines and answers each with one line.

`add NUMBER DEVICE [NAME=VALUE]` starts a node, with variables; `kill NUMBER` ends all its processes at once,
as a power cut does; `stop NUMBER` halts its raylet, as a lost network does, and `go NUMBER` lets it go on;
`head` ends the head's. The first line is the address.

`join NUMBER DEVICE` starts a node in a separate network namespace, `cut NUMBER` takes its link down, and
`mend NUMBER` up again; `leave NUMBER` kills it. `client PORT` starts the server of Ray's client.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from harness.base.files import cache_folder, made
from harness.campaign.fleet import local
from harness.campaign.fleet.cluster import HEAD_WAITS_FOR_PROCESS

PATIENT_CLIENT = {HEAD_WAITS_FOR_PROCESS: "300"}  # s: 30 are too few on a busy machine


def processes(node: Any) -> list[psutil.Process]:
    """A node's, with all that they have started."""
    found = []
    for kind in node.all_processes.values():
        for each in kind:
            if psutil.pid_exists(each.process.pid):
                first = psutil.Process(each.process.pid)
                found += [first, *first.children(recursive=True)]
    return found


def kill(node: Any) -> None:
    for each in processes(node):
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue


class Elsewhere:
    """A node in a network namespace, as on another machine: its one link leads to this one."""

    def __init__(self, number: str) -> None:
        self.name = f"harness-{os.getpid()}-{number}"
        self.link, self.end = f"hn{os.getpid() % 10**8}-{number}", f"hm{os.getpid() % 10**8}-{number}"
        self.net = f"10.213.{number}"
        self.number = number
        ip(f"netns add {self.name}")
        ip(f"link add {self.link} type veth peer name {self.end}")
        ip(f"link set {self.end} netns {self.name}")
        ip(f"addr add {self.net}.1/24 dev {self.link}")
        ip(f"link set {self.link} up")
        for there in (
            f"addr add {self.net}.2/24 dev {self.end}",
            f"link set {self.end} up",
            "link set lo up",
        ):
            ip(f"-n {self.name} {there}")
        ip(f"-n {self.name} route add default via {self.net}.1")

    def start(self, address: str, device: str) -> None:
        own = made(cache_folder() / "local-cluster" / self.number)
        if not (own / "envs").is_symlink():
            (own / "envs").symlink_to(cache_folder() / "envs")
        ray = str(Path(sys.executable).parent / "ray")
        command = ["ip", "netns", "exec", self.name, ray, "start", "--address", address, "--num-cpus", "1"]
        command += ["--node-ip-address", f"{self.net}.2", "--disable-usage-stats"]
        command += ["--resources", json.dumps({device: 1})]
        command += ["--object-store-memory", str(local.STORE_BYTES)]
        variables = {**os.environ, "HARNESS_CACHE": str(own), "RAY_worker_niceness": "0"}
        subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)

    def up(self, state: str) -> None:
        ip(f"link set {self.link} {state}")

    def kill(self) -> None:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        for pid in found.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        ip(f"netns del {self.name}")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def main() -> None:
    cluster = local.head()
    nodes: dict[str, Any] = {}
    elsewhere: dict[str, Elsewhere] = {}
    servers: list[subprocess.Popen[bytes]] = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        do, *words = line.split()
        if do == "add":
            number, device, *variables = words
            given = dict(word.split("=", 1) for word in variables)
            nodes[number] = local.add_node(cluster, int(number), device, given)
        elif do == "kill":
            kill(nodes.pop(words[0]))
        elif do == "head":
            kill(cluster.head_node)
        elif do == "join":
            number, device = words
            if number not in elsewhere:
                elsewhere[number] = Elsewhere(number)
            elsewhere[number].start(cluster.address, device)
        elif do in ("cut", "mend"):
            elsewhere[words[0]].up("down" if do == "cut" else "up")
        elif do == "leave":
            elsewhere[words[0]].kill()
        elif do == "client":
            server = [sys.executable, "-m", "ray.util.client.server", "--address", cluster.address]
            server += ["--host", "127.0.0.1", "--port", words[0]]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            servers.append(subprocess.Popen(server, env={**os.environ, **PATIENT_CLIENT}, **quiet))
        else:
            raylet = nodes[words[0]].all_processes["raylet"][0].process.pid
            psutil.Process(raylet).send_signal(signal.SIGSTOP if do == "stop" else signal.SIGCONT)
        print("done", flush=True)
    for each in [*nodes.values(), cluster.head_node]:
        kill(each)
    for each in elsewhere.values():
        each.remove()
    for server in servers:
        for child in [*psutil.Process(server.pid).children(recursive=True), server]:
            child.kill()


if __name__ == "__main__":
    main()
