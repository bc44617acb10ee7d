#!/usr/bin/env python3
"""crumb serve with --kv bf16 against the same server on llama.cpp's own KV cache: every answer must be equal.

usage: server_test.py CRUMB MODEL_F32.gguf
Plain and streamed completions, shared prefixes, a rewound slot, four requests at once, slot save and restore, the prompt
cache, grammar, chat, a generation past the context, and what is refused. F32 weights, so that another order of sums
stays a last bit. Servers listen on loopback.
"""
import concurrent.futures
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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, kv, extra=()):
        self.folder = tempfile.TemporaryDirectory()
        self.port = free_port()
        self.log = open(os.path.join(self.folder.name, "log"), "w+")
        command = [CRUMB, "serve", "-m", MODEL, "--port", str(self.port), "-c", "2048", "-np", "4", "-t", "2", "-b", "256",
                   "-ub", "128", "--slot-save-path", self.folder.name, "--cache-ram", "64", "--no-ui", "--jinja", *kv, *extra]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def __enter__(self):
        for _ in range(600):
            try:
                if self.call("/health")["status"] == "ok":
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.2)
        raise AssertionError("the server did not start:\n" + self.output()[-3000:])

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()
        self.folder.cleanup()

    def output(self):
        self.log.flush()
        with open(self.log.name) as f:
            return f.read()

    def call(self, path, body=None, timeout=300):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.loads(reply.read())

    def ask(self, prompt, n=24, **more):
        return self.call("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": True, **more})

    def stream(self, prompt, n=24):
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return [json.loads(line[6:])["content"] for line in reply if line.startswith(b"data: ")]


def answers(server):
    """Every kind of request; what must be equal, and what must be true of each server by itself."""
    equal, true = {}, {}
    equal["plain"] = server.ask(TEXT * 3, id_slot=0)["content"]
    pieces = server.stream(TEXT * 3)
    equal["streamed"] = "".join(pieces)
    true["streamed in pieces"] = len(pieces) > 5
    reply = server.ask(TEXT * 6 + "Therefore", id_slot=0)
    equal["shared prefix"] = reply["content"]
    true["prefix reused"] = reply["timings"]["cache_n"] > 20
    equal["rewound slot"] = server.ask(TEXT * 4 + "But", id_slot=0)["content"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(server.ask, f"Question {i}: what is {i} times {i}? " + TEXT * i) for i in range(4)]
        equal["four at once"] = [job.result()["content"] for job in jobs]
    server.ask(TEXT * 5, id_slot=1)
    saved = server.call("/slots/1?action=save", {"filename": "a.bin"})
    restored = server.call("/slots/2?action=restore", {"filename": "a.bin"})
    true["all tokens restored"] = saved["n_saved"] == restored["n_restored"] > 0
    reply = server.ask(TEXT * 5 + "Next", id_slot=2)
    equal["after restore"] = reply["content"]
    true["restored tokens reused"] = reply["timings"]["cache_n"] > 20
    for i in range(6):  # other prompts push the first one out of its slot into the prompt cache
        server.ask(f"{i} green bottles hanging on the wall, and if one should fall " * 3, n=2, id_slot=0)
    equal["prompt cache"] = server.ask(TEXT * 4 + "But", id_slot=0)["content"]
    equal["grammar"] = server.ask("Is water wet?", n=4, grammar='root ::= "yes" | "no"')["content"]
    chat = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0}
    equal["chat"] = server.call("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    reply = server.ask(TEXT * 20, n=400, ignore_eos=True)
    equal["past the context"] = [reply["truncated"], reply["tokens_predicted"]]
    true["alive"] = server.call("/health")["status"] == "ok"
    return equal, true


class SameAnswers(unittest.TestCase):
    def compare(self, extra):
        with Server(["-ctk", "bf16", "-ctv", "bf16", "-fa", "off"], extra) as server:
            stock, _ = answers(server)
        with Server(["--kv", "bf16"], extra) as server:
            ours, true = answers(server)
            self.assertIn("kv: bf16", server.output())
        for name, holds in true.items():
            with self.subTest(name):
                self.assertTrue(holds)
        for name in stock:
            with self.subTest(name):
                self.assertEqual(ours[name], stock[name])

    def test_slots_with_their_own_streams(self):
        self.compare([])

    def test_unified(self):
        self.compare(["--kv-unified"])


class CodedServer(unittest.TestCase):
    def test_bad_requests_and_states_lose_nothing(self):
        with Server(["--kv", "quarot:paper"]) as server:
            first = server.ask(TEXT * 26 + "So", id_slot=0)["content"]
            server.call("/slots/0?action=save", {"filename": "good.bin"})
            path = os.path.join(server.folder.name, "good.bin")
            with open(path, "rb") as f:
                state = bytearray(f.read())
            state[len(state) // 2] ^= 1
            with open(os.path.join(server.folder.name, "bad.bin"), "wb") as f:
                f.write(state)
            with open(os.path.join(server.folder.name, "short.bin"), "wb") as f:
                f.write(state[:len(state) // 3])
            for name in ("bad.bin", "short.bin", "absent.bin"):
                with self.assertRaises(urllib.error.HTTPError) as error:
                    server.call("/slots/0?action=restore", {"filename": name})
                self.assertIn(error.exception.code, range(400, 500), name)
            with self.assertRaises(urllib.error.HTTPError) as error:
                server.ask(TEXT * 400)
            self.assertEqual(error.exception.code, 400)
            server.call("/slots/0?action=restore", {"filename": "good.bin"})
            self.assertEqual(server.ask(TEXT * 26 + "So", id_slot=0)["content"], first)

    def test_flags_that_contradict(self):
        for flags, word in ((["-ctk", "q8_0"], "-ctk"), (["--context-shift"], "--context-shift"), (["--cache-reuse", "64"], "--cache-reuse"),
                            (["-gan", "4"], "-gan"), (["--kv-recent", "-3"], "--kv-recent"), (["--kv-prefill", "odd"], "--kv-prefill")):
            run = subprocess.run([CRUMB, "serve", "-m", MODEL, "--kv", "quarot:paper", *flags], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(run.returncode, 0, flags)
            self.assertIn(word, run.stderr, flags)


if __name__ == "__main__":
    CRUMB, MODEL = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
