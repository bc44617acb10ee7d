// A GGUF file opened for reading: its metadata through ggml's parser, its tensor data in pieces.
#pragma once

#include <crumb/error.h>

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gguf.h"

namespace crumb::llama {

struct FreeGguf {
    void operator()(gguf_context* gguf) const { gguf_free(gguf); }
};
using GgufPtr = std::unique_ptr<gguf_context, FreeGguf>;

class GgufFile {
  public:
    // Throws Error if there is no such file, or it is not GGUF.
    explicit GgufFile(const std::filesystem::path& file)
        : file_(file), stream_(std::fopen(file.c_str(), "rb"), std::fclose) {
        if (!stream_) {
            fail("cannot open {}: no such file, or it may not be read", file.string());
        }
        meta_.reset(gguf_init_from_file(file.c_str(), {.no_alloc = true, .ctx = nullptr}));
        if (!meta_) {
            fail("{} is not a GGUF file, or it is damaged (ggml's message is above)", file.string());
        }
    }

    const gguf_context* meta() const { return meta_.get(); }
    int64_t n_tensors() const { return gguf_get_n_tensors(meta()); }
    std::string tensor_name(int64_t i) const { return gguf_get_tensor_name(meta(), i); }

    std::string text(const char* key) const {
        const int64_t id = gguf_find_key(meta(), key);
        return id >= 0 && gguf_get_kv_type(meta(), id) == GGUF_TYPE_STRING ? gguf_get_val_str(meta(), id) : "";
    }

    // Calls f(span of bytes) for the data of tensor i, in order.
    template <class F>
    void read(int64_t i, F f) const {
        const size_t size = gguf_get_tensor_size(meta(), i);
        std::fseek(stream_.get(), long(gguf_get_data_offset(meta()) + gguf_get_tensor_offset(meta(), i)), SEEK_SET);
        std::vector<std::byte> piece(std::min(size, size_t(1) << 20));
        for (size_t at = 0; at < size; at += piece.size()) {
            piece.resize(std::min(piece.size(), size - at));
            if (std::fread(piece.data(), 1, piece.size(), stream_.get()) != piece.size()) {
                fail("{} ends within tensor {}: it is not complete, copy or download it again", file_.string(),
                     tensor_name(i));
            }
            f(std::span<const std::byte>(piece));
        }
    }

  private:
    std::filesystem::path file_;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream_;
    GgufPtr meta_;
};

}  // namespace crumb::llama
