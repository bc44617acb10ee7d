#!/usr/bin/env python3
"""Contexts that are full and go on (--kv-shift reprefill): every answer is that of fresh requests with the tokens that are left.

usage: shift_test.py CRUMB MODEL_F32.gguf
"""
import concurrent.futures
import re
import subprocess
import time
import unittest

import server
from server import CRUMB, MODEL, TEXT, Server

CONTEXT = 256
SHORT = ["--kv-sink", "16", "--kv-recent", "32", "-c", str(4 * CONTEXT), "--metrics", "--slots"]  # so three pages of codes fit in
CODED = ["--kv", "quarot:paper", *SHORT]
# Many at once: a batch of others changes a sum by its last bit, which may turn a code of two bits, and so a word much later.
EXACT = ["--kv", "bf16", *SHORT]
ALONE = ["-np", "1", "-c", str(CONTEXT)]


class Shifts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.plain = cls.enterClassContext(Server(*CODED))
        cls.server = cls.enterClassContext(Server(*CODED, "--kv-shift", "reprefill"))
        cls.ids = cls.plain.call("/tokenize", {"content": "".join(f"{i}. {TEXT}" for i in range(60))})["tokens"]
        cls.bos = len(cls.plain.call("/tokenize", {"content": "", "add_special": True})["tokens"])

    def fresh(self, prompt, n, keep=0, discard=0, plain=None):
        """Tokens, and how many were dropped and left behind them: requests to a server that never shifts, one a piece."""
        tokens, dropped, behind = [], [], []
        held = list(prompt)
        while True:
            piece = (plain or self.plain).ask(held, n=min(n - len(tokens), CONTEXT - len(held)), ignore_eos=True, return_tokens=True, cache_prompt=False)["tokens"]
            tokens += piece
            if len(tokens) == n:
                return tokens, dropped, behind
            held += piece
            last = held.pop()  # chosen, and not computed yet
            first = min((len(prompt) if keep < 0 else keep) + self.bos, CONTEXT - 4)
            left = len(held) - first
            drop = min(discard or left // 2, left - 1)
            held = held[:first] + held[first + drop:] + [last]
            dropped.append(drop)
            behind.append(left - drop)

    def shifted(self, server, prompt, n, keep=0, discard=0, **more):
        return server.ask(prompt, n=n, ignore_eos=True, return_tokens=True, n_keep=keep, n_discard=discard, **more)

    def counted(self, server):
        return [server.metrics()[f"crumb:kv_{name}_total"] for name in ("context_shifts", "tokens_dropped", "tokens_recomputed")]

    def same(self, server, n_prompt, n, **how):
        prompt = self.ids[:n_prompt]
        tokens, dropped, behind = self.fresh(prompt, n, **how)
        before = self.counted(server)
        reply = self.shifted(server, prompt, n, **how)
        self.assertEqual(reply["tokens"], tokens)
        self.assertTrue(reply["truncated"])
        self.assertEqual(reply["stop_type"], "limit")
        shifts, gone, computed = (now - then for now, then in zip(self.counted(server), before))
        self.assertEqual((shifts, gone), (len(dropped), sum(dropped)))
        # some may be known from another request, and of those that were kept no more stay than have their window
        self.assertTrue(len(behind) <= computed <= sum(behind) + len(behind) * CONTEXT, (computed, behind))
        self.assertEqual(reply["timings"]["cache_n"] + reply["timings"]["prompt_n"], n_prompt + computed)
        return dropped

    def test_the_text_of_fresh_requests(self):
        self.assertEqual(len(self.same(self.server, 250, 140)), 2)

    def test_tokens_that_are_kept(self):
        for n, how in ((35, {"keep": 75}), (40, {"keep": -1}), (70, {"keep": 10, "discard": 35}), (28, {"keep": 5000})):
            with self.subTest(how):
                self.assertGreaterEqual(len(self.same(self.server, 230, n, **how)), 1)

    def test_more_is_kept_than_there_is(self):
        """Also beside a token that begins every text, which llama.cpp counts with those that are kept."""
        flags = [*ALONE, "--override-kv", "tokenizer.ggml.add_bos_token=bool:true"]
        with Server(*CODED, *flags, "--kv-shift", "reprefill") as server:
            # prompts of tokens are taken as they are: all but the last three stay, whatever is asked beyond that
            replies = [self.shifted(server, self.ids[:250], 10, keep=keep)["tokens"] for keep in (2 ** 31 - 1, 2 ** 31 - 2, CONTEXT - 4)]
        self.assertEqual(replies, [self.fresh(self.ids[:250], 10, keep=CONTEXT - 4)[0]] * 3)

    def test_several_answers_to_one_prompt(self):
        expected, dropped, _ = self.fresh(self.ids[:240], 30)
        before = self.counted(self.server)[0]
        replies = self.shifted(self.server, self.ids[:240], 30, n_cmpl=2)
        self.assertEqual([reply["tokens"] for reply in replies], [expected] * 2)
        self.assertEqual(self.counted(self.server)[0] - before, 2 * len(dropped))

    def test_four_at_once(self):
        jobs = [(self.ids[i:i + 235 + 4 * i], 25 + 5 * i) for i in range(4)]
        with Server(*EXACT, "--kv-shift", "reprefill") as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda job: self.shifted(server, *job)["tokens"], jobs))
        with Server(*EXACT) as plain:
            for job, tokens in zip(jobs, replies):
                self.assertEqual(tokens, self.fresh(*job, plain=plain)[0])

    def test_the_prompt_is_found_again(self):
        first = self.shifted(self.server, self.ids[:240], 30, id_slot=0)
        self.assertEqual(self.shifted(self.server, self.ids[:240], 30, id_slot=0)["tokens"], first["tokens"])
        self.assertEqual(self.server.metrics()["crumb:kv_tokens_aged_early_total"], 0)

    def test_who_goes_away_leaves_nothing(self):
        body = {"prompt": self.ids[:250], "n_predict": -1, "ignore_eos": True, "temperature": 0}
        for n in (5, 6, 7, 8):  # some leave while what is behind the gap is computed
            for i, _ in enumerate(self.server.events("/completion", body)):
                if i == n:
                    break
        while self.server.metrics()["llamacpp:requests_processing"]:
            time.sleep(0.1)
        self.server.erase()
        metrics = self.server.metrics()
        self.assertEqual((metrics["crumb:kv_pages_in_use"], metrics["crumb:kv_cache_bytes_in_use"]), (0, 0))
        self.same(self.server, 250, 20)

    def test_little_memory(self):
        flags = [*EXACT, "-np", "2", "-c", str(CONTEXT), "-b", "256", "-ub", "128", "--kv-shift", "reprefill", "--kv-memory"]
        said = subprocess.run([CRUMB, "serve", "-m", MODEL, *flags, "1M"], capture_output=True, text=True, timeout=120)
        least = int(re.search(r"give at least (\d+)M", said.stderr + said.stdout)[1])
        jobs = [(self.ids[i:230 + i], 40) for i in range(3)]
        with Server(*EXACT) as plain:
            alone = [self.fresh(*job, plain=plain)[0] for job in jobs]
        with Server(*flags, f"{least + 3}M") as server:
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                for job, right in zip([pool.submit(self.shifted, server, *job) for job in jobs], alone):
                    self.assertEqual(job.result()["tokens"], right)  # one waits until there is room
                for job in [pool.submit(self.shifted, server, self.ids[i:225 + i], 70) for i in range(2)]:
                    self.assertGreater(job.result()["tokens_predicted"], 31)  # ends where there is no more room
            self.assertEqual(server.call("/health")["status"], "ok")
            server.erase()
            self.assertEqual(server.metrics()["crumb:kv_pages_in_use"], 0)

    def test_a_draft_model(self):
        with Server(*CODED, "--kv-shift", "reprefill", "-md", MODEL, "--spec-draft-n-max", "4", "--spec-type", "draft-simple", *ALONE) as server:
            self.assertGreater(len(self.same(server, 240, 30)), 0)

    def test_what_is_checked_goes_on(self):
        with Server(*CODED, "--kv-shift", "reprefill", "--kv-verify", "4", *ALONE) as server:
            self.same(server, 245, 20)
            self.assertGreater(server.metrics()["crumb:kv_verify_rows_total"], 0)

    def test_without_it(self):
        reply = self.plain.call("/v1/completions", {"prompt": self.ids[:250], "max_tokens": 100, "ignore_eos": True})
        self.assertEqual((reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]), ("length", CONTEXT - 250))
        self.assertEqual(self.counted(self.plain), [0, 0, 0])
        for command, flags, words in (("serve", ["--context-shift"], "--kv-shift reprefill"), ("serve", ["--kv-shift", "slide"], "refuse or reprefill"),
                                      ("run", ["--kv-shift", "reprefill"], "for crumb serve")):
            run = subprocess.run([CRUMB, command, "-m", MODEL, "--kv", "quarot:paper", *flags], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(words, run.stderr)


if __name__ == "__main__":
    server.main()
