#!/usr/bin/env python3
"""Layers with sliding windows in every form: a prompt that is found in part, rewound, in another slot, or restored is answered as
a cold start answers it. Windows of 512 tokens, prompts of up to 700.

usage: sliding_test.py CRUMB GEMMA_F32.gguf
"""
import unittest

import server
from server import TEXT, Server

BASE = "".join(f"{i}. {TEXT}" for i in range(60))
FLAGS = ["--kv", "had2", "--kv-recent", "64", "-c", "3072", "-np", "3", "--metrics", "--slots"]


class Sliding(unittest.TestCase):
    def everywhere(self, form, word):
        with Server(*FLAGS, "--kv-sliding", form) as server:
            self.assertIn(word, server.output())
            ids = server.call("/tokenize", {"content": BASE, "add_special": True})["tokens"]
            found = 0
            for slot, n, end in ((0, 650, "But"), (0, 650, "And"), (1, 650, "But"), (1, 300, "Or"), (2, 690, "Yet")):
                with self.subTest("in part", slot=slot, n=n, end=end):
                    prompt = ids[:n] + server.call("/tokenize", {"content": end})["tokens"]
                    reply = server.ask(prompt, n=6, id_slot=slot)
                    found += reply["timings"]["cache_n"]
                    self.assertEqual(reply["timings"]["cache_n"] + reply["timings"]["prompt_n"], len(prompt))
                    self.assertEqual(reply["content"], server.ask(prompt, n=6, id_slot=slot, cache_prompt=False)["content"])
            self.assertGreater(found, 600)
            with self.subTest("restored in another slot"):
                cold = server.ask(ids[:690], n=6, id_slot=0, cache_prompt=False)["content"]
                saved = server.call("/slots/0?action=save", {"filename": "state"})["n_saved"]
                server.erase()
                self.assertEqual(server.call("/slots/1?action=restore", {"filename": "state"})["n_restored"], saved)
                reply = server.ask(ids[:690], n=6, id_slot=1)
                self.assertGreater(reply["timings"]["cache_n"], 600)
                self.assertEqual(reply["content"], cold)
            server.erase()
            metrics = server.metrics()
            self.assertEqual((metrics["crumb:kv_cache_bytes_in_use"], metrics["crumb:kv_tokens_aged_early_total"]), (0, 0))

    def test_bf16(self):
        self.everywhere("bf16", "stay BF16")

    def test_rows_of_8_bits(self):
        self.everywhere("q8", "in 8 bits")

    def test_pages(self):
        self.everywhere("pages", "in pages of had2")


if __name__ == "__main__":
    server.main()
