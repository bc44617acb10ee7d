#!/usr/bin/env python3
"""What may stand beside --kv when it serves, and what clients may send: each answer is that of the plain server, or a reason.

usage: serve_options_test.py CRUMB MODEL_F32.gguf
"""
import concurrent.futures
import json
import os
import re
import socket
import subprocess
import time
import unittest

import server
from server import CRUMB, MODEL, TEXT, Server, loopback

PROMPT = TEXT * 16 + "In short,"
CODED = ["--kv", "quarot:paper", "--kv-recent", "64", "--metrics", "--slots"]
GUIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/guides/serve.md")
SENTENCE = "Why is the sky blue, and why are sunsets red?"


class Options(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with Server(*CODED) as plain:
            cls.plain = plain.ask(PROMPT, id_slot=0)["content"]
            cls.after = plain.ask(TEXT * 8 + "But", id_slot=1)["content"]

    def test_verify(self):
        with Server(*CODED, "--kv-verify", "2") as server:
            self.assertEqual(server.ask(PROMPT, id_slot=0)["content"], self.plain)
            metrics = server.metrics()
            rows, mean, worst = (metrics["crumb:kv_verify_" + name] for name in ("rows_total", "error_sum", "error_max"))
            self.assertGreater(rows, 30 * 12)  # half the rows behind the codes, in 30 layers
            self.assertTrue(0 < mean / rows <= worst < 2, (mean / rows, worst))
            server.ask(PROMPT, id_slot=3)
            self.assertGreater(server.metrics()["crumb:kv_verify_rows_total"], rows)

    def test_reuse_codes(self):
        with Server(*CODED, "--kv-reuse", "codes") as server:
            server.ask(PROMPT + TEXT * 4, n=4, id_slot=0)
            server.erase()
            reply = server.ask(PROMPT + " or not", n=4, id_slot=1)
            found = reply["timings"]["cache_n"]
            self.assertGreater(found, 0)
            self.assertEqual(found % 64, 0)
            self.assertGreaterEqual(reply["timings"]["prompt_n"], 64)  # the window is computed again
            server.erase()
            self.assertEqual(server.metrics()["crumb:kv_pages_in_use"], 0)

    def test_a_draft_model(self):
        with Server(*CODED, "-md", MODEL, "--spec-draft-n-max", "7", "--spec-type", "draft-simple", "-np", "2", "-c", "1024") as server:
            for _ in range(2):  # cold, and from its own slot
                reply = server.ask(PROMPT, id_slot=0)
                self.assertEqual(reply["content"], self.plain)
                self.assertGreater(reply["timings"]["draft_n"], 8)
                self.assertGreater(reply["timings"]["draft_n_accepted"], 4)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                for job in [pool.submit(server.ask, PROMPT, temperature=0.8, seed=i) for i in range(2)]:  # guesses are rejected
                    self.assertGreater(job.result()["timings"]["predicted_n"], 0)
            self.assertEqual(server.metrics()["crumb:kv_tokens_aged_early_total"], 0)

    def test_memory_is_what_was_said(self):
        """The most that a process ever held, loading included: what is not in use is not there, and no scratch grows with -c."""
        peaks = []
        for flags in ([*CODED, "-c", "1024"], [*CODED, "-c", "32768"], ["-fa", "on", "-c", "32768"]):
            with Server(*flags, "-np", "1") as server:
                server.ask(TEXT * 40, n=2)
                peaks.append(server.memory_mib("VmHWM"))
                if flags[-1] == "1024":
                    said = server.call("/props")["kv_cache"]["bytes"]["total"]
                    self.assertTrue(0 < server.metrics()["crumb:kv_cache_bytes_in_use"] <= said)
        self.assertLess(abs(peaks[1] - peaks[0]), 24, peaks)
        self.assertLess(peaks[1], peaks[2], peaks)

    def test_inspect_says_what_a_server_takes(self):
        for flags in ([], ["-c", "768"], ["-np", "1"], ["-np", "3", "-c", "1000"], ["-np", "2", "-c", "1024", "-kvu"], ["-c", "512", "-ub", "700", "-b", "300"],
                      ["-np", "2", "-c", "1024", "--kv-memory", "64M", "--kv-recent", "64"], ["-np", "1", "-c", "512", "--kv-verify", "8"]):
            with self.subTest(" ".join(flags)):
                command = ["-m", MODEL, "--kv", "had2", "-t", "1", *flags]
                said = subprocess.run([CRUMB, "inspect", *command], capture_output=True, text=True, timeout=60, check=True).stdout
                with loopback.Server([CRUMB, "serve", *command, "--no-warmup"]) as server:
                    cache = server.call("/props")["kv_cache"]
                    more = re.search(r"exact K and V, which takes ([\d.]+) MiB more", server.output())
                first = lambda what: float(re.search(rf"^  {what} +([\d.]+)", said, re.M)[1])
                self.assertEqual(first("tokens together"), cache["capacity_tokens"])
                self.assertEqual(first("tokens of a request"), cache["tokens_per_request"])
                if more:
                    self.assertAlmostEqual(first("for --kv-verify"), float(more[1]), delta=0.06)
                self.assertEqual(bool(more), "--kv-verify" in flags)
                for what, key in (("together", "total"), ("pages", "pages"), ("sinks and recent tokens", "windows"), ("16-bit KV", "at_16_bit")):
                    self.assertAlmostEqual(first(what), cache["bytes"][key] / 2**20, delta=0.006, msg=what)

    def test_asleep_and_awake(self):
        with Server(*CODED, "--sleep-idle-seconds", "2") as server:
            for _ in range(2):
                reply = server.ask(PROMPT, id_slot=0)
                self.assertEqual((reply["content"], reply["timings"]["cache_n"]), (self.plain, 0))  # weights and cache were gone
                while not server.call("/props")["is_sleeping"]:
                    time.sleep(0.2)

    def test_the_servers_own_store_of_prompts(self):
        with Server(*CODED, "-np", "1", "-c", "512", "--cache-ram", "64") as server:
            self.assertEqual(server.ask(PROMPT)["content"], self.plain)
            for i in range(3):
                server.ask(f"{i} green bottles hanging on the wall, and if one should fall " * 8, n=2)
            self.assertEqual(server.ask(TEXT * 8 + "But")["content"], self.after)  # rewound to where only codes are left
            server.ask("Another subject. " * 20, n=2)
            self.assertEqual(server.ask(PROMPT)["content"], self.plain)
            self.assertEqual(server.metrics()["crumb:kv_tokens_aged_early_total"], 0)


class Refusals(unittest.TestCase):
    def test_a_reason_is_said_once_and_last(self):
        for command in (["serve", "--port", "1"], ["run", "-p", "x", "-n", "1", "-no-cnv"], ["bench", "-p", "8", "-n", "0"]):
            run = subprocess.run([CRUMB, *command, "-m", MODEL, "--kv", "oscar"], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
            self.assertEqual(run.returncode, 1, run.stderr)
            self.assertEqual(run.stderr.count("needs an artefact"), 1, run.stderr)
            self.assertIn(f"crumb {command[0]}: error: --kv oscar needs an artefact", run.stderr[-500:])

    def test_memory_that_is_too_little_says_how_much_is_enough(self):
        flags = [*CODED, "-np", "2", "-c", "1024", "--kv-memory"]
        with self.assertRaises(RuntimeError) as refused:
            Server(*flags, "1M")
        least = re.search(r"give at least (\d+M)", str(refused.exception))[1]
        with Server(*flags, least) as server:
            longest = int(re.search(r"a request alone has room for (\d+)", server.output())[1])
            ids = server.call("/tokenize", {"content": TEXT * 60})["tokens"][:longest - 8]
            self.assertEqual(server.ask(ids, n=8, ignore_eos=True)["tokens_predicted"], 8)
            self.assertIn(f"has room for {longest} in a request", server.refusal("/completion", {"prompt": ids, "n_predict": 9})[1])


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server(*CODED, "--api-key", "secret"))
        cls.key = {"Authorization": "Bearer secret"}

    def call(self, path, body=None, **more):
        return self.server.call(path, body, **self.key, **more)

    def complete(self, prompt, n=4, **more):
        return self.call("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, **more})

    def raw(self, request, wait=60):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=wait) as s:
            s.sendall(request)
            s.shutdown(socket.SHUT_WR)
            reply = b""
            while block := s.recv(1 << 16):
                reply += block
        return reply.decode(errors="replace")

    def post(self, body, path="/completion"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return self.raw(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def test_another_origin(self):
        asked = self.raw(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://page.example\r\nConnection: close\r\n"
                         b"Access-Control-Request-Method: POST\r\n\r\n")
        self.assertIn(" 200 ", asked.splitlines()[0])
        self.assertIn("Access-Control-Allow-Methods: GET, POST", asked)
        self.assertIn("Access-Control-Allow-Headers: *", asked)
        for path in ("/kv.json", "/props", "/slots", "/metrics", "/v1/chat/completions"):  # an origin is no key
            self.assertEqual(self.server.refusal(path, {} if "chat" in path else None, Origin="http://page.example")[0], 401, path)

    def test_the_key(self):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}, {"X-Api-Key": "wrong"}):
            for path, body in (("/completion", {"prompt": "a"}), ("/slots/0?action=save", {"filename": "a"}), ("/slots/0?action=erase", {}), ("/kv.json", None)):
                self.assertEqual(self.server.refusal(path, body, **header)[0], 401, (path, header))
        self.assertEqual(self.call("/kv.json")["sequences"] is not None, True)
        self.assertEqual(os.listdir(self.server.folder), [name for name in os.listdir(self.server.folder) if name == "log"])

    def test_paths(self):
        self.complete(PROMPT, id_slot=0)
        outside = os.path.join(os.path.dirname(self.server.folder), "crumb-outside")
        for name in ("../crumb-outside", outside, "..", ".", "a/../../crumb-outside", "..\\crumb-outside", "%2e%2e/crumb-outside", "a\0b", "a\nb", "x" * 300, 7, None, []):
            for action in ("save", "restore"):
                status, _ = self.server.refusal(f"/slots/0?action={action}", {"filename": name}, **self.key)
                self.assertEqual(status, 400, (action, name))
        self.assertFalse(os.path.exists(outside))
        self.assertEqual([name for name in os.listdir(self.server.folder) if name != "log"], [])

    def test_odd_bodies(self):
        for body in (b"", b"{", b"[]", b"null", b"3", b'{"prompt": "\xff\xfe\xc3"}', b'{"prompt": "\\ud800"}', b'{"prompt": [[[1]]]}', b'{"prompt": [1, -2]}',
                     b'{"prompt": [999999999]}', b'{"prompt": "a", "n_predict": "b"}', b'{"prompt": "a", "grammar": "root ::= ("}', b'{"prompt": "a", "temperature": NaN}',
                     b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"):
            with self.subTest(body[:40]):
                self.assertEqual(int(self.post(body).split()[1]), 400)
                self.assertGreater(len(self.complete("One, two, three,")["content"]), 0)
        for path in ("/slots/0?action=save", "/slots/0?action=restore", "/tokenize", "/v1/chat/completions"):
            for body in (b"", b"{", b'{"filename": 7, "content": 7, "messages": 7}'):
                with self.subTest(path, body=body):
                    self.assertEqual(int(self.post(body, path).split()[1]), 400)
        self.assertEqual(int(self.post(b'{"prompt": ""}').split()[1]), 200)

    def test_sizes(self):
        with self.subTest("one token"):
            self.assertEqual(self.complete([1000])["tokens_evaluated"], 1)
            self.assertEqual(self.complete([1000])["tokens_evaluated"], 1)
        ids = self.call("/tokenize", {"content": TEXT * 60})["tokens"]
        for n in (510, 511):
            with self.subTest("a prompt that leaves little of the context", n=n):
                reply = self.complete(ids[:n], n=8, ignore_eos=True, id_slot=0)
                self.assertEqual(reply["tokens_predicted"], 512 - n)
                self.assertEqual(reply["stop_type"], "limit")
                self.assertTrue(reply["truncated"])
        for n in (512, 513, len(ids)):
            with self.subTest("a prompt of its context or more", n=n):
                status, message = self.server.refusal("/completion", {"prompt": ids[:n]}, **self.key)
                self.assertEqual(status, 400)
                self.assertIn("context size", message)
        self.assertEqual(self.server.refusal("/completion", {"prompt": "a", "n_predict": 10**12}, **self.key)[0], 400)
        for n_predict in (2**31 - 1, -1):
            with self.subTest("an answer without end", n=n_predict):
                reply = self.call("/completion", {"prompt": ids[:490], "n_predict": n_predict, "ignore_eos": True, "id_slot": 0})
                self.assertLessEqual(reply["tokens_predicted"], 22)
        with self.subTest("no answer"):
            self.assertEqual(self.complete(ids[:100], n=0)["tokens_evaluated"], 100)

    def test_a_reader_that_does_not_read(self):
        body = json.dumps({"prompt": SENTENCE, "n_predict": 200, "stream": True, "ignore_eos": True, "n_probs": 20}).encode()
        head = b"POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            s.connect(("127.0.0.1", self.server.port))
            s.sendall(head + body)
            self.assertGreater(len(self.complete(PROMPT)["content"]), 0)  # nobody waits for it
        self.assertGreater(len(self.complete(PROMPT)["content"]), 0)

    def test_what_the_guide_shows_for_curl(self):
        with open(GUIDE) as f:
            commands = [line for block in re.findall(r"```sh\n(.*?)```", f.read(), re.S) for line in block.replace("\\\n", "").splitlines() if line.startswith("curl")]
        self.assertGreaterEqual(len(commands), 4)
        for command in commands:
            with self.subTest(command[:60]):
                command = command.replace("localhost:8080", f"127.0.0.1:{self.server.port}").replace("$KEY", "secret")
                run = subprocess.run(command + " --fail", shell=True, capture_output=True, text=True, timeout=300)
                self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
                self.assertGreater(len(run.stdout), 2)


if __name__ == "__main__":
    server.main()
