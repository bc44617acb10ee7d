// Which model this is, for artefacts: shape, and a hash of the weights.
#pragma once

#include <crumb/artefact.h>

#include <filesystem>
#include <string>

struct llama_model;

namespace crumb::llama {

// `file` is what `model` was loaded from, the first one of a split model.
ModelIdentity identify(const llama_model& model, const std::filesystem::path& file);

// XXH3-128 over name, type, shape and data of all tensors, in order of name. Metadata (chat template, name) and crumb's
// own tensors (gguf_rotation.h) are left out and splitting changes nothing, so that what leaves the weights alone
// leaves the hash alone. Throws Error if a file cannot be read.
std::string weights_hash(const std::filesystem::path& file);

}  // namespace crumb::llama
