"""The shared library: loaded once, after torch. torch.ops.crumb is registered by loading it; the calls that make layers are
plain C (include/crumb/crumb.h)."""

import ctypes
import pathlib

import torch

# The library uses LibTorch's stable interface of 2.10. Newer than the last one that the tests have run on is not known.
OLDEST, NEWEST = (2, 10), (2, 15)


def _check_torch(version):
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        raise ImportError(
            f"crumb_kv works with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is torch {version}. "
            f"Type: pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("layer", "n_head", "n_head_kv", "dim_k", "dim_v")] + [
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("backend", ctypes.c_int),
        ("n_tiles", ctypes.c_int),
        ("rows_per_tile", ctypes.c_int),
        ("rows", ctypes.c_void_p),
        ("coded_ids", ctypes.c_void_p),
        ("exact_ids", ctypes.c_void_p),
        ("n_sequences", ctypes.c_size_t),
        ("ids_stride", ctypes.c_size_t),
        ("sink", ctypes.c_int),
        ("multiprocessors", ctypes.c_int),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("threads", ctypes.c_void_p),
        ("chunk_blocks", ctypes.c_size_t),
    ]


class _Identity(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("name", "architecture", "hash")] + [
        (name, ctypes.c_int) for name in ("n_layer", "n_head", "n_head_kv", "dim_k", "dim_v")
    ]


class _Basis(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("layer", "of_values")] + [
        (name, ctypes.POINTER(ctypes.c_float)) for name in ("encode", "decode", "step")
    ]


def _load():
    _check_torch(torch.__version__)
    path = pathlib.Path(__file__).with_name("crumb_torch.so")
    if not path.exists():
        raise ImportError(f"{path} is missing: this is a source folder. Type: pip install --no-build-isolation ./python")
    torch.ops.load_library(path)
    c = ctypes.CDLL(str(path))
    size, status, handle = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    floats, doubles = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_double)
    for name, result, arguments in (
        ("version", ctypes.c_char_p, []),
        ("error", ctypes.c_char_p, []),
        ("has_backend", status, [ctypes.c_int]),
        ("layers_create", status, [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Shape), status, ctypes.POINTER(handle)]),
        ("layer_destroy", None, [handle]),
        ("layer_slice", status, [handle, status, status, status, ctypes.POINTER(handle)]),
        ("block_bytes", size, [handle]),
        ("exact_block_bytes", size, [handle]),
        ("bits_per_element", ctypes.c_double, [handle]),
        ("tables_bytes", status, [handle, ctypes.POINTER(size)]),
        ("tables_write", status, [handle, handle, size]),
        ("workspace_bytes", status, [handle, ctypes.POINTER(_Step), ctypes.POINTER(size)]),
        ("layer_digits", status, [handle, status, handle]),
        ("artefact_with_bases", status, [ctypes.c_char_p, ctypes.POINTER(_Basis), status, ctypes.c_char_p,
                                         ctypes.POINTER(ctypes.c_int32), status, status, ctypes.c_char_p]),
        ("calibration_create", status, [ctypes.c_int, ctypes.c_int, ctypes.POINTER(handle)]),
        ("calibration_destroy", None, [handle]),
        ("calibration_begin", status, [handle, ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_int]),
        ("calibration_observe", status, [handle, ctypes.POINTER(_Shape), ctypes.c_int] + 4 * [floats]),
        ("calibration_metric", status, [handle, ctypes.POINTER(_Shape), ctypes.c_int, ctypes.c_uint64] + 2 * [doubles]),
        ("calibration_write", status, [handle, ctypes.POINTER(_Identity), ctypes.c_char_p, ctypes.c_char_p,
                                       ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_char_p]),
    ):
        function = getattr(c, "crumb_" + name)
        function.restype, function.argtypes = result, arguments
    return c


c = _load()
__version__ = c.crumb_version().decode()
CPU, CUDA = 0, 1


def has_cuda():
    """Whether this build has the CUDA kernels, whatever the machine has."""
    return bool(c.crumb_has_backend(CUDA))


def require(status):
    if status:
        raise ValueError("crumb: " + c.crumb_error().decode())


def _returns_nothing(*arguments, **keywords):
    return None


for _name in ("store", "encode", "plan", "attend", "copy_blocks"):
    torch.library.register_fake("crumb::" + _name, _returns_nothing)
