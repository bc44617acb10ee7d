// The tensors of a layer of an artefact, in file order.
#pragma once

#include <crumb/artefact.h>

#include <cstdint>
#include <vector>

namespace crumb {

enum class TensorShape : uint8_t { vector, steps, square };  // [heads, D], [heads, 3, D], [heads, D, D]

// Members of a layer, or members of one of its PlanesSides.
struct ArtefactField {
    const char* name;
    TensorShape shape;
    Matrices LayerArtefact::*member;
    PlanesSide LayerArtefact::*side = nullptr;
    Matrices PlanesSide::*part = nullptr;

    auto& of(auto& layer) const { return side ? (layer.*side).*part : layer.*member; }
};

inline constexpr ArtefactField kArtefactFields[] = {
    {"k_mean", TensorShape::vector, &LayerArtefact::k_mean},
    {"k_rotation", TensorShape::square, &LayerArtefact::k_rotation},
    {"v_rotation", TensorShape::square, &LayerArtefact::v_rotation},
    {"k_planes.encode", TensorShape::square, nullptr, &LayerArtefact::k_planes, &PlanesSide::encode},
    {"k_planes.decode", TensorShape::square, nullptr, &LayerArtefact::k_planes, &PlanesSide::decode},
    {"k_planes.spectrum", TensorShape::vector, nullptr, &LayerArtefact::k_planes, &PlanesSide::spectrum},
    {"k_planes.step", TensorShape::steps, nullptr, &LayerArtefact::k_planes, &PlanesSide::step},
    {"k_planes.mean", TensorShape::vector, nullptr, &LayerArtefact::k_planes, &PlanesSide::mean},
    {"k_planes.page_step", TensorShape::vector, nullptr, &LayerArtefact::k_planes, &PlanesSide::page_step},
    {"v_planes.encode", TensorShape::square, nullptr, &LayerArtefact::v_planes, &PlanesSide::encode},
    {"v_planes.decode", TensorShape::square, nullptr, &LayerArtefact::v_planes, &PlanesSide::decode},
    {"v_planes.spectrum", TensorShape::vector, nullptr, &LayerArtefact::v_planes, &PlanesSide::spectrum},
    {"v_planes.step", TensorShape::steps, nullptr, &LayerArtefact::v_planes, &PlanesSide::step},
    {"v_planes.mean", TensorShape::vector, nullptr, &LayerArtefact::v_planes, &PlanesSide::mean},
    {"v_planes.page_step", TensorShape::vector, nullptr, &LayerArtefact::v_planes, &PlanesSide::page_step},
};

inline std::vector<uint64_t> shape_of(const ArtefactField& field, int heads, int dim) {
    const auto h = uint64_t(heads), d = uint64_t(dim);
    switch (field.shape) {
        case TensorShape::vector:
            return {h, d};
        case TensorShape::steps:
            return {h, 3, d};
        case TensorShape::square:
            break;
    }
    return {h, d, d};
}

// XXH3-128 over names, shapes and values of all tensors in file order, hex.
std::string tensor_checksum(const Artefact& artefact);

}  // namespace crumb
