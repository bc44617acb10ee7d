#!/usr/bin/env python3
"""Slot files that lose nothing: damaged, cut off, foreign, of other settings, while the disk is full, and killed midway.

usage: slot_file_test.py CRUMB MODEL_F32.gguf
"""
import os
import re
import resource
import signal
import struct
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error

import server
from server import CRUMB, MODEL, TEXT, Server

PROMPT = TEXT * 24 + "In short,"
CODED = ["--kv", "quarot:paper", "--kv-recent", "64", "-np", "2", "-c", "1024", "--slots"]


class SlotFiles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def keeps_its_slot(self, server):
        self.assertGreater(server.ask(PROMPT, n=4, id_slot=0)["timings"]["cache_n"], 300)

    def restore(self, server, name, slot=0):
        return server.call(f"/slots/{slot}?action=restore", {"filename": name})["n_restored"]

    def test_damage(self):
        with Server(*CODED, folder=self.folder) as server:
            first = server.ask(PROMPT, id_slot=0)["content"]
            saved = server.call("/slots/0?action=save", {"filename": "good"})["n_saved"]
            self.assertEqual(os.listdir(server.folder), ["good"])
            status, message = server.refusal("/slots/0?action=save", {"filename": "other.part"})
            self.assertEqual((status, "ends in .part" in message), (400, True), message)
            self.assertEqual(os.listdir(server.folder), ["good"])
            with open(server.path("good"), "rb") as f:
                good = f.read()
            for slot, why in ((1, "slot 1 holds no tokens"), (-1, "Invalid slot ID -1"), (-2, "Invalid slot ID -2")):
                status, message = server.refusal(f"/slots/{slot}?action=save", {"filename": "good"})
                self.assertEqual((status, why in message), (400, True), message)
            with open(server.path("good"), "rb") as f:
                self.assertEqual(f.read(), good)
            for action in ("restore", "erase"):
                self.assertEqual(server.refusal(f"/slots/-1?action={action}", {"filename": "good"})[0], 400)
            n_tokens = struct.unpack_from("<I", good, 8)[0]

            def flipped(at):
                return good[:at] + bytes([good[at] ^ 1]) + good[at + 1:]

            state = 12 + 4 * n_tokens  # magic, version, count, tokens; then the state
            damaged = {
                "magic": (flipped(0), "no slot file"),
                "first token": (flipped(12 + 4 * 3), "list of tokens"),
                "last token": (flipped(12 + 4 * (saved + 2)), "list of tokens"),
                "size of the list": (flipped(8), ""),
                "sequences of the state": (flipped(state), "damaged"),
                "magic of the state": (flipped(state + 4), "damaged"),
                "version of the state": (flipped(state + 12), "damaged"),
                **{f"header of the state, at {at}": (flipped(state + at), "damaged") for at in range(20, 420, 20)},
                "token of the state": (flipped(len(good) - len(good) // 2), "wrong checksum"),
                "last byte": (flipped(len(good) - 1), "wrong checksum"),
                "cut in the list": (good[:40], "no slot file"),
                "cut in the state": (good[:state + 60], "cut off"),
                "cut in a block": (good[:len(good) // 3], ""),
                "cut by a byte": (good[:-1], ""),
                "nothing": (b"", "no slot file"),
                "a text": (b"once upon a time " * 1000, "no slot file"),
            }
            for what, (content, why) in damaged.items():
                with self.subTest(what):
                    with open(server.path("bad"), "wb") as f:
                        f.write(content)
                    status, message = server.refusal("/slots/0?action=restore", {"filename": "bad"})
                    self.assertIn(status, range(400, 500))
                    self.assertIn(why, message)
                    self.keeps_its_slot(server)
            status, message = server.refusal("/slots/1?action=restore", {"filename": "absent"})
            self.assertEqual(status, 400)
            self.assertIn(f"there is no file {server.path('absent')}: POST /slots/1?action=save", message)
            for name in ("absent", "../good", "/etc/passwd", "a/b", "..", ""):
                with self.subTest(name):
                    self.assertIn(server.refusal("/slots/0?action=restore", {"filename": name})[0], range(400, 500))
                    if name != "absent":
                        self.assertIn(server.refusal("/slots/0?action=save", {"filename": name})[0], range(400, 500))
            self.keeps_its_slot(server)
            server.erase()
            self.assertEqual(self.restore(server, "good", slot=1), saved)
            self.assertEqual(server.ask(PROMPT, id_slot=1)["content"], first)
        with Server(*CODED, "--kv-recent", "128", folder=self.folder) as server:
            status, message = server.refusal("/slots/0?action=restore", {"filename": "good"})
            self.assertEqual(status, 400)
            self.assertIn("--kv-recent '64', here it is '128'", message)

    def test_between_instruction_sets(self):
        """What one wrote is read by the next, whatever reads codes there, and the answer is that of its own cold start."""
        refused = subprocess.run([CRUMB, "serve", "-m", MODEL, *CODED, "--kv-attention", "none"], capture_output=True, text=True, timeout=60)
        levels = re.search(r"--kv-attention takes auto, (.*) on this machine", refused.stderr)[1].split(", ")
        self.assertGreaterEqual(len(levels), 3, levels)  # portable, one of this machine, and pages that become numbers first
        for here, there in zip(levels, levels[1:] + levels[:1]):
            with self.subTest(f"{here}, then {there}"):
                with Server(*CODED, "--kv-attention", here, folder=self.folder) as server:
                    server.ask(PROMPT, n=1, id_slot=0)
                    saved = server.call("/slots/0?action=save", {"filename": "state"})["n_saved"]
                with Server(*CODED, "--kv-attention", there, folder=self.folder) as server:
                    self.assertIn(f"attention {there}", server.output())
                    cold = server.ask(PROMPT, id_slot=0, cache_prompt=False)["content"]
                    server.erase()
                    self.assertEqual(self.restore(server, "state", slot=1), saved)
                    restored = server.ask(PROMPT, id_slot=1)
                    self.assertEqual(restored["content"], cold)
                    self.assertGreater(restored["timings"]["cache_n"], 300)

    def test_a_full_disk(self):
        with Server(*CODED, preexec_fn=limited, restore_signals=False) as server:
            server.ask(PROMPT, id_slot=0)
            status, message = server.refusal("/slots/0?action=save", {"filename": "whole"})
            self.assertEqual(status, 500)
            self.assertIn("could not be written", message)
            self.assertEqual([name for name in os.listdir(server.folder) if name.startswith("whole")], [])
            self.keeps_its_slot(server)

    def test_killed_while_it_saves(self):
        with Server(*CODED, folder=self.folder) as server:
            server.ask(PROMPT, id_slot=0)
            server.call("/slots/0?action=save", {"filename": "state"})
        caught = 0
        for i in range(3):
            with Server(*CODED, folder=self.folder) as server:
                self.assertGreater(self.restore(server, "state"), 300)  # what the last kill left
                server.ask(f"{i}. {PROMPT}", n=1, id_slot=0)

                def save():
                    try:
                        server.call("/slots/0?action=save", {"filename": "state"})
                    except (OSError, urllib.error.URLError):
                        pass

                saving = threading.Thread(target=save)
                saving.start()
                part, end = server.path("state.part"), time.monotonic() + 30
                while not os.path.exists(part) and saving.is_alive() and time.monotonic() < end:
                    pass
                server.process.send_signal(signal.SIGKILL)
                saving.join()
                server.process.wait()
                caught += os.path.exists(part)
        self.assertGreater(caught, 0, "no kill came while a file was written")
        with Server(*CODED, folder=self.folder) as server:
            self.assertGreater(self.restore(server, "state"), 300)
            self.assertIn(server.refusal("/slots/1?action=restore", {"filename": "state.part"})[0], range(400, 500))


def limited():
    """Files end at a megabyte, as they do on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


if __name__ == "__main__":
    server.main()
