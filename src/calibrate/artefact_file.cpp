// The safetensors layout: 8 bytes of header length (little endian), a JSON header, the data of all tensors without
// gaps. Written in one way only (tensors in layer order, keys sorted, header padded to 8 bytes with spaces), so that
// the bytes and their hash are a function of the content.
#include "calibrate/artefact_file.h"

#include <crumb/error.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <set>

#include "base/json_text.h"
#include "calibrate/artefact_fields.h"
#include "calibrate/fingerprint.h"
#include "base/whole_file.h"

namespace crumb {

static_assert(std::endian::native == std::endian::little, "tensors are copied as they are");

namespace {

using nlohmann::json;

constexpr const char* kFormat = "crumb-artefact";
constexpr int kVersion = 1;
constexpr size_t kMostHeaderBytes = size_t(1) << 20;
constexpr size_t kMostFileBytes = size_t(1) << 32;
constexpr uint64_t kMostHeads = 1024, kMostChannels = 1024;
constexpr int kMostLayers = 10000;

template <class... Args>
[[noreturn]] void refuse(const std::string& name, fmt::format_string<Args...> what, Args&&... args) {
    fail("{}: not a usable artefact: {}. Make it again: crumb calibrate -m MODEL -o FILE", name,
         fmt::format(what, std::forward<Args>(args)...));
}

constexpr const char* kSketch = "text_sketch";
constexpr const char *kChecksum = "checksum", *kMetadataChecksum = "metadata_checksum";

json metadata_of(const Provenance& p) {
    const auto text = [](auto number) { return std::to_string(number); };
    json metadata = {{"format", kFormat},
                     {"format_version", text(kVersion)},
                     {"model.name", p.model.name},
                     {"model.architecture", p.model.architecture},
                     {"model.hash", p.model.hash},
                     {"model.n_layer", text(p.model.n_layer)},
                     {"model.n_head", text(p.model.n_head)},
                     {"model.n_head_kv", text(p.model.n_head_kv)},
                     {"model.dim_k", text(p.model.dim_k)},
                     {"model.dim_v", text(p.model.dim_v)},
                     {"method", p.method},
                     {"text_hash", p.text_hash},
                     {"texts", p.texts},
                     {"tokens", text(p.tokens)},
                     {"created_by", p.created_by}};
    if (!p.sketch.empty()) {
        metadata[kSketch] = p.sketch.hex();
    }
    return metadata;
}

// Of all of it but this checksum, keys sorted.
std::string metadata_checksum(json metadata) {
    metadata.erase(kMetadataChecksum);
    Fingerprint fingerprint;
    fingerprint.add_text(json_text(metadata));
    return fingerprint.hex();
}

// At most this deep: header, tensor, array, number. Stops nested input before it costs memory, and refuses
// names that occur twice, of which JSON parsers keep one without a word.
class HeaderGuard {
  public:
    explicit HeaderGuard(const std::string& name) : name_(name) {}

    bool operator()(int depth, json::parse_event_t event, json& parsed) {
        if (depth > 3) {
            refuse(name_, "its header is nested deeper than a list of tensors is");
        }
        if (event == json::parse_event_t::object_start) {
            keys_[depth].clear();
        }
        if (event == json::parse_event_t::key && !keys_[depth - 1].insert(parsed.get<std::string>()).second) {
            refuse(name_, "its header names '{}' twice", parsed.get<std::string>());
        }
        return true;
    }

  private:
    const std::string& name_;
    std::set<std::string> keys_[4];
};

json parse_header(std::span<const std::byte> bytes, const std::string& name) {
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    try {
        json header = json::parse(text, text + bytes.size(), HeaderGuard(name));
        if (!header.is_object()) {
            refuse(name, "its header is not a JSON object");
        }
        return header;
    } catch (const json::exception& e) {
        refuse(name, "its header is not JSON ({})", e.what());
    }
}

class Metadata {
  public:
    Metadata(const json& header, const std::string& name) : name_(name) {
        const auto found = header.find("__metadata__");
        if (found == header.end() || !found->is_object()) {
            refuse(name, "it has no metadata, so another program wrote it");
        }
        values_ = &*found;
        if (text("format") != kFormat) {
            refuse(name, "its format is '{}', expected '{}'", text("format"), kFormat);
        }
        if (number<int>("format_version") != kVersion) {
            refuse(name, "it has format version {}, and this program reads version {}", text("format_version"),
                   kVersion);
        }
    }

    std::string text(const char* key) const {
        const auto found = values_->find(key);
        if (found == values_->end() || !found->is_string()) {
            refuse(name_, "its metadata lacks '{}'", key);
        }
        return found->get<std::string>();
    }

    std::string optional_text(const char* key) const { return values_->contains(key) ? text(key) : ""; }
    const json& values() const { return *values_; }
    const std::string& name() const { return name_; }

    template <class T>
    T number(const char* key) const {
        const std::string value = text(key);
        T result{};
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
        if (error != std::errc{} || end != value.data() + value.size() || result < T{}) {
            refuse(name_, "its metadata gives {} as '{}', which is no count", key, value);
        }
        return result;
    }

  private:
    const std::string& name_;
    const json* values_;
};

Provenance parse_provenance(const Metadata& m) {
    TextSketch sketch;
    try {
        sketch = TextSketch::parse(m.optional_text(kSketch));
    } catch (const Error& e) {
        refuse(m.name(), "{}", e.what());
    }
    return {.model = {.name = m.text("model.name"),
                      .architecture = m.text("model.architecture"),
                      .hash = m.text("model.hash"),
                      .n_layer = m.number<int>("model.n_layer"),
                      .n_head = m.number<int>("model.n_head"),
                      .n_head_kv = m.number<int>("model.n_head_kv"),
                      .dim_k = m.number<int>("model.dim_k"),
                      .dim_v = m.number<int>("model.dim_v")},
            .method = m.text("method"),
            .text_hash = m.text("text_hash"),
            .texts = m.text("texts"),
            .sketch = std::move(sketch),
            .tokens = m.number<uint64_t>("tokens"),
            .created_by = m.text("created_by")};
}

struct Tensor {
    std::string name;
    int layer = 0;
    const ArtefactField* field = nullptr;
    int heads = 0, dim = 0;
    uint64_t begin = 0, end = 0;
};

std::optional<std::vector<uint64_t>> unsigned_array(const json& entry, const char* key) {
    const auto found = entry.find(key);
    if (found == entry.end() || !found->is_array()) {
        return std::nullopt;
    }
    std::vector<uint64_t> values;
    for (const auto& x : *found) {
        if (!x.is_number_unsigned()) {
            return std::nullopt;
        }
        values.push_back(x.get<uint64_t>());
    }
    return values;
}

// "layers.12.k_mean"
Tensor parse_tensor_name(const std::string& tensor, const std::string& name) {
    constexpr std::string_view prefix = "layers.";
    const size_t dot = tensor.find('.', prefix.size());
    if (tensor.starts_with(prefix) && dot != std::string::npos) {
        const std::string number = tensor.substr(prefix.size(), dot - prefix.size());
        int layer = -1;
        std::from_chars(number.data(), number.data() + number.size(), layer);
        const auto field = std::find_if(std::begin(kArtefactFields), std::end(kArtefactFields),
                                        [&](const ArtefactField& f) { return tensor.substr(dot + 1) == f.name; });
        if (field != std::end(kArtefactFields) && layer >= 0 && layer < kMostLayers && std::to_string(layer) == number) {
            return {.name = tensor, .layer = layer, .field = field};
        }
    }
    refuse(name, "it has a tensor '{}', which this program does not know", tensor);
}

Tensor parse_tensor(const std::string& tensor_name, const json& entry, const std::string& name) {
    Tensor tensor = parse_tensor_name(tensor_name, name);
    const auto dtype = entry.is_object() ? entry.find("dtype") : entry.end();
    if (!entry.is_object() || dtype == entry.end() || *dtype != "F32") {
        refuse(name, "tensor {} is not F32 (dtype {})", tensor_name, dtype == entry.end() ? "missing" : dtype->dump());
    }
    const auto shape = unsigned_array(entry, "shape");
    const auto in_range = [](uint64_t n, uint64_t most) { return 1 <= n && n <= most; };
    if (!shape || shape->empty() || !in_range(shape->front(), kMostHeads) || !in_range(shape->back(), kMostChannels) ||
        *shape != shape_of(*tensor.field, int(shape->front()), int(shape->back()))) {
        constexpr const char* kExpected[] = {"[heads, D]", "[heads, 3, D]", "[heads, D, D]"};
        refuse(name, "tensor {} has the shape {}, expected {}, D up to {}", tensor_name,
               entry.value("shape", json()).dump(), kExpected[size_t(tensor.field->shape)], kMostChannels);
    }
    tensor.heads = int(shape->front());
    tensor.dim = int(shape->back());
    const auto offsets = unsigned_array(entry, "data_offsets");
    uint64_t bytes = sizeof(float);
    for (const uint64_t n : *shape) {
        bytes *= n;
    }
    if (!offsets || offsets->size() != 2 || (*offsets)[1] < (*offsets)[0] || (*offsets)[1] - (*offsets)[0] != bytes) {
        refuse(name, "tensor {} lies at {}, but its shape needs {} bytes", tensor_name,
               entry.value("data_offsets", json()).dump(), bytes);
    }
    tensor.begin = (*offsets)[0];
    tensor.end = (*offsets)[1];
    return tensor;
}

}  // namespace

std::string tensor_checksum(const Artefact& artefact) {
    Fingerprint fingerprint;
    for (const auto& [index, layer] : artefact.layers) {
        for (const ArtefactField& field : kArtefactFields) {
            const Matrices& m = field.of(layer);
            if (!m.present()) {
                continue;
            }
            fingerprint.add_text(fmt::format("layers.{}.{}", index, field.name));
            for (const uint64_t n : shape_of(field, m.heads, m.dim)) {
                fingerprint.add_value(n);
            }
            fingerprint.add(std::as_bytes(std::span(m.data)));
        }
    }
    return fingerprint.hex();
}

std::vector<std::byte> serialise(const Artefact& artefact) {
    nlohmann::ordered_json header;
    json metadata = metadata_of(artefact.provenance);
    if (artefact.checked != Artefact::Checked::nothing) {
        metadata[kChecksum] = tensor_checksum(artefact);
    }
    if (artefact.checked == Artefact::Checked::all) {
        metadata[kMetadataChecksum] = metadata_checksum(metadata);
    }
    header["__metadata__"] = std::move(metadata);
    uint64_t offset = 0;
    std::vector<std::span<const float>> data;
    for (const auto& [index, layer] : artefact.layers) {
        for (const ArtefactField& field : kArtefactFields) {
            const Matrices& m = field.of(layer);
            if (!m.present()) {
                continue;
            }
            const uint64_t end = offset + m.data.size() * sizeof(float);
            auto& entry = header[fmt::format("layers.{}.{}", index, field.name)];
            entry["dtype"] = "F32";
            entry["shape"] = shape_of(field, m.heads, m.dim);
            entry["data_offsets"] = {offset, end};
            data.push_back(m.data);
            offset = end;
        }
    }
    std::string text = json_text(header);
    text.append((8 - text.size() % 8) % 8, ' ');

    std::vector<std::byte> bytes;
    bytes.reserve(8 + text.size() + offset);
    const auto append = [&](std::span<const std::byte> piece) {
        bytes.insert(bytes.end(), piece.begin(), piece.end());
    };
    const uint64_t length = text.size();
    append(std::as_bytes(std::span(&length, 1)));
    append(std::as_bytes(std::span(text)));
    for (const auto& piece : data) {
        append(std::as_bytes(piece));
    }
    return bytes;
}

Artefact parse_artefact(std::span<const std::byte> bytes, const std::string& name) {
    uint64_t length = 0;
    if (bytes.size() < sizeof(length)) {
        refuse(name, "it has {} bytes, too few for a header", bytes.size());
    }
    std::memcpy(&length, bytes.data(), sizeof(length));
    if (length > kMostHeaderBytes || length > bytes.size() - sizeof(length)) {
        refuse(name, "its first bytes promise a header of {} bytes, but the file has {} and a header at most {}",
               length, bytes.size(), kMostHeaderBytes);
    }
    const json header = parse_header(bytes.subspan(sizeof(length), length), name);
    const auto data = bytes.subspan(sizeof(length) + length);

    Artefact artefact;
    const Metadata metadata(header, name);
    const std::string of_metadata = metadata.optional_text(kMetadataChecksum);
    if (!of_metadata.empty() && of_metadata != metadata_checksum(metadata.values())) {
        refuse(name, "it is damaged: its metadata has the checksum {}, and says {}", metadata_checksum(metadata.values()),
               of_metadata);
    }
    artefact.provenance = parse_provenance(metadata);
    std::vector<Tensor> tensors;
    for (const auto& [tensor, entry] : header.items()) {
        if (tensor != "__metadata__") {
            tensors.push_back(parse_tensor(tensor, entry, name));
        }
    }
    // Neither gaps nor overlaps: every byte belongs to one tensor.
    std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) { return a.begin < b.begin; });
    uint64_t at = 0;
    for (const Tensor& tensor : tensors) {
        if (tensor.begin != at || tensor.end > data.size()) {
            refuse(name, "tensor {} lies at bytes {} to {}, expected to begin at {} and to end within {}", tensor.name,
                   tensor.begin, tensor.end, at, data.size());
        }
        at = tensor.end;
    }
    if (at != data.size()) {
        refuse(name, "it has {} bytes of data, but its tensors have {}", data.size(), at);
    }

    for (const Tensor& tensor : tensors) {
        Matrices& m = tensor.field->of(artefact.layers[tensor.layer]);
        m.heads = tensor.heads;
        m.dim = tensor.dim;
        m.data.resize((tensor.end - tensor.begin) / sizeof(float));
        std::memcpy(m.data.data(), data.data() + tensor.begin, tensor.end - tensor.begin);
    }
    const std::string checksum = metadata.optional_text(kChecksum);
    artefact.checked = checksum.empty()      ? Artefact::Checked::nothing
                       : of_metadata.empty() ? Artefact::Checked::tensors
                                             : Artefact::Checked::all;
    if (!checksum.empty() && checksum != tensor_checksum(artefact)) {
        refuse(name, "it is damaged: its tensors have the checksum {}, and its metadata says {}", tensor_checksum(artefact),
               checksum);
    }
    check(artefact, name);
    return artefact;
}

Artefact read_artefact(const std::filesystem::path& file) {
    return parse_artefact(read_whole_file(file, "an artefact", kMostFileBytes), file.string());
}

void write_artefact(const Artefact& artefact, const std::filesystem::path& file) {
    check(artefact, file.string());
    require_artefact_output(file);
    write_whole_file(file, serialise(artefact));
}

// A safetensors file: the length of its header, then JSON.
void require_artefact_output(const std::filesystem::path& file) {
    require_replaceable(file, sizeof(uint64_t), "{", "an artefact");
}

}  // namespace crumb
