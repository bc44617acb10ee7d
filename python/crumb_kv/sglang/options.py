"""What the user says, and the versions of SGLang that are known."""

import json
import re

from ..serving import Refused, read_options

BACKEND = "crumb"  # --attention-backend

# What the hooks take hold of changes between releases: these are the ones that the tests have run on.
OLDEST, NEWEST = (0, 5, 23), (0, 5, 23)
TYPED = '--attention-backend crumb --json-model-override-args \'{"crumb": {"recipe": "had2"}}\''


def options_of(overrides):
    """Options in the text of --json-model-override-args, or None: crumb is not asked for."""
    given = json.loads(overrides or "{}")
    return read_options(given["crumb"], TYPED) if "crumb" in given else None


def check_version(version):
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not OLDEST <= found <= NEWEST:
        oldest, newest = (".".join(map(str, of)) for of in (OLDEST, NEWEST))
        known = oldest if oldest == newest else f"{oldest} to {newest}"
        raise Refused(f"crumb_kv.sglang works with SGLang {known}, and this is {version}. Type: pip install 'sglang=={newest}', or "
                      f"another --attention-backend")
