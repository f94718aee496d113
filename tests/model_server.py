"""A program in place of a model's server: it dies, is slow and sleeps as it is asked.

python model_server.py HOST PORT FOLDER
"""

import json
import os
import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

from json_replies import JSONHandler

HOST, PORT, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


class Handler(JSONHandler):
    protocol_version = "HTTP/1.1"
    health = 200

    def do_GET(self):
        self.answer(self.health, {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        asked = json.loads(body) if body else {}
        if not asked:
            with (FOLDER / "asked.txt").open("a") as file:
                file.write(self.path + "\n")
        if asked.get("content") == "poison" and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os._exit(3)
        if asked.get("content") == "break":
            with (FOLDER / "broken.txt").open("a") as file:
                file.write(f"{PORT}\n")
            self.close_connection = True
            return
        if asked.get("content") == "engine" and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            Handler.health = 503
            self.answer(500, {})
            self.wfile.flush()
            time.sleep(0.5)
            os._exit(0)
        time.sleep(asked.get("seconds", 0))
        while "until" in asked and not (FOLDER / asked["until"]).exists():
            time.sleep(0.02)
        status, text = asked.get("status", 200), asked.get("content", "")
        if text == "gpus":
            text = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.answer(status, {"path": self.path, "server": PORT, "text": text})


if (FOLDER / "refuses").exists():
    sys.exit("no such model")
for way, seconds in (("hangs", 600.0), ("writes", 0.1), ("computes", 0.0), ("fetches", 0.1)):
    end = time.monotonic() + 8
    while (FOLDER / way).exists() and time.monotonic() < end:
        if way == "writes":
            print("still at it", flush=True)
        if way == "fetches":
            (FOLDER / "weights").write_bytes(bytes(1 << 20))
        time.sleep(seconds)
ThreadingHTTPServer((HOST, PORT), Handler).serve_forever()
