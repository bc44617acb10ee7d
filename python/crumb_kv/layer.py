"""Layers of a model as crumb knows them: recipe, tables and sizes. They hold no tokens."""

import ctypes
import weakref
from dataclasses import dataclass, replace

import torch

from . import library
from .library import c


@dataclass(frozen=True)
class Shape:
    """A layer whose K and V are coded. layer: the model's own number, which is the artefact's."""

    layer: int
    n_head: int
    n_head_kv: int
    dim_k: int
    dim_v: int
    scale: float  # of the logits
    softcap: float = 0.0  # cap * tanh(logit / cap), 0: none


class Layer:
    """Owns the C object; `handle` is what torch.ops.crumb takes, and good as long as this object lives."""

    def __init__(self, handle, shape):
        self.handle = handle
        self.shape = shape
        self.block_bytes = c.crumb_block_bytes(handle)  # 64 tokens of all KV heads, coded
        self.exact_block_bytes = c.crumb_exact_block_bytes(handle)  # the same in BF16
        self.bits_per_element = c.crumb_bits_per_element(handle)
        self._tables, self._takes_chunks = {}, {}
        weakref.finalize(self, c.crumb_layer_destroy, handle)

    def __deepcopy__(self, memo):  # it never changes
        return self

    def slice(self, first_head_kv, n_head_kv, n_group):
        """The Layer that is some of the KV heads, each with n_group query heads: what one of several machines holds. Its codes
        are those of the whole layer."""
        handle = ctypes.c_void_p()
        library.require(c.crumb_layer_slice(self.handle, first_head_kv, n_head_kv, n_group, ctypes.byref(handle)))
        return Layer(handle.value, replace(self.shape, n_head=n_head_kv * n_group, n_head_kv=n_head_kv))

    def tables(self, device):
        """What the kernels of a CUDA device read beside the blocks; None on the CPU. Raises ValueError if there are no kernels for
        the recipe and the heads."""
        if device.type == "cpu":
            return None
        if not library.has_cuda():
            raise ValueError(f"crumb: this crumb_kv was built for CPUs alone, and the model is on {device}. Type: pip install "
                             "--no-build-isolation --config-settings=cmake.define.CRUMB_CUDA=ON ./python, or model.to('cpu')")
        if device not in self._tables:
            size = ctypes.c_size_t()
            library.require(c.crumb_tables_bytes(self.handle, ctypes.byref(size)))
            tables = torch.empty(size.value, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # whoever had this memory before is done with it
            with torch.cuda.device(device):
                library.require(c.crumb_tables_write(self.handle, tables.data_ptr(), size.value))
            self._try_to_encode(tables)
            self._tables[device] = tables
        return self._tables[device]

    def _try_to_encode(self, tables):
        """A block of zeros: a recipe may have a stage that the encoder of CUDA lacks."""
        zeros = lambda *shape, dtype=torch.uint8: torch.zeros(shape, dtype=dtype, device=tables.device)
        try:
            torch.ops.crumb.encode(self.handle, zeros(1, 4, dtype=torch.int32), zeros(1, self.exact_block_bytes),
                                   zeros(1, self.block_bytes), zeros(2, dtype=torch.int32), tables)
        except RuntimeError as e:
            raise ValueError(str(e).splitlines()[0]) from None

    def takes_chunks(self, device):
        """Whether the kernels of a device take tiles of CHUNK rows and more: on CUDA, for some sizes of heads. Smaller ones they all take."""
        if device not in self._takes_chunks:
            try:
                self._takes_chunks[device] = device.type != "cpu" and self.workspace_bytes(device, 1, CHUNK, 1) > 0
            except ValueError:
                self._takes_chunks[device] = False
        return self._takes_chunks[device]

    def workspace_bytes(self, device, n_tiles, rows_per_tile, blocks):
        """Bytes that plan() and attend() of a step with such rows and tables of `blocks` blocks need."""
        if device.type == "cpu":
            return 0
        step, size = library._Step(), ctypes.c_size_t()
        step.backend, step.n_tiles, step.rows_per_tile, step.ids_stride = library.CUDA, n_tiles, rows_per_tile, blocks
        step.multiprocessors = multiprocessors(device)
        with torch.cuda.device(device):
            library.require(c.crumb_workspace_bytes(self.handle, ctypes.byref(step), ctypes.byref(size)))
        return size.value


CHUNK = 128  # rows of a sequence from which on CUDA unpacks first what they read (docs/design/attention-cuda.md)


def multiprocessors(device):
    """As plan() and attend() want them."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def make_layers(recipe, shapes, artefact=None):
    """All coded layers of a model, one Layer a Shape. recipe: what --kv takes ("had2", "planes:1.5"). artefact: the file of a
    calibration, for recipes that need one; it is read once, and `planes` spends its budget over all layers together.
    Raises ValueError that says what is wrong and what to do."""
    shapes = list(shapes)
    of_c = (library._Shape * len(shapes))(*(library._Shape(*vars(shape).values()) for shape in shapes))
    handles = (ctypes.c_void_p * len(shapes))()
    file = None if artefact is None else str(artefact).encode()
    library.require(c.crumb_layers_create(recipe.encode(), file, of_c, len(shapes), handles))
    return [Layer(handle, shape) for handle, shape in zip(handles, shapes)]
