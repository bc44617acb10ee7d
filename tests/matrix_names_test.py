"""MATRIX.md names tests: each of them exists. usage: matrix_names_test.py"""

import fnmatch
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Names(unittest.TestCase):
    def test_every_name_is_a_test(self):
        files = [path for folder in ("tests", "tools", "python/tests") for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h", ".py", ".sh")]
        names = {path.stem for path in files}  # of files, test suites, tests and methods
        for path in files:
            for words in re.findall(r"(?:TEST|TEST_P|TEST_F|RC_GTEST_PROP|SUITE_P)\(\s*(\w+),\s*(\w+)|(?:class|def) (\w+)", path.read_text()):
                names.update(filter(None, words))
        for cmake in ROOT.glob("tests/**/CMakeLists.txt"):
            names.update(re.findall(r"(?:add_test\(NAME|add_executable\() *(\w+)", cmake.read_text()))
        said = re.findall(r"`([^`]+)`", (ROOT / "tests" / "MATRIX.md").read_text())
        self.assertGreater(len(said), 50)
        for name in said:
            if name.startswith(("-", "crumb ", "make ")) or (ROOT / name).exists():
                continue
            for part in filter(None, re.split(r"[/.]", name)):
                self.assertTrue(any(fnmatch.fnmatchcase(known, part) for known in names), f"no test is called {name}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
