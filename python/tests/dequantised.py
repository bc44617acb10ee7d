"""The same weights for both programs: dequantised.py IN.gguf OUT.gguf writes all weights in FP32, which transformers reads
and llama.cpp computes with as they are."""

import sys

import gguf


def dequantise(source, target):
    reader = gguf.GGUFReader(source)
    field = lambda name: reader.get_field(name).contents()
    writer = gguf.GGUFWriter(target, field("general.architecture"))
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type", "general.quantization_version"):
            continue
        array = value.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value.contents(), value.types[0], value.types[-1] if array else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    dequantise(*sys.argv[1:])
