// What stands behind the C API: the layer object, and exceptions turned into statuses.
#pragma once

#include <crumb/attention.h>
#include <crumb/crumb.h>
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <new>
#include <string>
#include <vector>

struct crumb_layer {
    crumb::Recipe recipe;
    crumb::PageFormat format;
    std::vector<crumb::HeadTables> tables;
    crumb::AttentionMaps maps;  // of the CPU's kernels
    int number;  // the model's own
    int n_head, n_head_kv;
    float scale, softcap;
};

namespace crumb::capi {

// What this build or backend does not do.
class Unsupported : public Error {
  public:
    using Error::Error;
};

class DeviceError : public Error {
  public:
    using Error::Error;
};

crumb_status failed(crumb_status status, const char* text);

template <class Body>
crumb_status guard(Body body) noexcept {
    try {
        body();
        return CRUMB_OK;
    } catch (const Unsupported& e) {
        return failed(CRUMB_ERROR_UNSUPPORTED, e.what());
    } catch (const DeviceError& e) {
        return failed(CRUMB_ERROR_DEVICE, e.what());
    } catch (const Error& e) {
        return failed(CRUMB_ERROR_ARGUMENT, e.what());
    } catch (const std::bad_alloc&) {
        return failed(CRUMB_ERROR_MEMORY, "out of host memory");
    } catch (const std::exception& e) {
        return failed(CRUMB_ERROR_INTERNAL, e.what());
    } catch (...) {
        return failed(CRUMB_ERROR_INTERNAL, "unknown error");
    }
}

template <class T>
T& need(T* pointer, const char* what) {
    if (!pointer) fail("{} is NULL", what);
    return *pointer;
}

// Counts of heads and channels that there can be.
void check(const crumb_layer_shape& shape);

// A backend: one table of functions each.
struct Backend {
    void (*workspace_bytes)(const crumb_layer&, const crumb_step&, size_t& bytes);
    void (*plan)(const crumb_layer&, const crumb_step&, void* stream);
    void (*attend)(const crumb_layer&, const crumb_step&, const crumb_io&, void* stream);
    void (*store)(const crumb_layer&, const crumb_rows&, void* stream);
    void (*encode)(const crumb_layer&, const crumb_encode_batch&, void* stream);
    void (*copy)(size_t bytes, std::byte* to, size_t to_stride, const uint32_t* to_ids, const std::byte* from,
                 size_t from_stride, const uint32_t* from_ids, size_t n, void* stream);
};

extern const Backend cpu_backend;
const Backend* cuda_backend();  // null in a build without it
// Tables for a device, which CUDA alone has; in a build without it they throw Unsupported.
size_t tables_bytes(const crumb_layer& layer);
void tables_write(const crumb_layer& layer, void* tables, size_t bytes);

const Backend& backend(crumb_backend which);

}  // namespace crumb::capi
