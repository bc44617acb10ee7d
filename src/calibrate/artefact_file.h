// An artefact as bytes: the safetensors layout, see docs/design/artefact.md.
#pragma once

#include <crumb/artefact.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace crumb {

std::vector<std::byte> serialise(const Artefact& artefact);

// Takes nothing on trust; throws Error whose text begins with `name`.
Artefact parse_artefact(std::span<const std::byte> bytes, const std::string& name);

}  // namespace crumb
