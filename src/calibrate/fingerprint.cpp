#include "calibrate/fingerprint.h"

#include <crumb/error.h>
#include <xxhash.h>

#include <cstdint>

namespace crumb {

Fingerprint::Fingerprint() : state_(XXH3_createState()) {
    CRUMB_ASSERT(state_);
    XXH3_128bits_reset(state_);
}

Fingerprint::~Fingerprint() { XXH3_freeState(state_); }

void Fingerprint::add(std::span<const std::byte> bytes) { XXH3_128bits_update(state_, bytes.data(), bytes.size()); }

void Fingerprint::add_text(const std::string& text) {
    add_value(uint64_t(text.size()));
    add(std::as_bytes(std::span(text)));
}

std::string Fingerprint::hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_);
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace crumb
