// A GGUF file opened for reading: its metadata through ggml's parser, its tensor data in pieces.
#pragma once

#include <crumb/error.h>

#include <algorithm>
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
    // Throws Error if there is no such file, it is not GGUF, or it ends before its tensors do.
    explicit GgufFile(const std::filesystem::path& file)
        : file_(file), stream_(std::fopen(file.c_str(), "rb"), std::fclose) {
        if (!stream_) {
            fail("cannot open {}: no such file, or it may not be read", file.string());
        }
        meta_.reset(gguf_init_from_file(file.c_str(), {.no_alloc = true, .ctx = nullptr}));
        if (!meta_) {
            fail("{} is not a GGUF file, or it is damaged (ggml's message is above)", file.string());
        }
        // Checked at once, so that nobody makes room for a tensor that is not there.
        std::fseek(stream_.get(), 0, SEEK_END);
        const long end = std::ftell(stream_.get());
        const size_t data = gguf_get_data_offset(meta()), room = size_t(end) - std::min(size_t(end), data);
        for (int64_t i = 0; i < n_tensors(); ++i) {
            const size_t offset = gguf_get_tensor_offset(meta(), i), size = gguf_get_tensor_size(meta(), i);
            if (offset > room || size > room - offset) { incomplete(i); }
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
                incomplete(i);
            }
            f(std::span<const std::byte>(piece));
        }
    }

  private:
    [[noreturn]] void incomplete(int64_t i) const {
        fail("{} ends within tensor {}: it is not complete, copy or download it again", file_.string(), tensor_name(i));
    }

    std::filesystem::path file_;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream_;
    GgufPtr meta_;
};

}  // namespace crumb::llama
