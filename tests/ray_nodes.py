"""A Ray cluster that a test can harm: a process that takes commands as lines and answers each with one line.

`add NUMBER DEVICE [NAME=VALUE]` starts a node, with variables; `kill NUMBER` ends all its processes at once,
as a power cut does; `stop NUMBER` halts its raylet, as a lost network does, and `go NUMBER` lets it go on;
`head` ends the head's. The first line is the address.

`client PORT` starts the server of Ray's client.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import psutil

from harness.fleet import local_cluster


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


def main() -> None:
    cluster = local_cluster.head()
    nodes: dict[str, Any] = {}
    servers: list[subprocess.Popen[bytes]] = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        do, *words = line.split()
        if do == "add":
            number, device, *variables = words
            given = dict(word.split("=", 1) for word in variables)
            nodes[number] = local_cluster.add_node(cluster, int(number), device, given)
        elif do == "kill":
            kill(nodes.pop(words[0]))
        elif do == "head":
            kill(cluster.head_node)
        elif do == "client":
            server = [sys.executable, "-m", "ray.util.client.server", "--address", cluster.address]
            server += ["--host", "127.0.0.1", "--port", words[0]]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            servers.append(subprocess.Popen(server, **quiet))
        else:
            raylet = nodes[words[0]].all_processes["raylet"][0].process.pid
            psutil.Process(raylet).send_signal(signal.SIGSTOP if do == "stop" else signal.SIGCONT)
        print("done", flush=True)
    for each in [*nodes.values(), cluster.head_node]:
        kill(each)
    for server in servers:
        for child in [*psutil.Process(server.pid).children(recursive=True), server]:
            child.kill()


if __name__ == "__main__":
    main()
