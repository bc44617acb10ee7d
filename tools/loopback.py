"""`crumb serve` on loopback: how the tools here and the tests of tests/model start it, ask it, and look at its process."""
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request


def message_of(error):
    """What a refused request says."""
    with error:
        return json.loads(error.read())["error"]["message"]


class Server:
    """`command`: all but the port, a free one. `log`: a file that is appended to; a temporary one if there is none. `key`: of
    the API, sent with every request. More arguments go to Popen. start() returns when the model is loaded; RuntimeError has
    the server's last words."""

    def __init__(self, command, log=None, key=None, **popen):
        self.command, self.key, self.popen = command, key, popen
        self.log = open(log, "ab") if log else tempfile.NamedTemporaryFile()
        self.start()

    def start(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([*self.command, "--port", str(self.port)], stdout=self.log, stderr=self.log, **self.popen)
        while True:
            try:
                self.call("/health")  # an error while it loads
                return
            except (OSError, http.client.HTTPException) as error:
                if self.process.poll() is not None:
                    said = self.output()[-3000:]
                    self.log.close()
                    raise RuntimeError("the server did not start; it said:\n" + said) from error
                time.sleep(0.1)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.log.close()

    def output(self):
        with open(self.log.name, errors="replace") as f:
            return f.read()

    def open(self, path, body=None, raw=None, timeout=3600, **headers):
        """The reply to a GET, or to a POST of an object or of raw bytes."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **key, **headers})
        return urllib.request.urlopen(request, timeout=timeout)

    def call(self, path, body=None, **more):
        with self.open(path, body, **more) as reply:
            return json.loads(reply.read())

    def refusal(self, path, body=None, **more):
        """Status and message of a request that must fail."""
        try:
            self.open(path, body, **more).close()
        except urllib.error.HTTPError as error:
            return error.code, message_of(error)
        raise AssertionError(f"{path} was not refused")

    def events(self, path, body):
        """What a stream brings, as it comes."""
        with self.open(path, {**body, "stream": True}) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def metrics(self):
        with self.open("/metrics") as reply:
            lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def memory_mib(self, kind="VmRSS"):
        """VmHWM: the most that it ever was."""
        with open(f"/proc/{self.process.pid}/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(kind)) / 1024

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat") as f:
            user, system = f.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
