#include "model_identity.h"

#include <crumb/error.h>

#include <array>
#include <deque>
#include <map>

#include "calibrate/fingerprint.h"
#include "gguf_file.h"
#include "gguf_rotation.h"
#include "llama-model.h"
#include "llama.h"

namespace crumb::llama {

namespace {

std::string metadata(const llama_model& model, const char* key) {
    std::array<char, 256> text{};
    const int n = llama_model_meta_val_str(&model, key, text.data(), text.size());
    return n < 0 ? "" : text.data();
}

// All files of a split model, given one of them.
std::vector<std::filesystem::path> parts(const std::filesystem::path& file) {
    const GgufFile gguf(file);
    const auto number = [&](const char* key) {
        const int64_t id = gguf_find_key(gguf.meta(), key);
        return id >= 0 && gguf_get_kv_type(gguf.meta(), id) == GGUF_TYPE_UINT16 ? int(gguf_get_val_u16(gguf.meta(), id))
                                                                                : 0;
    };
    const int count = number("split.count"), index = number("split.no");
    if (count <= 1) {
        return {file};
    }
    std::string prefix(file.string().size() + 1, '\0');
    if (llama_split_prefix(prefix.data(), prefix.size(), file.c_str(), index, count) <= 0) {
        fail("{} is part {} of {} of a model, but is not named so (NAME-{:05}-of-{:05}.gguf): give it its name back",
             file.string(), index + 1, count, index + 1, count);
    }
    std::vector<std::filesystem::path> files;
    for (int i = 0; i < count; ++i) {
        std::string part(file.string().size() + 32, '\0');
        part.resize(llama_split_path(part.data(), part.size(), prefix.c_str(), i, count));
        files.emplace_back(part);
    }
    return files;
}

}  // namespace

std::string weights_hash(const std::filesystem::path& file) {
    std::deque<GgufFile> files;
    std::map<std::string, std::pair<const GgufFile*, int64_t>> tensors;
    for (const auto& part : parts(file)) {
        const GgufFile& gguf = files.emplace_back(part);
        for (int64_t i = 0; i < gguf.n_tensors(); ++i) {
            const std::string name = gguf.tensor_name(i);
            if (!is_rotation_tensor(name)) {
                tensors[name] = {&gguf, i};
            }
        }
    }
    Fingerprint fingerprint;
    for (const auto& [name, place] : tensors) {
        const auto& [gguf, i] = place;
        fingerprint.add_text(name);
        fingerprint.add_value(int32_t(gguf_get_tensor_type(gguf->meta(), i)));
        fingerprint.add(std::as_bytes(std::span(gguf_get_tensor_ne(gguf->meta(), i), GGML_MAX_DIMS)));
        gguf->read(i, [&](std::span<const std::byte> bytes) { fingerprint.add(bytes); });
    }
    return fingerprint.hex();
}

ModelIdentity identify(const llama_model& model, const std::filesystem::path& file) {
    const auto& hparams = model.hparams;
    ModelIdentity id;
    id.name = metadata(model, "general.name");
    if (id.name.empty()) {
        id.name = file.stem().string();
    }
    id.architecture = metadata(model, "general.architecture");
    id.n_layer = int(hparams.n_layer());
    for (int il = 0; il < id.n_layer; ++il) {
        if (hparams.n_head_kv(il) == 0 || hparams.is_recr(il)) {
            continue;
        }
        id.n_head = int(hparams.n_head(il));
        id.n_head_kv = int(hparams.n_head_kv(il));
        id.dim_k = int(hparams.n_embd_head_k(il));
        id.dim_v = int(hparams.n_embd_head_v(il));
        break;
    }
    id.hash = weights_hash(file);
    return id;
}

}  // namespace crumb::llama
