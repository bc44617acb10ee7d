#include <crumb/artefact.h>
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "calibrate/artefact_file.h"
#include "calibrate/fingerprint.h"

namespace crumb {

namespace {

// F32 leaves 1e-6 of a rotation, and 1e-4 of a basis whose metric spans the five decades that calibration allows.
constexpr float kOrthogonal = 1e-3f, kInverse = 1e-3f;

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::string describe(const ModelIdentity& m) {
    return fmt::format("'{}' ({}, {} layers, {} query and {} KV heads, K {} and V {} channels, weights {})", m.name,
                       m.architecture, m.n_layer, m.n_head, m.n_head_kv, m.dim_k, m.dim_v, m.hash);
}

std::string difference(const ModelIdentity& a, const ModelIdentity& b) {
    std::string list;
    const auto compare = [&](const char* what, const auto& x, const auto& y) {
        if (x != y) {
            list += fmt::format("{}{} ({} and {})", list.empty() ? "" : ", ", what, x, y);
        }
    };
    compare("architecture", a.architecture, b.architecture);
    compare("layers", a.n_layer, b.n_layer);
    compare("query heads", a.n_head, b.n_head);
    compare("KV heads", a.n_head_kv, b.n_head_kv);
    compare("K channels", a.dim_k, b.dim_k);
    compare("V channels", a.dim_v, b.dim_v);
    if (!list.empty()) {
        return "They differ in: " + list + ".";
    }
    if (a.name != b.name) {
        return "They have the same shape and different weights.";
    }
    return "They have the same name and shape and different weights: another quantisation or fine-tune of one model.";
}

void check_matrices(const Matrices& m, size_t elements_per_head, const std::string& name, int layer, const char* what) {
    if (!m.present()) {
        return;
    }
    if (m.dim <= 0 || m.data.size() != m.heads * elements_per_head) {
        fail("{}: layer {}: {} has {} values, but {} heads of {} channels need {}", name, layer, what, m.data.size(),
             m.heads, m.dim, m.heads * elements_per_head);
    }
    const auto bad = std::find_if(m.data.begin(), m.data.end(), [](float x) { return !std::isfinite(x); });
    if (bad != m.data.end()) {
        fail("{}: layer {}: {} has the value {} at index {}; make the artefact again: crumb calibrate -m MODEL -o FILE",
             name, layer, what, *bad, bad - m.data.begin());
    }
}

void check_rotation(const Matrices& m, const std::string& name, int layer, const char* what) {
    check_matrices(m, size_t(m.dim) * m.dim, name, layer, what);
    for (int h = 0; h < m.heads; ++h) {
        const Eigen::Map<const Matrix> r(m.head(h).data(), m.dim, m.dim);
        const float error = (r.transpose() * r - Matrix::Identity(m.dim, m.dim)).cwiseAbs().maxCoeff();
        if (!(error <= kOrthogonal)) {
            fail(
                "{}: layer {}: {} of head {} is not orthogonal: R^T R is off by {}, at most {} is allowed; attention "
                "would be "
                "wrong with it",
                name, layer, what, h, error, kOrthogonal);
        }
    }
}

void check_positive(const Matrices& m, const std::string& name, int layer, const std::string& what) {
    const auto bad = std::find_if(m.data.begin(), m.data.end(), [](float x) { return x < kStepFloor; });
    if (bad != m.data.end()) {
        fail("{}: layer {}: {} has the step {} at index {}, steps are at least {}", name, layer, what, *bad,
             bad - m.data.begin(), kStepFloor);
    }
}

void check_planes(const PlanesSide& side, const std::string& name, int layer, const std::string& prefix) {
    const struct {
        const Matrices& m;
        const char* name;
        int rows;  // by D channels
        bool needed;
    } parts[] = {{side.encode, ".encode", side.encode.dim, true}, {side.decode, ".decode", side.decode.dim, true},
                 {side.spectrum, ".spectrum", 1, true},           {side.step, ".step", 3, true},
                 {side.mean, ".mean", 1, false},                  {side.page_step, ".page_step", 1, false}};
    for (const auto& part : parts) {
        check_matrices(part.m, size_t(part.rows) * part.m.dim, name, layer, (prefix + part.name).c_str());
        const bool absent = !part.m.present();
        if (absent ? part.needed && side.present()
                   : part.m.heads != side.encode.heads || part.m.dim != side.encode.dim) {
            fail("{}: layer {}: {}{} has {} heads of {} channels and {}.encode {} of {}; one does not go without the other",
                 name, layer, prefix, part.name, part.m.heads, part.m.dim, prefix, side.encode.heads, side.encode.dim);
        }
    }
    const int d = side.encode.dim;
    for (int h = 0; h < side.encode.heads; ++h) {
        const Eigen::Map<const Matrix> encode(side.encode.head(h).data(), d, d), decode(side.decode.head(h).data(), d, d);
        const float error = (encode * decode - Matrix::Identity(d, d)).cwiseAbs().maxCoeff();
        if (!(error <= kInverse)) {
            fail("{}: layer {}: {}.decode of head {} is not the inverse of encode: their product is off by {}, at most {} is "
                 "allowed; attention would be wrong with it",
                 name, layer, prefix, h, error, kInverse);
        }
    }
    if (std::any_of(side.spectrum.data.begin(), side.spectrum.data.end(), [](float x) { return x < 0; })) {
        fail("{}: layer {}: {}.spectrum has a negative variance", name, layer, prefix);
    }
    check_positive(side.step, name, layer, prefix + ".step");
    check_positive(side.page_step, name, layer, prefix + ".page_step");
}

// What crumb_kv.calibrate() puts before the name of an architecture whose heads it lays out as GGUF does.
const std::string kOfTransformers = "transformers/";

}  // namespace

std::span<const float> Matrices::head(int h) const {
    CRUMB_ASSERT(present() && h >= 0);
    const size_t size = data.size() / heads;
    const int index = heads == 1 ? 0 : h;
    CRUMB_ASSERT(index < heads);
    return std::span(data).subspan(index * size, size);
}

void check(const Artefact& artefact, const std::string& name) {
    if (artefact.layers.empty()) {
        fail("{}: no layers; make it again: crumb calibrate -m MODEL -o FILE", name);
    }
    for (const auto& [index, layer] : artefact.layers) {
        check_matrices(layer.k_mean, layer.k_mean.dim, name, index, "k_mean");
        check_rotation(layer.k_rotation, name, index, "k_rotation");
        check_rotation(layer.v_rotation, name, index, "v_rotation");
        if (layer.k_mean.present() && layer.k_rotation.present() && layer.k_mean.dim != layer.k_rotation.dim) {
            fail("{}: layer {}: k_mean has {} channels and k_rotation {}; both are of the keys", name, index,
                 layer.k_mean.dim, layer.k_rotation.dim);
        }
        check_planes(layer.k_planes, name, index, "k_planes");
        check_planes(layer.v_planes, name, index, "v_planes");
        if (layer.k_planes.present() != layer.v_planes.present() ||
            layer.k_planes.encode.heads != layer.v_planes.encode.heads) {
            fail("{}: layer {}: k_planes has {} heads and v_planes {}; they belong together", name, index,
                 layer.k_planes.encode.heads, layer.v_planes.encode.heads);
        }
        const int kv_heads[] = {layer.k_mean.heads, layer.k_rotation.heads, layer.v_rotation.heads};
        const int most = *std::max_element(std::begin(kv_heads), std::end(kv_heads));
        if (std::any_of(std::begin(kv_heads), std::end(kv_heads), [&](int n) { return n > 1 && n != most; })) {
            fail(
                "{}: layer {}: k_mean has {} heads, k_rotation {} and v_rotation {}; each must be the model's number "
                "of KV heads, "
                "1 or absent",
                name, index, kv_heads[0], kv_heads[1], kv_heads[2]);
        }
    }
}

std::string Artefact::hash() const {
    Fingerprint fingerprint;
    fingerprint.add(serialise(*this));
    return fingerprint.hex();
}

void Artefact::require(const ModelIdentity& model) const {
    const ModelIdentity& made_for = provenance.model;
    if (!made_for.hash.empty() && made_for.hash == model.hash) {
        return;
    }
    if (made_for.architecture == kOfTransformers + model.architecture) {
        fail("the artefact was made with PyTorch and names its model by other weights than a GGUF has. If it is of this model: crumb rotations "
             "adopt -m MODEL --artifact FILE -o OUTPUT. Artefact: {}; loaded: {}",
             describe(made_for), describe(model));
    }
    fail(
        "the artefact was made for another model. Artefact: {}; loaded: {}. {} Make one for the loaded model: "
        "crumb calibrate -m MODEL -o FILE",
        describe(made_for), describe(model), difference(made_for, model));
}

Artefact Artefact::adopted_by(const ModelIdentity& model) const {
    ModelIdentity same = model;
    same.name = provenance.model.name;
    same.hash = provenance.model.hash;
    if (provenance.model.architecture == kOfTransformers + model.architecture) same.architecture = provenance.model.architecture;
    if (!(same == provenance.model)) {
        fail("the artefact is for a model of another shape. Artefact: {}; to adopt it: {}. {} Make one for that model: crumb calibrate "
             "-m MODEL -o FILE",
             describe(provenance.model), describe(model), difference(provenance.model, model));
    }
    Artefact result = *this;
    if (model.hash != provenance.model.hash) {
        result.provenance.method += fmt::format("; measured with the weights {} of '{}'", provenance.model.hash, provenance.model.name);
        result.provenance.model = model;
    }
    return result;
}

bool Artefact::has_planes() const {
    return std::any_of(layers.begin(), layers.end(), [](const auto& entry) { return entry.second.k_planes.present(); });
}

const LayerArtefact& Artefact::layer(int index) const {
    const auto found = layers.find(index);
    if (found != layers.end()) {
        return found->second;
    }
    std::string list;
    for (const auto& [i, layer] : layers) {
        list += fmt::format("{}{}", list.empty() ? "" : " ", i);
    }
    fail(
        "the artefact has nothing for layer {}, only for layers {}; calibrate the whole model: crumb calibrate -m "
        "MODEL -o FILE",
        index, list);
}

}  // namespace crumb
