"""The program's refusals, run as a user runs it: exit status 2 for a wrong flag, 1 for what cannot be done, a line that
says what, why and what to type, and nothing lost. usage: program_test.py CRUMB"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = sys.argv.pop(1)


class Refusals(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refused(self, status, *expected, arguments, **environment):
        done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=60,
                              env=os.environ | environment)
        self.assertEqual(done.returncode, status, done.stderr)
        for text in expected:
            self.assertIn(text, done.stderr)

    def test_flags(self):
        model = ["run", "-m", "model.gguf", "-p", "x"]
        self.refused(2, "unknown command", arguments=["bnech"])
        self.refused(2, "crumb compare: error: unknown or too many: -c 2048 --odd; crumb compare --help",
                     arguments=["compare", "-m", "m", "-f", "f", "-p", "p", "-c", "2048", "--odd", "--kv", "had2"])
        self.refused(2, "--tokens", arguments=["calibrate", "-m", "model.gguf", "--tokens", "many"])
        self.refused(2, "--skip", arguments=["calibrate", "-m", "model.gguf", "--skip", "-1"])
        self.refused(2, "--metric-seed", arguments=["calibrate", "-m", "model.gguf", "--metric-seed", "-1"])
        for flag, value in (("--checkpoint", "x"), ("--metric-seed", "0"), ("--metric-clip", "3")):
            for metric in ("none", "local"):
                self.refused(1, f"{flag} is of --metric gradient, and this is --metric {metric}",
                             arguments=["calibrate", "-m", "model.gguf", "--metric", metric, flag, value])
        self.refused(2, "--tokens: Value -5", arguments=["calibrate", "-m", "model.gguf", "--tokens", "-5"])
        self.refused(2, "--first: Value -1 not in range 0 to 4194304;", arguments=["eval", "-m", "m", "--kv", "had2", "--first", "-1"])
        for flag, wrong, names in (("--k-target", "sst", "qqt, ktk"), ("--v-target", "qqt", "sst, sst_true, vtv"), ("--composition", "x", "r_h_pbr")):
            self.refused(1, f"'{wrong}'; choose one of {names}", arguments=["calibrate", "-m", "model.gguf", "-f", "text.txt", flag, wrong])
        self.refused(2, "crumb calibrate: error: --model is required; crumb calibrate --help", arguments=["calibrate"])
        self.refused(1, "no KV recipe 'nope'", "oscar", arguments=[*model, "--kv", "nope"])
        self.refused(1, "--kv needs a value", arguments=[*model, "--kv"])
        self.refused(1, "without --kv RECIPE", arguments=[*model, "--kv-sink", "4"])
        self.refused(1, "--kv-sink takes a whole number", arguments=[*model, "--kv", "had2", "--kv-sink", "-1"])
        self.refused(1, "position or exact", arguments=[*model, "--kv", "had2", "--kv-prefill", "fast"])
        self.refused(1, "--kv-artifact needs", arguments=[*model, "--kv", "had2", "--kv-artifact="])
        self.refused(1, "-np 0", arguments=["inspect", "-m", "model.gguf", "-np", "0"])
        self.refused(1, "leave --kv out", arguments=["quantize", "--kv", "had2", "a.gguf", "b.gguf", "q8_0"])

    def test_threads_are_at_most_four_a_core(self):
        for command in (["attn-bench"], ["calibrate", "-m", "m"], ["compare", "-m", "m", "-f", "f", "--kv", "had2"], ["depth-bench", "-m", "m"],
                        ["eval", "-m", "m", "--kv", "had2"]):
            self.refused(2, "5000 is no number from 1 to", "cores", arguments=[*command, "-t", "5000"])
        for threads in ("-3", "0", "two", "4294967297"):
            self.refused(2, f"{threads} is no number from 1 to", arguments=["calibrate", "-m", "m", "-t", threads])

    def test_what_is_measured_once_is_named_once(self):
        text, link = self.folder / "text.txt", self.folder / "link.txt"
        text.write_text("text " * 20000)
        link.symlink_to("text.txt")
        command = ["eval", "-m", "m.gguf", "-f", text]
        for flags, error in ((["--kv", "had2,saw4,had2"], "--kv names had2 twice"), (["--kv", "had2", "-c", "512,512"], "-c names 512 twice"),
                             (["--kv", "had2", "--retrieval", "--probes", "single,single"], "--probes names single twice"),
                             (["--kv", "had2", "--layers", "1,1"], "--layers names 1 twice"), (["--kv", "had2", "-f", link], f"-f names {text} twice")):
            self.refused(1, error, arguments=[*command, *flags])
        self.refused(1, f"-f names {text} twice", arguments=["calibrate", "-m", "m.gguf", "-f", text, "-f", link])
        self.refused(1, "--kv names had2 twice", arguments=["compare", "-m", "m.gguf", "-f", text, "--kv", "had2,had2"])

    def test_binary_files_and_utf_16_are_no_text(self):
        binary, wide = self.folder / "binary.txt", self.folder / "wide.txt"
        binary.write_bytes(b"GGUF\0\0")
        wide.write_text("text " * 20000, encoding="utf-16")
        self.refused(1, f"{binary} is no text: byte 4 is zero", arguments=["calibrate", "-m", "m.gguf", "-f", binary])
        self.refused(1, f"{wide} is in UTF-16", "iconv", arguments=["calibrate", "-m", "m.gguf", "-f", wide])

    def test_an_output_that_is_full_or_closed_is_said(self):
        for arguments in (["eval", "--list"], ["--help"], ["--version"], ["inspect", "--recipes"]):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(done.returncode, 1, arguments)
            self.assertIn("standard output could not be written: No space left", done.stderr)

    def test_a_model_that_is_not_there_is_what_is_missing(self):
        text = self.folder / "text.txt"
        text.write_text("text " * 20000)
        output = ["-o", self.folder / "out"]
        for command in (["calibrate", "-f", text], ["inspect"], ["eval", "-f", text, "--kv", "had2"], ["compare", "-f", text, "-p", "x", "--kv", "had2"],
                        ["rotations", "embed", *output], ["rotations", "embed", "--artifact", "a", *output],
                        ["rotations", "import", "--k", "a", "--v", "a", *output], ["rotations", "extract", "--from", "a", *output],
                        ["rotations", "adopt", "--artifact", "a", *output]):
            self.refused(1, "there is no model file", "nope.gguf", arguments=[*command, "-m", self.folder / "nope.gguf"])
        self.assertFalse((self.folder / "out").exists())

    def test_flags_of_llama_that_contradict(self):
        for flags in (["-ctk", "q8_0"], ["--cache-type-v=f16"], ["--context-shift"], ["-gan", "4"], ["--cache-reuse", "64"]):
            self.refused(1, "does not go with --kv had2", arguments=["serve", "-m", "model.gguf", "--kv", "had2", *flags])
        self.refused(1, "unset it", arguments=["serve", "-m", "model.gguf", "--kv", "had2"], LLAMA_ARG_CONTEXT_SHIFT="true")
        self.refused(1, "does not go with --kv-shift reprefill",
                     arguments=["serve", "-m", "model.gguf", "--kv", "had2", "--kv-shift", "reprefill", "--mmproj", "projector.gguf"])

    def test_outputs_are_looked_at_before_the_work(self):
        model = self.folder / "model.gguf"
        model.write_bytes(b"GGUF and weights")
        text = self.folder / "text.txt"
        text.write_text("text " * 20000)
        self.refused(1, "is not an artefact", "choose another name",
                     arguments=["calibrate", "-m", model, "-f", text, "-o", model])
        self.refused(1, "a folder that exists",
                     arguments=["calibrate", "-m", model, "-f", text, "-o", self.folder / "no" / "a.safetensors"])
        self.assertEqual(model.read_bytes(), b"GGUF and weights")
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["model.gguf", "text.txt"])

    def test_outputs_are_files_of_their_own(self):
        text, pipe, link, out = (self.folder / name for name in ("text.txt", "pipe", "link", "out"))
        text.write_text("text " * 20000)
        os.mkfifo(pipe)
        link.symlink_to("out")
        evaluate, calibrate = ["eval", "-m", "m.gguf", "--kv", "had2", "-f", text], ["calibrate", "-m", "m.gguf", "-f", text]
        for command, one, other in ((evaluate, "--results", "--json"), (evaluate, "--json", "--html"), (evaluate, "--results", "--html"),
                                    (calibrate, "-o", "--checkpoint"), (["attn-bench", "-c", "64"], "--json", "--svg")):
            self.refused(1, f"{one} and {other} are the same file", arguments=[*command, one, out, other, link])
            self.refused(1, "pipe is a device or a pipe", arguments=[*command, one, pipe])
            self.refused(1, "give the name of a file", arguments=[*command, one, "-"])
        self.assertTrue(pipe.is_fifo())
        self.assertFalse(out.exists())
        done = subprocess.run([PROGRAM, "attn-bench", "-c", "64", "-r", "1", "--against", "none", "--json", link, "--megabytes", "1"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(link.is_symlink())
        self.assertEqual(json.loads(out.read_text())["cells"][0]["context"], 64)

    def test_a_results_file_that_was_there_stays(self):
        results, text = self.folder / "results", self.folder / "text.txt"
        results.touch()
        text.write_text("text " * 20000)
        self.refused(1, "no model file", arguments=["eval", "-m", "m.gguf", "--kv", "had2", "-f", text, "--results", results])
        self.assertTrue(results.exists())
        results.write_text('{"kind":"window","key":{}}\n')
        self.refused(1, f"{results}:1: not a result", arguments=["eval", "-m", "m.gguf", "--kv", "had2", "-f", text, "--results", results])

    def test_an_artefact_is_not_written_over_the_one_that_is_read(self):
        artefact, beside, model = self.folder / "a.safetensors", self.folder / "model.crumb.safetensors", self.folder / "model.gguf"
        model.write_bytes(b"GGUF and weights")
        artefact.write_bytes(b"artefact of another file")
        beside.hardlink_to(artefact)
        for output in (["-o", artefact], ["-o", self.folder / ".." / self.folder.name / artefact.name], []):
            self.refused(1, "would be overwritten", "-o",
                         arguments=["rotations", "adopt", "-m", model, "--artifact", artefact, *output])
            self.refused(1, "would be overwritten", "-o",
                         arguments=["rotations", "extract", "-m", model, "--from", artefact, *output])
        self.assertEqual(artefact.read_bytes(), b"artefact of another file")

    def test_a_benchmark_writes_over_its_own_kind_alone(self):
        model = self.folder / "model.gguf"
        model.write_bytes(b"GGUF and weights")
        for flag, kind in (("--json", "JSON"), ("--svg", "SVG")):
            self.refused(1, "is not", kind, arguments=["attn-bench", "-c", "64", flag, model])
        self.assertEqual(model.read_bytes(), b"GGUF and weights")

    def test_a_benchmark_says_which_recipes_it_cannot_fill(self):
        for recipe in ("kivi128", "kitty", "ott", "kvarn:paper"):
            self.refused(1, "fills pages of 64 tokens", "have 128", arguments=["attn-bench", "-c", "64", "--kv", recipe])
        self.refused(1, "needs an artefact", arguments=["attn-bench", "-c", "64", "--kv", "oscar"])

    def test_a_benchmark_says_which_instruction_sets_there_are(self):
        other = "avx2" if platform.machine() == "aarch64" else "neon"
        for flag in ("--isa", "--against"):
            self.refused(1, f"no instruction set '{other}': it has portable", arguments=["attn-bench", "-c", "64", flag, other])

    def test_a_benchmark_says_which_sizes_there_are(self):
        for shape in ("0/2x128", "12/2x-128", "12/2x0", "12/5x128", "12/2x128x", "2048/2x128"):
            self.refused(1, f"'{shape}' is no shape", arguments=["attn-bench", "-c", "64", "--shape", shape])
        for flag, value in (("-c", "2000000000"), ("-c", "0"), ("--check", "-1"), ("--megabytes", "0"), ("--layer", "-1"), ("-r", "0")):
            self.refused(2, f"Value {value} not in range", arguments=["attn-bench", flag, value])
        self.refused(1, "tokens of 1024/1024x1024 take", "lower -c", arguments=["attn-bench", "-c", "16000000", "--shape", "1024/1024x1024"])

    def test_depths_lie_beyond_what_is_timed_before_them(self):
        model = self.folder / "model.gguf"
        model.write_bytes(b"GGUF and weights")
        self.refused(1, "cannot be 16", "from 1576 on", "-p 0: no prompts", arguments=["depth-bench", "-m", model, "-d", "0,16"])
        self.refused(1, "4096 sequences of", "lower -s", arguments=["depth-bench", "-m", model, "-d", "16000000", "-s", "4096"])

    def test_an_environment_that_says_off_is_no_contradiction(self):
        done = subprocess.run([PROGRAM, "serve", "--kv", "had2", "-m", self.folder / "missing.gguf", "--port", "1"],
                              capture_output=True, text=True, timeout=60,
                              env=os.environ | {"LLAMA_ARG_CONTEXT_SHIFT": "false"})
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("missing.gguf", done.stderr)
        self.assertIn("No such file", done.stderr)
        self.assertNotIn("does not go with", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
