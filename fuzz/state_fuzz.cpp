#include "state.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    crumb::fuzz::state(std::as_bytes(std::span(data, size)));
    return 0;
}
