#!/usr/bin/env python3
"""What depth.py and sessions.py refuse, what depth.py keeps of earlier runs and depth_plot.py makes of them, names of slot files, and that
every tool explains itself.

usage: test_measure.py
"""
import json
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

from slots import Slots

TOOLS = Path(__file__).resolve().parent
RUN = {"cache": "had2", "depth": 0, "round": 0, "load": 1.0, "file": "m.gguf", "threads": 1, "prompt_tokens": 512, "generated_tokens": 32,
       "flags": "--kv had2", "prompt": 80.0, "generate": 20.0}


class Measure(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_alone(self, tool, *arguments):
        return subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], capture_output=True, text=True, timeout=60)

    def run_tool(self, tool, *arguments):
        return self.run_alone(tool, self.folder / "no-crumb", "m.gguf", *arguments)

    def refused(self, status, words, tool, *arguments):
        self.refuses(self.run_tool(tool, *arguments), status, words)

    def refuses(self, done, status, words):
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertIn(words, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def depth(self, *arguments):
        return ["depth.py", "-o", self.folder / "runs", "--folder", self.folder / "slots", "--cache", "had2=--kv had2", "--rounds", "1", "--depths", "0", *arguments]

    def keep(self, *lines):
        (self.folder / "runs.jsonl").write_text("".join(lines))

    def test_every_tool_says_what_it_is_without_packages(self):
        tools = [path for path in sorted(TOOLS.glob("**/*.py")) if path.stat().st_mode & 0o100 and not path.name.startswith("test_")]
        self.assertGreater(len(tools), 7)
        for path in tools:
            with self.subTest(path.name):
                done = subprocess.run([sys.executable, "-S", path, "--help"], capture_output=True, text=True, timeout=60)  # -S: none at all
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("usage", done.stdout.lower())

    def test_flags(self):
        for flags in (["--depths", "a,b"], ["--rounds", "0"], ["--prompt", "0"], ["--generate", "-1"], ["--cache", "had2"], ["--cache", "had2=--kv had2@deep"]):
            self.refused(2, f"not '{flags[1]}'", *self.depth(*flags))
        for flags in (["--loads", "1,x"], ["--loads", "0"], ["--rounds", "0"], ["--answer", "1"], ["--tokens", "0"]):
            self.refused(2, f"argument {flags[0]}", "sessions.py", "--folder", self.folder, *flags)

    def test_files_that_are_not_there(self):
        self.refused(1, "no-crumb", *self.depth())
        self.refused(1, "no-crumb", "sessions.py", "--folder", self.folder, "--cache", "--kv had2")
        self.refused(1, "no/runs", *self.depth("-o", self.folder / "no/runs"))
        self.refused(1, "no/a.json", "sessions.py", "--folder", self.folder, "--json", self.folder / "no/a.json")
        (self.folder / "file").touch()
        self.refused(1, "file", "sessions.py", "--folder", self.folder / "file")
        self.refused(1, "file", *self.depth("--folder", self.folder / "file"))

    def test_names_of_slot_files_hold_what_a_server_takes(self):
        slots = Slots("crumb", "models/a model: 1.gguf", self.folder, 1)
        for flags in ("--kv had2 --override-kv llama.context_length=int:65536", "-ctk q8_0 -ctv q8_0"):
            self.assertRegex(Path(slots.file(flags, 512)).name, r"^a_model__1\.512\.[A-Za-z0-9._-]+\.1$")

    def test_numpy_is_missed_before_the_work(self):
        for tool in (["sessions.py"], ["sessions.py", "--cache", "-ctk q4_0 -ctv q4_0"], ["depth.py", "-o", self.folder / "runs"]):
            # -S: no packages
            done = subprocess.run([sys.executable, "-S", TOOLS / tool[0], self.folder / "no-crumb", "m.gguf", "--folder", self.folder, *tool[1:]],
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn("numpy", done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_what_was_measured_is_not_measured_again(self):
        self.keep(json.dumps(RUN) + "\n")
        done = self.run_tool(*self.depth())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| had2 | 80.0 |", done.stdout)
        self.assertIn("| had2 | 20.0 |", done.stdout)
        self.assertTrue((self.folder / "runs.svg").exists())

    def test_a_line_that_was_cut_off_is_dropped(self):
        self.keep(json.dumps(RUN) + "\n", json.dumps(RUN | {"round": 1})[:90])
        self.assertEqual(self.run_tool(*self.depth()).returncode, 0)
        self.assertEqual((self.folder / "runs.jsonl").read_text(), json.dumps(RUN) + "\n")

    def test_runs_of_other_settings_are_refused_and_kept(self):
        for change in ({"file": "n.gguf"}, {"threads": 2}, {"prompt_tokens": 16}, {"generated_tokens": 4}, {"flags": "--kv had2 -ub 64"}):
            self.keep(json.dumps(RUN | change) + "\n")
            self.refused(1, "line 1 of", *self.depth())
            self.assertEqual(json.loads((self.folder / "runs.jsonl").read_text()), RUN | change)

    def test_lines_that_are_no_runs_are_refused(self):
        for line in ("{}", "[]", "words", json.dumps(RUN | {"prompt": None}), json.dumps(RUN | {"generate": 0})):
            self.keep(json.dumps(RUN) + "\n", line + "\n")
            self.refused(1, "line 2 of", *self.depth())

    def test_the_plot_goes_where_it_is_asked_for(self):
        self.keep(json.dumps(RUN) + "\n")
        self.assertEqual(self.run_tool(*self.depth("--svg", self.folder / "p.svg")).returncode, 0)
        self.assertTrue((self.folder / "p.svg").exists())
        self.assertFalse((self.folder / "runs.svg").exists())

    def plotted(self, *runs):
        """Texts of the plot of these runs and coordinates of its lines, by colour."""
        self.keep(*(json.dumps(r) + "\n" for r in runs))
        done = self.run_alone("depth_plot.py", self.folder / "runs.jsonl")
        self.assertEqual(done.returncode, 0, done.stderr)
        texts, lines = [], {}
        for element in xml.etree.ElementTree.parse(self.folder / "runs.svg").getroot():
            if element.tag.endswith("text"):
                texts.append(element.text)
            elif element.tag.endswith("polyline") and element.get("stroke-width") == "2":
                points = [tuple(map(float, point.split(","))) for point in element.get("points").split()]
                lines.setdefault(element.get("stroke"), []).append(points)
        return done.stdout, texts, lines

    def test_a_plot_of_runs_from_elsewhere(self):
        runs = [RUN | {"cache": cache, "flags": cache, "depth": depth, "round": i, "generate": generate * (1 + i)}
                for cache, generate in (("a<b", 10), ("f16", 20)) for depth in (0, 8192) for i in range(3)]
        table, texts, lines = self.plotted(*runs)
        self.assertIn("| a<b | 20.0 | 20.0 | 0.000 |", table)
        for text in ("m, 1 thread, medians of 3 rounds", "ms a generated token", "ms a prompt token", "a<b 50", "f16 25", "a<b 12.5", "8k"):
            self.assertIn(text, texts)
        slow, fast = (of_cache[0] for of_cache in lines.values())
        self.assertLess(slow[0][1], fast[0][1])  # the slower one is further up, ...
        self.assertEqual([y for _, y in slow], [slow[0][1]] * 2)  # ... as far at any depth
        self.assertLess(slow[0][0], slow[1][0])

    def test_a_plot_of_one_run(self):
        self.assertIn("had2 50", self.plotted(RUN)[1])

    def test_a_plot_of_several_files(self):
        files = [self.folder / "a.jsonl", self.folder / "b.jsonl"]
        for path, cache in zip(files, ("had2", "f16")):
            path.write_text(json.dumps(RUN | {"cache": cache}) + "\n")
        done = self.run_alone("depth_plot.py", *files, "--svg", self.folder / "both.svg")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("f16 50", (self.folder / "both.svg").read_text())

    def test_what_is_not_plotted(self):
        runs = self.folder / "runs.jsonl"
        self.refuses(self.run_alone("depth_plot.py", runs), 1, "runs.jsonl")
        for line, words in (("", "nothing was measured"), ("{}\n", "line 1 of"), (json.dumps(RUN) + '\n{"cache": "f', "line 2 of"),
                            (json.dumps(RUN) + "\n" + json.dumps(RUN | {"threads": 2}), "threads 1 and 2"),
                            (json.dumps(RUN) + "\n" + json.dumps(RUN | {"flags": "--kv int2"}), "with --kv had2 and with --kv int2"),
                            ("\n".join(json.dumps(RUN | {"cache": f"c{i}"}) for i in range(9)), "9 caches")):
            self.keep(line)
            self.refuses(self.run_alone("depth_plot.py", runs), 1, words)
        runs.write_bytes(b"\xff\n")
        self.refuses(self.run_alone("depth_plot.py", runs), 1, "utf-8")


if __name__ == "__main__":
    unittest.main()
