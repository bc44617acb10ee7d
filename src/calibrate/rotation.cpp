// Rotations of the OSCAR family. Eigenvectors come in ascending order of eigenvalue, so the official permutation (bit
// reversal of the descending order) is the same for all data; it matters only where a token has several groups.
#include <crumb/calibrate.h>
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "calibrate/eigenbasis.h"

namespace crumb {

namespace {

using Matrix = Eigen::MatrixXd;

struct TargetName {
    Target target;
    std::string_view name;
    bool of_keys;
    std::vector<double> HeadMoments::*moment;
};
constexpr std::array<TargetName, 5> kTargets = {{
    {Target::qqt, "qqt", true, &HeadMoments::qq},
    {Target::ktk, "ktk", true, &HeadMoments::kk},
    {Target::sst, "sst", false, &HeadMoments::sst},
    {Target::sst_true, "sst_true", false, &HeadMoments::sst_true},
    {Target::vtv, "vtv", false, &HeadMoments::vv},
}};

struct CompositionName {
    Composition composition;
    std::string_view name;
    bool eigenvectors, hadamard, permutation;
};
constexpr std::array<CompositionName, 6> kCompositions = {{
    {Composition::r_h_pbr, "r_h_pbr", true, true, true},
    {Composition::r_h, "r_h", true, true, false},
    {Composition::h_pbr, "h_pbr", false, true, true},
    {Composition::h, "h", false, true, false},
    {Composition::r, "r", true, false, false},
    {Composition::pbr, "pbr", false, false, true},
}};

const TargetName& row(Target target) { return kTargets[size_t(target)]; }
const CompositionName& row(Composition composition) { return kCompositions[size_t(composition)]; }

// Of the entries that `among` takes.
template <class Table>
auto find(const Table& table, std::string_view name, const char* what, auto among) {
    std::string list;
    for (const auto& entry : table) {
        if (!among(entry)) {
            continue;
        }
        if (entry.name == name) {
            return entry;
        }
        list += fmt::format("{}{}", list.empty() ? "" : ", ", entry.name);
    }
    fail("there is no {} '{}'; choose one of {}", what, name, list);
}

// Mean over KV heads, for a rotation that they share.
std::vector<double> mean(const std::vector<HeadMoments>& heads, std::vector<double> HeadMoments::*moment) {
    std::vector<double> sum = heads[0].*moment;
    for (size_t h = 1; h < heads.size(); ++h) {
        const auto& m = heads[h].*moment;
        std::transform(sum.begin(), sum.end(), m.begin(), sum.begin(), std::plus<>());
    }
    for (double& x : sum) {
        x /= double(heads.size());
    }
    return sum;
}

Matrices rotations(const std::vector<HeadMoments>& heads, Target target, const RotationMethod& method, int d) {
    const auto moment = row(target).moment;
    Matrices m{.heads = method.per_head ? int(heads.size()) : 1, .dim = d, .data = {}};
    for (int h = 0; h < m.heads; ++h) {
        const auto r = rotation(method.per_head ? heads[h].*moment : mean(heads, moment), d, method.composition);
        m.data.insert(m.data.end(), r.begin(), r.end());
    }
    return m;
}

}  // namespace

std::string_view name(Target target) { return row(target).name; }
std::string_view name(Composition composition) { return row(composition).name; }
Target find_key_target(std::string_view name) {
    return find(kTargets, name, "calibration target of K", [](const auto& t) { return t.of_keys; }).target;
}
Target find_value_target(std::string_view name) {
    return find(kTargets, name, "calibration target of V", [](const auto& t) { return !t.of_keys; }).target;
}
Composition find_composition(std::string_view name) {
    return find(kCompositions, name, "composition", [](const auto&) { return true; }).composition;
}

std::string describe(const RotationMethod& method) {
    return fmt::format("K {} and V {}, {}, per {}", name(method.k), name(method.v), name(method.composition),
                       method.per_head ? "KV head" : "layer");
}

std::vector<int> bit_reversal(int d) {
    CRUMB_ASSERT(d > 0);
    const bool power_of_two = std::has_single_bit(unsigned(d));
    const int bits = std::countr_zero(unsigned(d));
    std::vector<int> perm(d);
    for (int j = 0; j < d; ++j) {
        int reversed = j;
        if (power_of_two) {
            reversed = 0;
            for (int b = 0; b < bits; ++b) {
                reversed |= (j >> b & 1) << (bits - 1 - b);
            }
        }
        perm[j] = d - 1 - reversed;
    }
    return perm;
}

std::vector<float> rotation(std::span<const double> moment, int d, Composition composition) {
    const CompositionName& parts = row(composition);
    CRUMB_ASSERT(!parts.eigenvectors || moment.size() == size_t(d) * d);
    Matrix r = Matrix::Identity(d, d);
    if (parts.eigenvectors) {
        r = Eigen::Map<const Eigen::Matrix<double, -1, -1, Eigen::RowMajor>>(eigenbasis(moment, d).vectors.data(), d, d);
    }
    if (parts.hadamard) {
        const std::vector<float> h = hadamard(d);
        r = r * Eigen::Map<const Eigen::Matrix<float, -1, -1, Eigen::RowMajor>>(h.data(), d, d).cast<double>();
    }
    if (parts.permutation) {
        const std::vector<int> perm = bit_reversal(d);
        const Matrix unpermuted = r;
        for (int j = 0; j < d; ++j) {
            r.col(j) = unpermuted.col(perm[j]);
        }
    }
    const double error = (r.transpose() * r - Matrix::Identity(d, d)).cwiseAbs().maxCoeff();
    CRUMB_ASSERT(error < 1e-5);

    std::vector<float> result(size_t(d) * d);
    Eigen::Map<Eigen::Matrix<float, -1, -1, Eigen::RowMajor>>(result.data(), d, d) = r.cast<float>();
    return result;
}

Artefact fit(const Moments& moments, const RotationMethod& method, Provenance provenance) {
    if (!row(method.k).of_keys || row(method.v).of_keys) {
        fail("targets K {} and V {}: K takes qqt or ktk, V takes sst, sst_true or vtv", name(method.k), name(method.v));
    }
    Artefact artefact;
    artefact.provenance = std::move(provenance);
    artefact.provenance.created_by = "crumb " CRUMB_VERSION;
    for (const int index : moments.layers()) {
        const LayerShape& shape = moments.shape(index);
        std::vector<HeadMoments> heads;
        for (int h = 0; h < shape.n_head_kv; ++h) {
            heads.push_back(moments.head(index, h));
        }
        LayerArtefact& layer = artefact.layers[index];
        try {
            layer.k_mean = {.heads = shape.n_head_kv, .dim = shape.dim_k, .data = {}};
            for (const auto& head : heads) {
                layer.k_mean.data.insert(layer.k_mean.data.end(), head.key_mean.begin(), head.key_mean.end());
            }
            layer.k_rotation = rotations(heads, method.k, method, shape.dim_k);
            layer.v_rotation = rotations(heads, method.v, method, shape.dim_v);
        } catch (const Error& e) {
            fail("layer {}: {}; the model computes NaN or infinite values on these texts", index, e.what());
        }
    }
    return artefact;
}

}  // namespace crumb
