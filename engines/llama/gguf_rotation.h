// An artefact inside a GGUF file, as tensors beside the weights, so that model and artefact travel as one file:
//
//   blk.N.attn_k_rot.weight, blk.N.attn_v_rot.weight   F32 [D, D], or [D, D, H_kv] for one per KV head (ours)
//   blk.N.attn_k_mean.weight                            F32 [D, H_kv] (ours)
//   blk.N.attn_k_planes_encode.weight ...               F32, shapes of the artefact, innermost first (ours)
//
// Rotations are stored transposed: ggml_mul_mat(rot, x) is x R. Provenance and a checksum of the tensors are in metadata,
// crumb.*; files of other tools have none. llama.cpp refuses a file with tensors that it does not use: such a file is for transport, and for
// the forks that know these tensors.
#pragma once

#include <crumb/artefact.h>

#include <filesystem>
#include <optional>
#include <string_view>

namespace crumb::llama {

bool is_rotation_tensor(std::string_view name);

// Throws Error if there are none. Where crumb wrote them, provenance comes from the file, whose weights must still be
// those that were calibrated, and those of `model` if it is given. Otherwise `model` says what they are for, and is
// needed.
Artefact read_gguf_rotations(const std::filesystem::path& file,
                             const std::optional<ModelIdentity>& model = std::nullopt);

// Writes a copy of `model_file` with the artefact's tensors, which replace those that it had. A temporary file is
// written and renamed. Throws Error, also for split models (merge them first), for an artefact of other weights, and if
// there is another file than an earlier such copy of this model at `output`.
void write_gguf_rotations(const Artefact& artefact, const std::filesystem::path& model_file,
                          const std::filesystem::path& output);

}  // namespace crumb::llama
