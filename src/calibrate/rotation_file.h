// One official file as bytes, for K or for V.
#pragma once

#include <crumb/artefact.h>

#include <map>
#include <span>
#include <string>
#include <vector>

namespace crumb {

struct RotationFile {
    struct Layer {
        Matrices rotation;
        Matrices k_mean;  // V2, and only for K
    };
    std::string objective;  // what its makers call the target; may be empty
    std::map<int, Layer> layers;
};

// Takes nothing on trust; throws Error whose text begins with `name`.
RotationFile parse_rotation_file(std::span<const std::byte> bytes, const std::string& name);

std::vector<std::byte> serialise(const RotationFile& file);

}  // namespace crumb
