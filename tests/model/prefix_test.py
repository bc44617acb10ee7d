#!/usr/bin/env python3
"""One prompt, wherever it meets itself again: the greedy text is that of a cold start, and what the server counts is true.

usage: prefix_test.py CRUMB MODEL_F32.gguf
"""
import concurrent.futures
import re
import subprocess
import unittest

import server
from server import CRUMB, MODEL, TEXT, Server

PROMPT = TEXT * 16 + "In short,"  # 259 tokens: a hit is 256 of them; with 64 recent ones half of them are codes
METRICS = set("""kv_cache_bytes kv_cache_bytes_in_use kv_cache_capacity_tokens kv_cache_usage_ratio kv_cache_bits_per_element kv_pages_in_use
kv_pages_shared kv_pages_kept kv_pages_evicted_total kv_pages_demoted_total prefix_cache_queries_total prefix_cache_hits_total
prefix_tokens_found_total kv_tokens_aged_early_total kv_context_shifts_total kv_tokens_dropped_total kv_tokens_recomputed_total
kv_rows_saturated_total kv_nonfinite_total""".split())
CODED = ["--kv", "quarot:paper", "--kv-recent", "64", "--metrics", "--slots"]


class SharedPrefixes(unittest.TestCase):
    def same(self, reply, found):
        self.assertEqual(reply["content"], self.cold["content"])
        self.assertEqual(reply["timings"]["cache_n"] + reply["timings"]["prompt_n"], self.tokens)
        (self.assertGreaterEqual if found else self.assertEqual)(reply["timings"]["cache_n"], 256 if found else 0)

    def everywhere(self, server, slots):
        self.cold = server.ask(PROMPT, id_slot=0)
        self.tokens = self.cold["timings"]["prompt_n"]
        self.same(self.cold, False)
        last = slots - 1
        with self.subTest("the same slot"):
            self.same(server.ask(PROMPT, id_slot=0), True)
        with self.subTest("another slot"):
            self.same(server.ask(PROMPT, id_slot=last), True)
        with self.subTest("while the others are busy"), concurrent.futures.ThreadPoolExecutor(slots) as pool:
            jobs = [pool.submit(server.ask, PROMPT, n=40, ignore_eos=True) for _ in range(last)]
            self.same(server.ask(PROMPT), True)
            for job in jobs:
                self.assertTrue(job.result()["content"].startswith(self.cold["content"]))
        with self.subTest("a fork that goes another way, and back"):
            server.ask(PROMPT + " the cache is", id_slot=last)
            self.same(server.ask(PROMPT, id_slot=last), True)
        with self.subTest("rewound to its middle, and back"):
            server.ask(TEXT * 8 + "But", id_slot=0)
            self.same(server.ask(PROMPT, id_slot=0), True)
        with self.subTest("of no slot any more"):
            server.erase()
            metrics = server.metrics()
            self.assertEqual(metrics["crumb:kv_pages_in_use"], 0)
            self.assertEqual(metrics["crumb:kv_cache_bytes_in_use"], 0)
            self.assertGreater(metrics["crumb:kv_pages_kept"], 0)
            self.same(server.ask(PROMPT, id_slot=last), True)
        with self.subTest("nothing aged early on the way"):
            self.assertEqual(server.metrics()["crumb:kv_tokens_aged_early_total"], 0)

    def save(self, server, slot):
        server.erase()
        server.ask(PROMPT, id_slot=slot)
        self.assertGreater(server.call(f"/slots/{slot}?action=save", {"filename": "prompt.bin"})["n_saved"], 256)

    def elsewhere(self, folder, slots):
        """In a server with hardly any memory beside the windows: restored, evicted, restored again."""
        flags = [*CODED, "-np", str(slots), "-c", str(512 * slots), "-b", "256", "-ub", "128", "--kv-memory"]
        said = subprocess.run([CRUMB, "serve", "-m", MODEL, *flags, "1M"], capture_output=True, text=True, timeout=120)
        least = int(re.search(r"give at least (\d+)M", said.stderr + said.stdout)[1])
        with Server(*flags, f"{least + 1}M", folder=folder) as server:
            with self.subTest("restored by another server"):
                server.call(f"/slots/{slots - 1}?action=restore", {"filename": "prompt.bin"})
                self.same(server.ask(PROMPT, id_slot=slots - 1), True)
            server.erase()
            for i in range(64):
                if server.metrics()["crumb:kv_pages_evicted_total"] >= 2:
                    break
                server.ask(f"{i} bottles. " * 60, n=1, id_slot=i % slots)
            with self.subTest("evicted"):
                reply = server.ask(PROMPT, id_slot=0)
                self.assertEqual(reply["content"], self.cold["content"])
                self.assertLess(reply["timings"]["cache_n"], 256)
            with self.subTest("restored after that"):
                server.erase()
                server.call("/slots/0?action=restore", {"filename": "prompt.bin"})
                self.same(server.ask(PROMPT, id_slot=0), True)

    def test_one_slot(self):
        with Server(*CODED, "-np", "1", "-c", "512") as server:
            self.everywhere(server, 1)
            self.save(server, 0)
            self.elsewhere(server.folder, 1)

    def test_four_slots(self):
        with Server(*CODED) as server:
            self.everywhere(server, 4)
            self.what_it_says(server)
            self.two_hundred_times(server)
            self.save(server, 3)
            self.elsewhere(server.folder, 4)
            self.in_little_memory(server.folder)

    def test_eight_slots(self):
        with Server(*CODED, "-np", "8", "-c", "4096") as server:
            self.everywhere(server, 8)
            self.save(server, 0)
            self.elsewhere(server.folder, 8)
        with self.subTest("eight that arrive together at a server that has computed nothing"):
            with Server(*CODED, "-np", "8", "-c", "4096") as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
                jobs = [pool.submit(server.ask, PROMPT, n=8) for _ in range(8)]
                for job in jobs:
                    self.assertEqual(job.result()["content"], self.cold["content"][:len(job.result()["content"])])
                computed = sum(job.result()["timings"]["prompt_n"] for job in jobs)
                self.assertLess(computed, 3 * self.tokens)

    def what_it_says(self, server):
        server.ask(PROMPT, n=1, id_slot=0)
        usage = server.call("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})["usage"]
        self.assertEqual(usage["prompt_tokens"], self.tokens)
        self.assertGreaterEqual(usage["prompt_tokens_details"]["cached_tokens"], 256)
        cache = server.call("/props")["kv_cache"]
        self.assertEqual((cache["sink"], cache["recent"], cache["capacity_tokens"], len(cache["layers"])), (64, 64, 2048, 30))
        metrics = server.metrics()
        self.assertEqual(metrics["crumb:prefix_cache_hits_total"], metrics["llamacpp:prompt_tokens_cached_total"])
        self.assertEqual(metrics["crumb:prefix_cache_queries_total"],
                         metrics["llamacpp:prompt_tokens_cached_total"] + metrics["llamacpp:prompt_tokens_total"])
        self.assertEqual({name[6:] for name in metrics if name.startswith("crumb:")}, METRICS)
        self.assertIn("KV cache size: 2048 tokens; maximum concurrency for 512 tokens per request: 4.00x", server.output())
        now = server.call("/kv.json")
        self.assertTrue(all(s["tokens"] > 256 and s["coded"] == 2 for s in now["sequences"]))
        self.assertEqual(now["sequences"][0]["shared"], 2)

    def two_hundred_times(self, server):
        with self.subTest("200 times"), concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = set(pool.map(lambda _: server.ask(PROMPT, n=4)["content"], range(200)))
            self.assertEqual(len(answers), 1, answers)
            self.assertTrue(self.cold["content"].startswith(answers.pop()))

    def in_little_memory(self, folder):
        with Server(*CODED, "-np", "2", "--kv-memory", "27M", folder=folder) as server:
            capacity = server.call("/props")["kv_cache"]["capacity_tokens"]
            with self.subTest("a cold start with other slots"):
                self.same(server.ask(PROMPT, id_slot=0), False)
            with self.subTest("restored by another server"):
                server.erase()
                server.call("/slots/1?action=restore", {"filename": "prompt.bin"})
                self.same(server.ask(PROMPT, id_slot=1), True)
            with self.subTest("what can never fit is refused with the numbers"):
                status, message = server.refusal("/completion", {"prompt": TEXT * 10, "n_predict": 2 * capacity})
                self.assertEqual(status, 400)
                self.assertIn("--kv-memory", message)
            with self.subTest("what fits later waits, and what is kept is evicted"), concurrent.futures.ThreadPoolExecutor(6) as pool:
                jobs = [pool.submit(server.ask, f"{i} bottles. " * (capacity // 8), n=8) for i in range(6)]
                self.assertEqual([job.result()["timings"]["predicted_n"] for job in jobs], [8] * 6)
                self.assertGreater(server.metrics()["crumb:kv_pages_evicted_total"], 0)
            with self.subTest("after eviction"):
                self.assertEqual(server.ask(PROMPT, id_slot=0)["content"], self.cold["content"])
            with self.subTest("an answer that fills the cache ends as one that fills its context"):
                body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
                with concurrent.futures.ThreadPoolExecutor(2) as pool:
                    jobs = [pool.submit(server.call, "/v1/completions", body) for _ in range(2)]
                    self.assertEqual([job.result()["choices"][0]["finish_reason"] for job in jobs], ["length"] * 2)
            self.assertEqual(server.call("/health")["status"], "ok")


if __name__ == "__main__":
    server.main()
