"""`crumb serve` on loopback, for the tests beside this file. They are called as TEST.py CRUMB MODEL.gguf."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools"))
import loopback  # noqa: E402

TEXT = "The key-value cache of a transformer grows with the length of the text. "
CRUMB, MODEL = sys.argv[1:3]


def main():
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)


class Server(loopback.Server):
    """Four slots of 512 tokens unless `flags` say otherwise."""

    def __init__(self, *flags, folder=None, **popen):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = folder or self.scratch.name  # of slot files
        super().__init__([CRUMB, "serve", "-m", MODEL, "-c", "2048", "-np", "4", "-t", "1", "-b", "256", "-ub", "128",
                          "--slot-save-path", self.folder, "--jinja", *flags], os.path.join(self.scratch.name, "log"), **popen)

    def __exit__(self, *_):
        super().__exit__()
        self.scratch.cleanup()

    def path(self, name):
        return os.path.join(self.folder, name)

    def ask(self, prompt, n=24, **more):
        return self.call("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": True, **more})

    def stream(self, prompt, n=24):
        return [event["content"] for event in self.events("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0})]

    def erase(self):
        for slot in range(len(self.call("/slots"))):
            self.call(f"/slots/{slot}?action=erase", {})
