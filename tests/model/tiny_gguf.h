// A GGUF of a few kilobytes with random F32 weights and no vocabulary: an architecture without its real weights.
#pragma once

#include <crumb/error.h>

#include <ggml.h>
#include <gguf.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace crumb::llama {

class TinyGguf {
  public:
    explicit TinyGguf(const std::string& architecture, unsigned seed = 1)
        : architecture_(architecture), random_(seed) {
        gguf_set_val_str(gguf_.get(), "general.architecture", architecture.c_str());
        gguf_set_val_str(gguf_.get(), "tokenizer.ggml.model", "none");
    }

    // Keys of the architecture, without its name in front.
    void set(const std::string& key, uint32_t value) { gguf_set_val_u32(gguf_.get(), (architecture_ + "." + key).c_str(), value); }
    void set(const std::string& key, float value) { gguf_set_val_f32(gguf_.get(), (architecture_ + "." + key).c_str(), value); }
    void set(const std::string& key, bool value) { gguf_set_val_bool(gguf_.get(), (architecture_ + "." + key).c_str(), value); }
    // A whole key.
    void set_global(const std::string& key, uint32_t value) { gguf_set_val_u32(gguf_.get(), key.c_str(), value); }

    // Normal values of this mean and deviation; ne in ggml's order, innermost first.
    void tensor(const std::string& name, const std::vector<int64_t>& ne, float deviation = 0.1f, float mean = 0.0f) {
        ggml_tensor* t = ggml_new_tensor(ggml_.get(), GGML_TYPE_F32, int(ne.size()), ne.data());
        ggml_set_name(t, name.c_str());
        std::normal_distribution<float> normal(mean, deviation);
        for (int64_t i = 0; i < ggml_nelements(t); ++i) { ggml_get_data_f32(t)[i] = normal(random_); }
        gguf_add_tensor(gguf_.get(), t);
    }

    void write(const std::filesystem::path& path) const {
        if (!gguf_write_to_file(gguf_.get(), path.c_str(), false)) { fail("cannot write {}", path.string()); }
    }

  private:
    static constexpr size_t kArena = 64 << 20;

    std::string architecture_;
    std::mt19937 random_;
    std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf_{gguf_init_empty(), gguf_free};
    std::unique_ptr<ggml_context, decltype(&ggml_free)> ggml_{ggml_init({.mem_size = kArena, .mem_buffer = nullptr, .no_alloc = false}),
                                                              ggml_free};
};

}  // namespace crumb::llama
