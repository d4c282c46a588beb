# Runs as `python -IS`; REAL and ADDRESS stand before it. Hands over workers and `-c CODE`.
import json
import os
import socket
import sys
import time

arguments = sys.argv[1:]
descriptors = [0, 1, 2]
if arguments[:3] == ["-IB", "-X", "utf8"] and len(arguments) == 8:
    descriptors += map(int, arguments[5:8])
elif arguments[:1] != ["-c"]:
    os.execv(REAL, [REAL, *arguments])

client = socket.socket(socket.AF_UNIX)
client.connect(f"\0{ADDRESS}")
words = json.dumps({"arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ)}).encode()
socket.send_fds(client, [len(words).to_bytes(8, "big")], descriptors)
client.sendall(words)
# The worker has them now: whoever reads a pipe must see it close when the worker ends.
for descriptor in descriptors:
    os.close(descriptor)
answer = client.recv(8)  # how it ended; nothing if the server died
status = int.from_bytes(answer, "big", signed=True) if answer else 1
if status < 0:
    os.kill(os.getpid(), -status)
    time.sleep(60)
os._exit(status)
