"""Asks `warm_server.py` for a `laurel`, `page` or `script` with arguments, and ends as that ends.

It knows the server's socket from the environment, and imports nothing that takes time.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["LAUREL_WARM_SERVER"])
    job = {
        "kind": sys.argv[1],
        "arguments": sys.argv[2:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    socket.send_fds(connection, [json.dumps(job).encode()], [0, 1, 2])
    lines = connection.makefile()
    process = int(lines.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(process, received))
    status = int(lines.readline())
sys.exit(status if status >= 0 else 128 - status)
