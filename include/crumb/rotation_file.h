// The rotation files of OSCAR's own code (.pt), one for K and one for V: in and out.
//
// They are PyTorch archives: {"layers": {N: {"rotation": F32 [D, D] or [H_kv, D, D], ...}}}. Layout V1 has one rotation
// a layer, V2 one per KV head, and then may have "k_mean" [H_kv, D]. The pickle inside is read by an interpreter of the
// few opcodes and constructors that tensors need: a file can describe data, never run code.
#pragma once

#include <crumb/artefact.h>

#include <filesystem>

namespace crumb {

// `model` is what the files are for: they do not say. Throws Error for anything that is not such a file, for rotations
// that are not orthogonal, and for transforms of queries and outputs (OSCAR-2), which only non-orthogonal ones need.
Artefact import_rotation_files(const std::filesystem::path& k_file, const std::filesystem::path& v_file,
                               const ModelIdentity& model);

// V2 if a layer has a rotation per KV head, else V1, which has no place for key means: then they are left out. Throws
// Error if a layer lacks one of its rotations.
void export_rotation_files(const Artefact& artefact, const std::filesystem::path& k_file,
                           const std::filesystem::path& v_file);

}  // namespace crumb
