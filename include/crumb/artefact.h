// What calibration found for one model, in one safetensors file (docs/design/artefact.md): means and rotations per
// layer, the bases of `planes`, and where they come from. It refuses another model.
//
// Tensors (F32): layers.N.k_mean [H_kv, D]; layers.N.k_rotation, layers.N.v_rotation [H_kv or 1, D, D], row-vector
// convention (x_rotated = x R); layers.N.k_planes.* and layers.N.v_planes.*, see PlanesSide. Layers are the model's own
// numbers and may be sparse; each tensor may be absent.
#pragma once

#include <crumb/text_sketch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace crumb {

// Identity of a model for calibration purposes: what must agree for an artefact to fit.
struct ModelIdentity {
    std::string name;  // general.name, for people
    std::string architecture;
    std::string hash;  // XXH3-128 of the weights, hex; the same file under another name is the same model
    int n_layer = 0;
    int n_head = 0;  // head counts and sizes: of the first layer that attends
    int n_head_kv = 0;
    int dim_k = 0;
    int dim_v = 0;
    bool operator==(const ModelIdentity&) const = default;
};

struct Provenance {
    ModelIdentity model;
    std::string method;     // qqt / sst / ktk ..., composition, per head or per layer; or where it was imported from
    std::string text_hash;  // XXH3-128 of the calibration tokens
    std::string texts;      // file names, comma separated
    TextSketch sketch;      // of the calibration tokens, to tell a text that was calibrated on; may be empty
    uint64_t tokens = 0;
    std::string created_by;  // crumb version
    bool operator==(const Provenance&) const = default;
};

// One side of one layer: [heads][D], [heads][3][D] or [heads][D][D] row major; heads is H_kv, or 1 for all heads
// together.
struct Matrices {
    int heads = 0;  // 0: absent
    int dim = 0;
    std::vector<float> data;

    bool present() const { return heads > 0; }
    // Of this KV head: the common one if there is one for all.
    std::span<const float> head(int h) const;
    bool operator==(const Matrices&) const = default;
};

// What `planes` knows of K or V of a layer, by KV head. Nothing depends on the rate: widths, planes and B follow from it
// when it is loaded (recipe.h).
//
//   y = (x - mean - page mean) encode        x = y decode + page mean + mean
//
// encode = W U: W is the root of the metric (metric.h), U decorrelates, so that squared errors of all directions of y
// count alike and directions come in descending order of variance. It is scaled so that the mean variance of y is 1.
struct PlanesSide {
    Matrices encode;     // [heads][D][D]
    Matrices decode;     // [heads][D][D], its inverse
    Matrices spectrum;   // [heads][D], what leaving out a direction costs, in the unit of the metric: its variance
    Matrices step;       // [heads][3][D], steps of y at gain 1 in codes of 2, 4 and 6 bits
    Matrices mean;       // [heads][D]; absent: not centred
    Matrices page_step;  // [heads][D], steps of the int8 page means; absent: no page means
    bool present() const { return encode.present(); }
    bool operator==(const PlanesSide&) const = default;
};

struct LayerArtefact {
    Matrices k_mean;      // data [heads][D]
    Matrices k_rotation;  // data [heads][D][D]
    Matrices v_rotation;
    PlanesSide k_planes, v_planes;
    bool operator==(const LayerArtefact&) const = default;
};

class Artefact {
  public:
    Provenance provenance;
    std::map<int, LayerArtefact> layers;
    // What its file has checksums of. Files of an older crumb lack some, so that damage may go unnoticed.
    enum class Checked { nothing, tensors, all } checked = Checked::all;

    // XXH3-128 of the file that write_artefact() writes, hex: printed, and part of page identity.
    std::string hash() const;

    // Throws Error, which says what differs, unless `model` is the one this was made for.
    void require(const ModelIdentity& model) const;

    // The same for another file of the same model, in another quantisation, or as GGUF where it was measured by crumb_kv: what was
    // measured there is what this one stores too, up to the rounding of its weights. provenance.method then says whose weights it was measured with. Throws Error if anything
    // but name and weights differs; that `model` is no fine-tune, which would want its own, the caller has to know.
    Artefact adopted_by(const ModelIdentity& model) const;

    // Whether it has what `planes` needs.
    bool has_planes() const;

    // The layer's matrices; throws Error that names the layer if calibration did not see it.
    const LayerArtefact& layer(int index) const;

    bool operator==(const Artefact&) const = default;
};

// Throws Error unless shapes agree with each other, all values are finite, rotations orthogonal and bases of `planes`
// inverse to each other within 1e-3, and steps positive. `name` is what the error calls the artefact. Reading and
// writing check this.
void check(const Artefact& artefact, const std::string& name);

// Reads and checks everything. Throws Error.
Artefact read_artefact(const std::filesystem::path& file);

// Writes to a temporary file beside `file` and renames it. Throws Error.
void write_artefact(const Artefact& artefact, const std::filesystem::path& file);

// Throws Error unless an artefact may be written to `file`: it can be made, or is one already. Long work asks first.
void require_artefact_output(const std::filesystem::path& file);

}  // namespace crumb
