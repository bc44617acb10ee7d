"""What the user says, and the versions of vLLM that are known."""

from dataclasses import dataclass, fields

import vllm

# The interfaces of vLLM's backends change between releases: customize_spec and the layout of the cache by its spec are those of
# these. The tests run on 0.32.
OLDEST, NEWEST = (0, 29), (0, 33)


class Refused(ValueError):
    """What cannot be served: what, why, and what to type."""


@dataclass(frozen=True)
class Options:
    """--additional-config '{"crumb": {...}}'"""

    recipe: str  # as --kv of the crumb program
    artefact: str | None = None  # file of a calibration
    sink: int = 64  # tokens at the start of a sequence that stay BF16
    recent: int = 256  # and at its end
    spare_windows: int = 16  # of sequences that have ended, for prefixes that are asked for again


def options_of(vllm_config):
    """Options, or None: crumb is not asked for."""
    given = vllm_config.additional_config
    if not isinstance(given, dict) or "crumb" not in given:
        return None
    check_version(vllm.__version__)
    given, known = given["crumb"], {field.name: field for field in fields(Options)}
    if not isinstance(given, dict) or "recipe" not in given:
        raise Refused('crumb_kv: the options are no object with a recipe. Type: --additional-config \'{"crumb": {"recipe": "had2"}}\'')
    for name, value in given.items():
        if name not in known:
            raise Refused(f"crumb_kv: there is no option '{name}'. Take one of: {', '.join(known)}")
        wanted = known[name].type
        if not isinstance(value, wanted) or isinstance(value, bool) or (wanted is int and value < 0):
            raise Refused(f"crumb_kv: option {name} is {value!r}: it must be {'a number of at least 0' if wanted is int else 'a text'}")
    return Options(**given)


def check_version(version):
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        raise Refused(f"crumb_kv.vllm works with vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is {version}. Type: "
                      f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}', or leave the crumb options out")
