"""What the user says, and the versions of vLLM that are known."""

import vllm

from ..serving import Refused, read_options

# The interfaces of vLLM's backends change between releases: customize_spec and the layout of the cache by its spec are those of
# these. The tests run on 0.32.
OLDEST, NEWEST = (0, 29), (0, 33)
TYPED = '--additional-config \'{"crumb": {"recipe": "had2"}}\''


def options_of(vllm_config):
    """Options, or None: crumb is not asked for."""
    given = vllm_config.additional_config
    if not isinstance(given, dict) or "crumb" not in given:
        return None
    check_version(vllm.__version__)
    return read_options(given["crumb"], TYPED)


def check_version(version):
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        raise Refused(f"crumb_kv.vllm works with vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is {version}. Type: "
                      f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}', or leave the crumb options out")
