"""`crumb serve` on loopback, for the tests beside this file. They are called as TEST.py CRUMB MODEL.gguf."""
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

TEXT = "The key-value cache of a transformer grows with the length of the text. "
CRUMB, MODEL = sys.argv[1:3]


def main():
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """Four slots of 512 tokens unless `flags` say otherwise."""

    def __init__(self, *flags, folder=None):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = folder or self.scratch.name  # of slot files
        self.port = free_port()
        self.log = open(os.path.join(self.scratch.name, "log"), "w+")
        command = [CRUMB, "serve", "-m", MODEL, "--port", str(self.port), "-c", "2048", "-np", "4", "-t", "1", "-b", "256",
                   "-ub", "128", "--slot-save-path", self.folder, "--jinja", *flags]
        self.process = self.start(command)

    def start(self, command, **more):
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, **more)

    def __enter__(self):
        for _ in range(600):
            try:
                if self.call("/health")["status"] == "ok":
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.2)
        said = self.output()[-3000:]
        self.__exit__()
        raise AssertionError("the server did not start:\n" + said)

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()
        self.scratch.cleanup()

    def output(self):
        self.log.flush()
        with open(self.log.name) as f:
            return f.read()

    def path(self, name):
        return os.path.join(self.folder, name)

    def open(self, path, body=None, timeout=300, **headers):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json", **headers})
        return urllib.request.urlopen(request, timeout=timeout)

    def call(self, path, body=None, **more):
        with self.open(path, body, **more) as reply:
            return json.loads(reply.read())

    def refusal(self, path, body=None, **more):
        """Status and message of a request that must fail."""
        try:
            self.open(path, body, **more).close()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]
        raise AssertionError(f"{path} was not refused")

    def ask(self, prompt, n=24, **more):
        return self.call("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": True, **more})

    def stream(self, prompt, n=24):
        with self.open("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "stream": True}) as reply:
            return [json.loads(line[6:])["content"] for line in reply if line.startswith(b"data: ")]

    def erase(self):
        for slot in range(len(self.call("/slots"))):
            self.call(f"/slots/{slot}?action=erase", {})

    def metrics(self):
        with self.open("/metrics") as reply:
            lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
