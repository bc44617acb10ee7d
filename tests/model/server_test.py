#!/usr/bin/env python3
"""crumb serve with --kv bf16 against the same server on llama.cpp's own KV cache: every answer must be equal.

usage: server_test.py CRUMB MODEL_F32.gguf
Plain and streamed completions, shared prefixes, a rewound slot, four requests at once, slot save and restore, the prompt
cache, grammar, chat, a generation past the context, and what is refused. F32 weights, so that another order of sums
stays a last bit. Servers listen on loopback.
"""
import concurrent.futures
import subprocess
import unittest

import server
from server import CRUMB, MODEL, TEXT, Server


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
    reply = server.ask(TEXT * 30, n=60, ignore_eos=True)
    equal["past the context"] = [reply["truncated"], reply["tokens_predicted"]]
    true["alive"] = server.call("/health")["status"] == "ok"
    return equal, true


class SameAnswers(unittest.TestCase):
    def compare(self, *extra):
        extra = ["--cache-ram", "64", *extra]
        with Server("-ctk", "bf16", "-ctv", "bf16", "-fa", "off", *extra) as server:
            stock, _ = answers(server)
        with Server("--kv", "bf16", *extra) as server:
            ours, true = answers(server)
            self.assertIn("kv: bf16", server.output())
        for name, holds in true.items():
            with self.subTest(name):
                self.assertTrue(holds)
        for name in stock:
            with self.subTest(name):
                self.assertEqual(ours[name], stock[name])

    def test_slots_with_their_own_streams(self):
        self.compare()

    def test_unified(self):
        self.compare("--kv-unified")


class CodedServer(unittest.TestCase):
    def test_what_is_refused_while_it_runs(self):
        with Server("--kv", "quarot:paper", "--api-key", "open sesame", "--no-ui") as server:
            key = {"Authorization": "Bearer open sesame"}
            self.assertEqual(server.refusal("/kv.json")[0], 401)
            self.assertEqual(server.refusal("/completion", {"prompt": "a"})[0], 401)
            self.assertEqual(server.refusal("/kv", **key)[0], 404)  # --no-ui
            self.assertEqual(server.call("/kv.json", **key)["sequences"], [])
            with server.open("/health", Origin="http://elsewhere.example") as reply:
                self.assertEqual(reply.status, 200)
            status, message = server.refusal("/completion", {"prompt": TEXT * 400}, **key)
            self.assertEqual(status, 400)
            self.assertIn("context size", message)
            for body in ({"prompt": {}}, {"prompt": "a", "n_predict": "many"}, {"prompt": [-5, 99999999]}):
                self.assertEqual(server.refusal("/completion", body, **key)[0], 400, body)
            self.assertEqual(server.call("/health")["status"], "ok")

    def test_flags_that_contradict(self):
        for flags, word in ((["-ctk", "q8_0"], "-ctk"), (["--context-shift"], "--context-shift"), (["--cache-reuse", "64"], "--cache-reuse"),
                            (["-gan", "4"], "-gan"), (["--kv-recent", "-3"], "--kv-recent"), (["--kv-prefill", "odd"], "--kv-prefill")):
            run = subprocess.run([CRUMB, "serve", "-m", MODEL, "--kv", "quarot:paper", *flags], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(run.returncode, 0, flags)
            self.assertIn(word, run.stderr, flags)


if __name__ == "__main__":
    server.main()
