#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    crumb::fuzz::artefact(std::as_bytes(std::span(data, size)));
    return 0;
}
