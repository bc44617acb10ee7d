"""crumb for PyTorch: a KV cache in about two bits an element.

CrumbCache is the cache for transformers' generate(), calibrate() makes artefacts for it, tune() trains them; make_layers() and torch.ops.crumb are what it stands on.
"""

from .library import __version__, has_cuda
from .layer import Layer, Shape, make_layers

__all__ = ["CrumbCache", "Layer", "Shape", "calibrate", "has_cuda", "make_layers", "tune", "__version__"]


def __getattr__(name):  # transformers is imported by who uses it
    if name == "CrumbCache":
        from .cache import CrumbCache

        return CrumbCache
    if name == "calibrate":
        from .calibration import calibrate

        return calibrate
    if name == "tune":
        from .tuning import tune

        return tune
    raise AttributeError(f"module 'crumb_kv' has no attribute '{name}'")
