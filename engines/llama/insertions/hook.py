"""A text that is inserted at one place of a source tree."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Hook:
    name: str
    file: str
    where: str  # "before" or "behind" the anchor
    anchor: str
    text: str
    after: str = ""  # look for the first anchor behind the only match of this; without it the anchor is the only match
