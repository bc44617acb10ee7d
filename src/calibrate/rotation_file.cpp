#include "calibrate/rotation_file.h"

#include <crumb/error.h>
#include <crumb/rotation_file.h>

#include <algorithm>
#include <charconv>

#include "calibrate/torch_archive.h"
#include "base/whole_file.h"

namespace crumb {

namespace {

using pickle::Ref;

constexpr size_t kMostFileBytes = size_t(1) << 31;
constexpr size_t kMostElements = size_t(1) << 28;  // of a file, whatever its tensors share
constexpr int64_t kMostChannels = 1024, kMostHeads = 1024;
constexpr int kMostLayers = 10000;

class Reader {
  public:
    Reader(const TorchArchive& archive, const std::string& name) : archive_(archive), name_(name) {}

    RotationFile read() {
        RotationFile file;
        const auto& root = dictionary(archive_.root(), "the file");
        if (const Ref objective = find(root, "objective")) {
            if (const auto* text = std::get_if<std::string>(&objective->data)) {
                file.objective = *text;
            }
        }
        const Ref layers = find(root, "layers");
        if (!layers) {
            fail("{}: not a rotation file: its dictionary has no 'layers'", name_);
        }
        for (const auto& [key, value] : dictionary(layers, "'layers'").items) {
            const int index = layer_index(key);
            if (file.layers.contains(index)) {
                fail("{}: layer {} occurs twice", name_, index);
            }
            file.layers[index] = read_layer(index, dictionary(value, "a layer"));
        }
        if (file.layers.empty()) {
            fail("{}: it has no layers", name_);
        }
        return file;
    }

  private:
    const pickle::Dict& dictionary(Ref value, const char* what) const {
        const auto* dict = std::get_if<pickle::Dict>(&value->data);
        if (!dict) {
            fail("{}: not a rotation file: {} is {} where a dictionary is expected", name_, what, kind(value));
        }
        return *dict;
    }

    // Null for a missing key and for None; the last of equal keys, as in Python.
    static Ref find(const pickle::Dict& dict, std::string_view key) {
        Ref found = nullptr;
        for (const auto& [k, value] : dict.items) {
            const auto* text = std::get_if<std::string>(&k->data);
            if (text && *text == key) {
                found = std::holds_alternative<pickle::None>(value->data) ? nullptr : value;
            }
        }
        return found;
    }

    // 3 or "3"
    int layer_index(Ref key) const {
        int64_t index = -1;
        if (const auto* number = std::get_if<int64_t>(&key->data)) {
            index = *number;
        } else if (const auto* text = std::get_if<std::string>(&key->data)) {
            const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), index);
            if (error != std::errc{} || end != text->data() + text->size()) {
                index = -1;
            }
        }
        if (index < 0 || index >= kMostLayers) {
            fail("{}: a layer is named by {} that is no layer number", name_, kind(key));
        }
        return int(index);
    }

    Matrices matrices(int layer, const char* what, Ref value, bool square) {
        const auto* tensor = std::get_if<pickle::Tensor>(&value->data);
        if (!tensor) {
            fail("{}: layer {}: {} is {} where a tensor is expected", name_, layer, what, kind(value));
        }
        std::vector<int64_t> shape = tensor->shape;
        if (square && shape.size() == 2) {
            shape.insert(shape.begin(), 1);
        }  // V1: one for all KV heads
        if (shape.size() != (square ? 3 : 2) || shape[0] < 1 || shape[0] > kMostHeads || shape[1] < 1 ||
            shape[1] > kMostChannels || shape.back() != shape[1]) {
            fail("{}: layer {}: {} has the shape [{}], expected {}, D up to {}", name_, layer, what,
                 fmt::join(tensor->shape, ", "), square ? "[D, D] or [KV heads, D, D]" : "[KV heads, D]",
                 kMostChannels);
        }
        Matrices m{.heads = int(shape[0]), .dim = int(shape[1]), .data = archive_.elements(*tensor)};
        elements_ += m.data.size();
        if (elements_ > kMostElements) {
            fail("{}: its tensors have more than {} elements together", name_, kMostElements);
        }
        return m;
    }

    RotationFile::Layer read_layer(int index, const pickle::Dict& dict) {
        for (const char* transform : {"q_rotation", "o_rotation"}) {
            if (find(dict, transform)) {
                fail(
                    "{}: layer {} has {}: its transform is not orthogonal, so queries or outputs need the inverse. "
                    "Such files "
                    "are not supported (their published quality is far below that of rotations)",
                    name_, index, transform);
            }
        }
        const Ref rotation = find(dict, "rotation");
        if (!rotation) {
            fail("{}: layer {} has no 'rotation'", name_, index);
        }
        RotationFile::Layer layer;
        layer.rotation = matrices(index, "rotation", rotation, true);
        if (const Ref mean = find(dict, "k_mean")) {
            layer.k_mean = matrices(index, "k_mean", mean, false);
        }
        return layer;
    }

    const TorchArchive& archive_;
    const std::string& name_;
    size_t elements_ = 0;
};

std::vector<std::byte> read_bytes(const std::filesystem::path& file) {
    return read_whole_file(file, "a rotation file", kMostFileBytes);
}

std::string layer_list(const RotationFile& file) {
    std::string list;
    for (const auto& [index, layer] : file.layers) {
        list += fmt::format("{}{}", list.empty() ? "" : " ", index);
    }
    return list;
}

}  // namespace

RotationFile parse_rotation_file(std::span<const std::byte> bytes, const std::string& name) {
    const TorchArchive archive(bytes, name);
    return Reader(archive, name).read();
}

std::vector<std::byte> serialise(const RotationFile& file) {
    const bool per_head =
        std::any_of(file.layers.begin(), file.layers.end(), [](const auto& l) { return l.second.rotation.heads > 1; });
    TorchWriter out;
    out.begin_dictionary();
    out.text("format_version");
    out.number(per_head ? 2 : 1);
    out.text("objective");
    out.text(file.objective);
    out.text("source_grouping");
    out.text(per_head ? "per_kv_head" : "layer");
    out.text("layers");
    out.begin_dictionary();
    for (const auto& [index, layer] : file.layers) {
        const int d = layer.rotation.dim;
        out.number(index);
        out.begin_dictionary();
        out.text("layer_id");
        out.number(index);
        out.text("rotation");
        out.tensor(layer.rotation.data, per_head ? std::vector{layer.rotation.heads, d, d} : std::vector{d, d});
        if (per_head && layer.k_mean.present()) {
            out.text("k_mean");
            out.tensor(layer.k_mean.data, {layer.k_mean.heads, layer.k_mean.dim});
        }
        out.end_dictionary();
    }
    out.end_dictionary();
    out.end_dictionary();
    return out.finish();
}

Artefact import_rotation_files(const std::filesystem::path& k_file, const std::filesystem::path& v_file,
                               const ModelIdentity& model) {
    RotationFile k = parse_rotation_file(read_bytes(k_file), k_file.string());
    RotationFile v = parse_rotation_file(read_bytes(v_file), v_file.string());
    if (k.objective.starts_with("sst") || v.objective.starts_with("qqt")) {
        fail("{} is of '{}' and {} of '{}': sst is for V and qqt for K; exchange the files", k_file.string(),
             k.objective, v_file.string(), v.objective);
    }
    Artefact artefact;
    artefact.provenance.model = model;
    artefact.provenance.method = fmt::format("imported from {} ({}) and {} ({})", k_file.filename().string(),
                                             k.objective, v_file.filename().string(), v.objective);
    artefact.provenance.created_by = "crumb " CRUMB_VERSION;
    const auto same_layer = [](const auto& a, const auto& b) { return a.first == b.first; };
    if (!std::equal(k.layers.begin(), k.layers.end(), v.layers.begin(), v.layers.end(), same_layer)) {
        fail("{} has the layers {}, and {} the layers {}: the files are not a pair", k_file.string(), layer_list(k),
             v_file.string(), layer_list(v));
    }
    if (const int last = k.layers.rbegin()->first; last >= model.n_layer) {
        fail("{} has a layer {}, but '{}' has {} layers: the files are for another model", k_file.string(), last,
             model.name, model.n_layer);
    }
    for (auto& [index, layer] : k.layers) {
        LayerArtefact& to = artefact.layers[index];
        to.k_rotation = std::move(layer.rotation);
        to.k_mean = std::move(layer.k_mean);
    }
    for (auto& [index, layer] : v.layers) {
        artefact.layers[index].v_rotation = std::move(layer.rotation);
    }
    check(artefact, fmt::format("{} and {}", k_file.string(), v_file.string()));
    return artefact;
}

void export_rotation_files(const Artefact& artefact, const std::filesystem::path& k_file,
                           const std::filesystem::path& v_file) {
    check(artefact, "the artefact");
    require_different({{"the K rotations", k_file}, {"the V rotations", v_file}});
    for (const auto& file : {k_file, v_file}) {
        require_replaceable(file, 0, "PK", "a rotation file (.pt)");
    }
    RotationFile k, v;
    k.objective = v.objective = artefact.provenance.method;
    for (const auto& [index, layer] : artefact.layers) {
        if (!layer.k_rotation.present() || !layer.v_rotation.present()) {
            fail("layer {} of the artefact has no rotation of {}, and the official files need both", index,
                 layer.k_rotation.present() ? "V" : "K");
        }
        k.layers[index] = {layer.k_rotation, layer.k_mean};
        v.layers[index] = {layer.v_rotation, {}};
    }
    write_whole_file(k_file, serialise(k));
    write_whole_file(v_file, serialise(v));
}

}  // namespace crumb
