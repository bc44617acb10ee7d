#!/usr/bin/env python3
"""crumb eval on SmolLM2: its figures are those of crumb perplexity --kl-divergence, a killed run goes on where it was, and
probes, greedy text and layers come out as they must.

usage: eval_test.py CRUMB MODEL.gguf TEXT_FOLDER
Windows of 128 tokens, 4 + 16 of them at 16 bit, so that codes are read. One thread: engines that wait for each other's
threads crawl on a machine that does something else as well.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

WINDOWS = ["--kv-sink", "4", "--kv-recent", "16", "--ubatch-size", "64"]
SMALL = ["-c", "128", *WINDOWS]


def crumb(*arguments, **options):
    done = subprocess.run([CRUMB, *arguments], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"crumb {' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


class EvalTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def eval_command(self, results, *extra):
        return ["eval", "-m", MODEL, "-t", THREADS, "--results", self.path(results),
                "--json", self.path(results + ".rows"), *extra]

    def rows(self, results, kind="quality"):
        with open(self.path(results + ".rows"), encoding="utf-8") as f:
            return [row for row in map(json.loads, f) if row["kind"] == kind]

    def test_figures_are_those_of_perplexity(self):
        with open(PROSE, encoding="utf-8") as f:
            text = f.read(20000)
        with open(self.path("text.txt"), "w", encoding="utf-8") as f:
            f.write(text)
        common = ["-m", MODEL, "-f", self.path("text.txt"), "-c", "128", "-b", "128", "-ub", "64", "--chunks", "3", "-t", THREADS]
        base = self.path("base.kld")
        crumb("perplexity", *common, "--kl-divergence-base", base)
        printed = crumb("perplexity", *common, "--kl-divergence-base", base, "--kl-divergence", "--kv", "had2", "--kv-sink", "4",
                        "--kv-recent", "16")
        crumb(*self.eval_command("results", *SMALL, "--kv", "had2", "--windows", "3", "--first", "64", "-f", self.path("text.txt")))
        row = next(r for r in self.rows("results") if r["recipe"] == "had2" and r["text"] == "text")

        def figure(name):
            found = re.search(re.escape(name) + r"\s*: *([-0-9.]+) ± *([0-9.]+)", printed)
            self.assertIsNotNone(found, f"{name} is not in:\n{printed}")
            return float(found[1]), float(found[2])

        kld, kld_error = figure("Mean    KLD")
        ratio, ratio_error = figure("Mean PPL(Q)/PPL(base)")
        same, same_error = figure("Same top p")
        ppl, ppl_error = figure("Mean PPL(base)")
        self.assertEqual(row["positions"], 3 * 63)
        self.assertGreater(kld, 0.02)  # codes are read
        # the same positions of the same engine: far closer than the error of the figures
        self.assertLess(abs(row["mean_kld"] - kld), 0.2 * kld_error)
        self.assertLess(abs(row["ppl_ratio"] - ratio), 0.2 * ratio_error)
        self.assertLess(abs(100 * row["same_top_p"] - same), same_error)
        self.assertLess(abs(row["ppl_base"] - ppl), 0.2 * ppl_error)
        # both errors are estimates of the same thing, ours with what positions have in common
        self.assertGreater(row["mean_kld_error"], 0.3 * kld_error)
        self.assertLess(row["mean_kld_error"], 5 * kld_error)

    def test_a_killed_run_goes_on(self):
        arguments = [*SMALL, "-f", PROSE, "--kv", "had2,saw4:paper", "--windows", "2"]
        process = subprocess.Popen([CRUMB, *self.eval_command("killed", *arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = 0
        while process.poll() is None and lines < 3:  # the first window of three variants
            time.sleep(0.05)
            if os.path.exists(self.path("killed")):
                with open(self.path("killed"), "rb") as f:
                    lines = f.read().count(b"\n")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open(self.path("killed"), "rb") as f:
            content = f.read()
        for line in content.split(b"\n")[:-1]:
            json.loads(line)
        self.assertLess(content.count(b"\n"), 6, "it had ended before it was killed")
        with open(self.path("killed"), "ab") as f:
            f.write(b'{"kind":"window","key":{"mo')

        crumb(*self.eval_command("killed", *arguments))
        crumb(*self.eval_command("whole", *arguments))
        quality = ["recipe", "text", "positions", "mean_kld", "mean_kld_error", "kld_99", "ppl_ratio", "same_top_p", "effective_bits"]
        pick = lambda rows: [[row[name] for name in quality] for row in rows]
        self.assertEqual(pick(self.rows("killed")), pick(self.rows("whole")))
        with open(self.path("killed"), encoding="utf-8") as f:
            keys = [json.loads(line)["key"] for line in f]
        self.assertEqual(len(keys), 6)
        self.assertEqual(len({json.dumps(key, sort_keys=True) for key in keys}), 6)

        # Nothing is measured again, and another window is another measurement.
        before = os.path.getsize(self.path("killed"))
        crumb(*self.eval_command("killed", *arguments))
        self.assertEqual(os.path.getsize(self.path("killed")), before)
        crumb(*self.eval_command("killed", *arguments[:-1], "1", "--first", "100"))
        with open(self.path("killed"), encoding="utf-8") as f:
            self.assertEqual(sum(json.loads(line)["key"]["first"] == "100" for line in f), 3)

    def test_everything_in_one_page(self):
        common = [*WINDOWS, "-f", PROSE, "--html", self.path("page.html")]
        out = crumb(*self.eval_command("all", *common, "--kv", "bf16,had2", "-c", "256", "--generate", "32", "--retrieval", "--probes", "single",
                                       "--haystacks", "1", "--haystack", PROSE))
        self.assertIn("Mean KLD", out)
        self.assertIn("of 1 block of 256 positions", out)  # an error of so few says little
        bf16, had2 = (next(r for r in self.rows("all") if r["recipe"] == name) for name in ("bf16", "had2"))
        self.assertLess(bf16["mean_kld"], 0.02)  # what another order of sums does to this model's Q4 weights
        self.assertGreater(had2["mean_kld"], 2 * bf16["mean_kld"])
        self.assertGreater(had2["pp"], 0)
        self.assertGreater(had2["tg"], 0)
        self.assertLess(had2["effective_bits"], bf16["effective_bits"])
        retrieval = self.rows("all", "retrieval")
        self.assertEqual([r["recipe"] for r in retrieval], ["16 bit", "bf16", "had2"])
        self.assertTrue(all(r["asked"] == 8 and sum(r["asked_by_depth"]) == 8 for r in retrieval))
        greedy = {r["recipe"]: r for r in self.rows("all", "trajectory")}
        self.assertEqual(list(greedy), ["16 bit", "bf16", "had2"])
        self.assertLess(greedy["had2"]["agreement"], 1)
        self.assertLess(greedy["had2"]["first_divergence"], 32)
        self.assertGreater(greedy["bf16"]["agreement"], greedy["had2"]["agreement"])
        self.assert_headings("Quality for bits", "Retrieval", "Greedy text", "Why this model is hard")

        crumb(*self.eval_command("all", *common, "-c", "128", "--kv", "had2,q4_0", "--layers", "0,29", "--ablate"))
        q4 = next(r for r in self.rows("all") if r["recipe"] == "q4_0")
        self.assertEqual(q4["bits_per_element"], 4.5)
        self.assertGreater(q4["mean_kld"], 0)
        parts = self.rows("all", "part")
        layers = {(r["layer"], r["part"]): r["mean_kld"] for r in parts if r["layer"] >= 0}
        self.assertEqual(list(layers), [(0, "K"), (0, "V"), (29, "K"), (29, "V")])
        whole = {r["part"]: r["mean_kld"] for r in parts if r["layer"] < 0}
        self.assertEqual(list(whole), ["all of it", "K alone, V at 8 bits", "V alone, K at 8 bits", "without its rotation", "no sinks", "no recent window"])
        self.assertLess(max(layers.values()), whole["all of it"])
        self.assertLess(whole["K alone, V at 8 bits"], whole["all of it"])
        self.assertGreater(whole["no recent window"], whole["all of it"])
        self.assert_headings("Quality for bits", "Where the error comes from", "Why this model is hard")

    def assert_headings(self, *headings):
        with open(self.path("page.html"), encoding="utf-8") as f:
            page = f.read()
        for heading in headings:
            self.assertIn(heading, page)

    def write(self, name, n_bytes, skip=0):
        with open(PROSE, "rb") as f:
            f.seek(skip)
            text = f.read(n_bytes)
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(text)
        return self.path(name)

    def test_texts_of_one_name_are_told_apart(self):
        def texts(results, *names):
            files = [argument for i, name in enumerate(names) for argument in ("-f", self.write(name, 3000, 4000 * i))]
            crumb(*self.eval_command(results, *SMALL, "--kv", "had2", *files), errors="replace")
            rows = self.rows(results)
            self.assertEqual([r["pareto"] for r in rows], [r["recipe"] == "had2" for r in rows])
            return [r["text"] for r in rows if r["recipe"] == "had2"]

        self.assertEqual(texts("folders", "a/text.txt", "b/text.txt"), ["a/text.txt", "b/text.txt", "all"])
        self.assertEqual(texts("sum", "all.txt", "b/text.txt"), ["all.txt", "text.txt", "all"])
        self.assertEqual(texts("bytes", "lat\udce9.txt", "b/text.txt"), ["lat\ufffd", "text", "all"])  # a name that is not UTF-8

    def test_compare_refuses_a_document_without_codes(self):
        document = self.write("document.txt", 1200)
        done = subprocess.run([CRUMB, "compare", "-m", MODEL, "--kv", "had2", "-f", document, "-p", "x"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"the document has \d+ tokens, and the divergence counts from token 384 on, behind the 320")

    def test_says_what_is_wrong(self):
        def error(*arguments):
            done = subprocess.run([CRUMB, "eval", *arguments], capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0)
            return done.stderr

        self.assertIn("--sweep", error("-m", MODEL))
        self.assertIn("-m MODEL", error("--kv", "had2"))
        self.assertIn("oscar", error("-m", MODEL, "-c", "512", "--kv", "nonsense", "--results", self.path("x"), "-f", PROSE))
        had2 = ["-m", MODEL, "--kv", "had2", "--results", self.path("x"), "-t", THREADS, "-f", PROSE]
        self.assertIn("inside the", error(*had2, "-c", "512", "--generate", "400"))
        # 64 + 256 tokens are exact: the query of position 382 is the last of -c 384 that counts, and sees codes below 64.
        self.assertIn("Take -c 1024", error(*had2, "-c", "384"))
        self.assertIn("layers 0 to 29", error(*had2, "-c", "1024", "--layers", "30"))
        self.assertIn("leaves no prompt", error(*had2[:3], "q8_0", *had2[4:], "-c", "512", "--generate", "512"))
        # Short texts and haystacks are seen before anything is measured, also those of the last context.
        few = self.write("few.txt", 3000)
        small = ["-m", MODEL, "--kv", "had2", "--results", self.path("x"), "-t", THREADS, *WINDOWS]
        self.assertIn("4112 are needed", error(*small, "-f", few, "-c", "128,4096"))
        self.assertIn("no paragraph", error(*small, "-f", few, "-c", "128", "--retrieval", "--haystack", self.write("nothing.txt", 100)))
        self.assertIn("no room for its", error(*small, "-f", few, "-c", "256,128", "--retrieval", "--haystack", PROSE))
        self.assertFalse(os.path.exists(self.path("x")))
        listed = crumb("eval", "--list")
        for line in ("planes           artefact ", "kitty ", "slow ", "q4_0 "):
            self.assertIn(line, listed)
        self.assertIn("--haystack requires --retrieval", error(*small, "-f", few, "-c", "128", "--haystack", PROSE))


if __name__ == "__main__":
    CRUMB, MODEL, TEXTS = sys.argv[1:4]
    PROSE = os.path.join(TEXTS, "prose.txt")
    THREADS = "1"
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
