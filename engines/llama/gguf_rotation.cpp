#include "gguf_rotation.h"

#include <crumb/error.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <functional>
#include <optional>

#include "calibrate/artefact_fields.h"
#include "base/whole_file.h"
#include "ggml.h"
#include "gguf_file.h"
#include "model_identity.h"

namespace crumb::llama {

namespace {

constexpr uint32_t kVersion = 1;
constexpr int64_t kMostChannels = 1024, kMostHeads = 1024;

// ".attn_k_rot.weight", ".attn_k_planes_encode.weight"
std::string suffix_of(const ArtefactField& field) {
    std::string name = field.name;
    std::ranges::replace(name, '.', '_');
    if (name.ends_with("_rotation")) {
        name.resize(name.size() - std::string_view("ation").size());
    }
    return fmt::format(".attn_{}.weight", name);
}

struct Place {
    const ArtefactField* field;
    int layer;
};

// "blk.12.attn_k_rot.weight"
std::optional<Place> place_of(std::string_view name) {
    constexpr std::string_view prefix = "blk.";
    const size_t dot = name.find('.', prefix.size());
    if (!name.starts_with(prefix) || dot == std::string_view::npos) {
        return std::nullopt;
    }
    const auto field = std::ranges::find(kArtefactFields, name.substr(dot), suffix_of);
    const auto number = name.substr(prefix.size(), dot - prefix.size());
    int layer = -1;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layer);
    if (field == std::end(kArtefactFields) || error != std::errc{} || end != number.data() + number.size() || layer < 0) {
        return std::nullopt;
    }
    return Place{field, layer};
}

// Rotations lie as ggml_mul_mat wants them, bases of `planes` as they are in an artefact.
bool transposed(const ArtefactField& field) { return field.shape == TensorShape::square && !field.side; }

// ggml's order: the innermost first. A matrix for all heads has two dimensions.
std::array<int64_t, GGML_MAX_DIMS> ggml_shape(const ArtefactField& field, int heads, int dim) {
    std::array<int64_t, GGML_MAX_DIMS> ne = {1, 1, 1, 1};
    const std::vector<uint64_t> shape = shape_of(field, heads, dim);
    std::ranges::copy(shape.rbegin(), shape.rend(), ne.begin());
    return ne;
}

void transpose_each(Matrices& m) {
    const size_t d = m.dim;
    for (int h = 0; h < m.heads; ++h) {
        float* r = m.data.data() + h * d * d;
        for (size_t i = 0; i < d; ++i) {
            for (size_t j = 0; j < i; ++j) {
                std::swap(r[i * d + j], r[j * d + i]);
            }
        }
    }
}

Matrices read_matrices(const GgufFile& gguf, int64_t i, const ArtefactField& field, const std::string& file) {
    const int64_t* ne = gguf_get_tensor_ne(gguf.meta(), i);
    const int64_t dim = ne[0], heads = ne[field.shape == TensorShape::vector ? 1 : 2];
    const auto in_range = [](int64_t n, int64_t most) { return 1 <= n && n <= most; };
    if (gguf_get_tensor_type(gguf.meta(), i) != GGML_TYPE_F32 || !in_range(dim, kMostChannels) ||
        !in_range(heads, kMostHeads) || !std::ranges::equal(std::span(ne, GGML_MAX_DIMS), ggml_shape(field, int(heads), int(dim)))) {
        constexpr const char* kExpected[] = {"[D, KV heads]", "[D, 3, KV heads]", "[D, D] or [D, D, KV heads]"};
        fail("{}: tensor {} is {} [{}, {}, {}, {}], expected F32 {}", file, gguf.tensor_name(i),
             ggml_type_name(gguf_get_tensor_type(gguf.meta(), i)), ne[0], ne[1], ne[2], ne[3],
             kExpected[size_t(field.shape)]);
    }
    Matrices m{.heads = int(heads), .dim = int(dim), .data = {}};
    m.data.resize(gguf_get_tensor_size(gguf.meta(), i) / sizeof(float));
    std::byte* to = reinterpret_cast<std::byte*>(m.data.data());
    gguf.read(i, [&](std::span<const std::byte> bytes) { to = std::copy(bytes.begin(), bytes.end(), to); });
    if (transposed(field)) {
        transpose_each(m);
    }
    return m;
}

constexpr const char* kVersionKey = "crumb.artefact_version";
constexpr const char* kTokensKey = "crumb.tokens";
constexpr const char* kChecksumKey = "crumb.checksum";
constexpr const char* kSketchKey = "crumb.text_sketch";

// The metadata keys of a provenance and where their values go; P is Provenance or const Provenance.
template <class P>
auto texts(P& p) {
    return std::array{
        std::pair("crumb.model.name", &p.model.name), std::pair("crumb.model.architecture", &p.model.architecture),
        std::pair("crumb.model.hash", &p.model.hash), std::pair("crumb.method", &p.method),
        std::pair("crumb.text_hash", &p.text_hash),   std::pair("crumb.texts", &p.texts),
        std::pair("crumb.created_by", &p.created_by)};
}
template <class P>
auto counts(P& p) {
    return std::array{std::pair("crumb.model.n_layer", &p.model.n_layer),
                      std::pair("crumb.model.n_head", &p.model.n_head),
                      std::pair("crumb.model.n_head_kv", &p.model.n_head_kv),
                      std::pair("crumb.model.dim_k", &p.model.dim_k), std::pair("crumb.model.dim_v", &p.model.dim_v)};
}

Provenance read_provenance(const GgufFile& gguf, const std::string& file) {
    const auto find = [&](const char* key, gguf_type type) {
        const int64_t id = gguf_find_key(gguf.meta(), key);
        if (id < 0 || gguf_get_kv_type(gguf.meta(), id) != type) {
            fail("{}: its metadata lacks {}, or has it as another type than {}", file, key, gguf_type_name(type));
        }
        return id;
    };
    if (const uint32_t version = gguf_get_val_u32(gguf.meta(), find(kVersionKey, GGUF_TYPE_UINT32));
        version != kVersion) {
        fail("{}: its rotations have format version {}, and this program reads version {}", file, version, kVersion);
    }
    Provenance p;
    for (const auto& [key, value] : texts(p)) {
        *value = gguf_get_val_str(gguf.meta(), find(key, GGUF_TYPE_STRING));
    }
    for (const auto& [key, value] : counts(p)) {
        *value = gguf_get_val_i32(gguf.meta(), find(key, GGUF_TYPE_INT32));
    }
    p.tokens = gguf_get_val_u64(gguf.meta(), find(kTokensKey, GGUF_TYPE_UINT64));
    if (gguf_find_key(gguf.meta(), kSketchKey) >= 0) {
        p.sketch = TextSketch::parse(gguf_get_val_str(gguf.meta(), find(kSketchKey, GGUF_TYPE_STRING)));
    }
    return p;
}

struct FreeGgml {
    void operator()(ggml_context* context) const { ggml_free(context); }
};

// Metadata and tensor list of the copy. ggml takes shapes from tensors, which are made here without data.
class Copy {
  public:
    explicit Copy(const GgufFile& source)
        : out_(gguf_init_empty()),
          shapes_(ggml_init({.mem_size = ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true})) {
        gguf_set_kv(out_.get(), source.meta());
        if (gguf_find_key(out_.get(), GGUF_KEY_GENERAL_ALIGNMENT) >= 0) {
            gguf_set_val_u32(out_.get(), GGUF_KEY_GENERAL_ALIGNMENT, uint32_t(gguf_get_alignment(out_.get())));
        }
        for (int64_t i = 0; i < source.n_tensors(); ++i) {
            if (is_rotation_tensor(source.tensor_name(i))) {
                continue;
            }
            add(source.tensor_name(i), gguf_get_tensor_type(source.meta(), i), gguf_get_tensor_ne(source.meta(), i),
                [&source, i](WholeFile& file) { source.read(i, [&](auto bytes) { file.write(bytes); }); });
        }
    }

    void add_matrices(int layer, const ArtefactField& field, Matrices m) {
        if (transposed(field)) {
            transpose_each(m);
        }
        add(fmt::format("blk.{}{}", layer, suffix_of(field)), GGML_TYPE_F32, ggml_shape(field, m.heads, m.dim).data(),
            [data = std::move(m.data)](WholeFile& file) { file.write(std::as_bytes(std::span(data))); });
    }

    void set(const Artefact& artefact) {
        const Provenance& p = artefact.provenance;
        gguf_set_val_str(out_.get(), kChecksumKey, tensor_checksum(artefact).c_str());
        gguf_set_val_u32(out_.get(), kVersionKey, kVersion);
        for (const auto& [key, value] : texts(p)) {
            gguf_set_val_str(out_.get(), key, value->c_str());
        }
        for (const auto& [key, value] : counts(p)) {
            gguf_set_val_i32(out_.get(), key, *value);
        }
        gguf_set_val_u64(out_.get(), kTokensKey, p.tokens);
        if (!p.sketch.empty()) {
            gguf_set_val_str(out_.get(), kSketchKey, p.sketch.hex().c_str());
        }
    }

    void write(const std::filesystem::path& path) const {
        WholeFile file(path);
        std::vector<std::byte> meta(gguf_get_meta_size(out_.get()));
        gguf_get_meta_data(out_.get(), meta.data());
        file.write(meta);
        const size_t alignment = gguf_get_alignment(out_.get());
        const std::vector<std::byte> zeros(alignment);
        for (size_t i = 0; i < write_data_.size(); ++i) {
            write_data_[i](file);
            const size_t size = gguf_get_tensor_size(out_.get(), int64_t(i));
            file.write(std::span(zeros).first((alignment - size % alignment) % alignment));
        }
        file.commit();
    }

  private:
    void add(const std::string& name, ggml_type type, const int64_t* ne, std::function<void(WholeFile&)> write_data) {
        ggml_reset(shapes_.get());
        ggml_tensor* shape = ggml_new_tensor(shapes_.get(), type, GGML_MAX_DIMS, ne);
        ggml_set_name(shape, name.c_str());
        gguf_add_tensor(out_.get(), shape);
        write_data_.push_back(std::move(write_data));
    }

    GgufPtr out_;
    std::unique_ptr<ggml_context, FreeGgml> shapes_;  // room for one tensor
    std::vector<std::function<void(WholeFile&)>> write_data_;
};

// An earlier copy of the same model may be replaced, and no other GGUF: it would be somebody's weights.
void require_copy_of(const std::string& weights, const std::filesystem::path& file) {
    require_replaceable(file, 0, "GGUF", "a GGUF");
    std::error_code error;
    if (std::filesystem::exists(file, error) && std::filesystem::file_size(file, error) > 0 &&
        GgufFile(file).text("crumb.model.hash") != weights) {
        fail("{} exists, and is no copy of this model with rotations: choose another name, or remove it first", file.string());
    }
}

}  // namespace

bool is_rotation_tensor(std::string_view name) { return place_of(name).has_value(); }

Artefact read_gguf_rotations(const std::filesystem::path& file, const std::optional<ModelIdentity>& model) {
    const GgufFile gguf(file);
    Artefact artefact;
    for (int64_t i = 0; i < gguf.n_tensors(); ++i) {
        if (const auto place = place_of(gguf.tensor_name(i))) {
            place->field->of(artefact.layers[place->layer]) = read_matrices(gguf, i, *place->field, file.string());
        }
    }
    if (artefact.layers.empty()) {
        fail("{} carries no rotations (tensors blk.N.attn_k_rot.weight): calibrate it with: crumb calibrate -m {}",
             file.string(), file.string());
    }
    if (const int64_t id = gguf_find_key(gguf.meta(), kChecksumKey); id >= 0) {
        const bool text = gguf_get_kv_type(gguf.meta(), id) == GGUF_TYPE_STRING;
        if (!text || gguf_get_val_str(gguf.meta(), id) != tensor_checksum(artefact)) {
            fail("{} is damaged: its rotations do not have the checksum that its metadata gives; copy it again, or calibrate the model",
                 file.string());
        }
    }
    check(artefact, file.string());

    if (gguf_find_key(gguf.meta(), kVersionKey) >= 0) {
        artefact.provenance = read_provenance(gguf, file.string());
        const std::string hash = weights_hash(file);
        if (artefact.provenance.model.hash != hash) {
            fail(
                "{} carries rotations for the weights {}, but its own are {}: they were replaced after calibration; "
                "calibrate the model again with: crumb calibrate -m MODEL",
                file.string(), artefact.provenance.model.hash, hash);
        }
        if (model) {
            artefact.require(*model);
        }
    } else if (model) {
        artefact.provenance.model = *model;
        artefact.provenance.method = fmt::format("imported from the tensors of {}", file.filename().string());
    } else {
        fail("{} does not say which model its rotations are for: give the model that they belong to", file.string());
    }
    return artefact;
}

void write_gguf_rotations(const Artefact& artefact, const std::filesystem::path& model_file,
                          const std::filesystem::path& output) {
    check(artefact, "the artefact");
    const GgufFile source(model_file);
    if (gguf_find_key(source.meta(), "split.count") >= 0) {
        fail(
            "{} is one part of a split model: merge the parts first (llama-gguf-split --merge), rotations go into one "
            "file",
            model_file.string());
    }
    const std::string hash = weights_hash(model_file);
    if (artefact.provenance.model.hash != hash) {
        fail("the artefact was made for the weights {} of '{}', and {} has the weights {}: calibrate that model",
             artefact.provenance.model.hash, artefact.provenance.model.name, model_file.string(), hash);
    }
    require_copy_of(hash, output);
    Copy copy(source);
    for (const auto& [index, layer] : artefact.layers) {
        for (const ArtefactField& field : kArtefactFields) {
            if (const Matrices& m = field.of(layer); m.present()) {
                copy.add_matrices(index, field, m);
            }
        }
    }
    copy.set(artefact);
    copy.write(output);
}

}  // namespace crumb::llama
