"""Imports what workers need, then forks one for each client: `server.py LISTENING_FD MODULE...`. Ends when
its standard input closes."""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback


def received(client):
    """The descriptors and the words of one client."""
    head, descriptors, _, _ = socket.recv_fds(client, 8, 6)
    size, words = int.from_bytes(head, "big"), b""
    while len(words) < size:
        more = client.recv(size - len(words))
        if not more:
            raise ConnectionError("it was killed before it had said all")
        words += more
    return list(descriptors), json.loads(words)


def work(descriptors, words):
    """Become what its command line would have started: a worker, or `-c CODE`."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(words["variables"])
    os.chdir(words["folder"])
    arguments = words["arguments"]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
        return
    runners, request = arguments[3:5]
    os.setsid()  # a worker has its own process group
    sys.argv = [runners, request, *map(str, descriptors[3:])]
    runpy.run_path(runners, run_name="__main__")


def forked(descriptors, words, ours):
    """The number of a new worker's process."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in ours:
            one.close()
        work(descriptors, words)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    descriptor, *names = sys.argv[1:]
    listening = socket.socket(fileno=int(descriptor))
    ready, _, _ = select.select([0, listening], [], [])  # what nobody asks for is not imported
    for name in names if listening in ready else []:
        importlib.import_module(name)
    ended, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    workers = {}  # number of the process, by its client's socket
    while True:
        ready, _, _ = select.select([0, listening, ended, *workers], [], [])
        if 0 in ready:
            os.killpg(0, signal.SIGKILL)
        if ended in ready:
            os.read(ended, 4096)
        for client in set(ready) & set(workers):  # it was killed
            os.kill(workers[client], signal.SIGKILL)
        for client, pid in list(workers.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    client.sendall(code.to_bytes(8, "big", signed=True))
                client.close()
                del workers[client]
        if listening in ready:
            client, _ = listening.accept()
            try:
                descriptors, words = received(client)
            except OSError:
                client.close()
                continue
            workers[client] = forked(descriptors, words, [listening, client, *workers])
            for descriptor in descriptors:
                os.close(descriptor)


main()
