// What crumb reads of a GGUF file itself: the fingerprint of the weights, and rotations that travel in it. Any bytes are
// such a file or an Error. ggml's parser does the first of it; its log is not shown.
#include <crumb/error.h>
#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "gguf_rotation.h"
#include "model_identity.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int file = [] {
        ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
        return memfd_create("model.gguf", 0);
    }();
    const std::string name = "/proc/self/fd/" + std::to_string(file);
    if (ftruncate(file, 0) != 0 || pwrite(file, data, size, 0) != ssize_t(size)) {
        return 0;
    }
    try {
        crumb::llama::weights_hash(name);
    } catch (const crumb::Error&) {
    }
    try {
        crumb::llama::read_gguf_rotations(name, crumb::ModelIdentity{});
    } catch (const crumb::Error&) {
    }
    return 0;
}
