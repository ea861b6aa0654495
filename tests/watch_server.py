"""Own a throwaway PostgreSQL: run it until standard input ends, then end it at once and remove its folder.

Started by ``servers.serve`` with the task as JSON in its argument; standard input is a pipe that the test session
holds, so that a session which is killed takes its server along. It imports
nothing of ours, so that it starts in a few milliseconds.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys

task = json.loads(sys.argv[1])
with open(task["log"], "wb") as log:
    server = subprocess.Popen(
        task["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **task["switch"]
    )
held = True
while held:
    if server.poll() is not None and select.select([0], [], [], 0)[0] == []:
        sys.exit(1)  # it ended by itself; the starter quotes its log and removes the folder
    if select.select([0], [], [], 0.2)[0]:
        held = os.read(0, 1) != b""
if server.poll() is None:
    server.send_signal(signal.SIGQUIT)
server.wait()
shutil.rmtree(task["root"], ignore_errors=True)
